"""Compare servers under one load: the CPU time of their processes per streamed token.

For other servers only whole processes can be measured, which includes the model's work. So each load runs twice, once
streamed and once with whole answers; both produce the same number of tokens from prompts of the same lengths, and the
difference is the cost of sending each token separately (text is produced in both). For localllm with the paced model,
the engine's thread is measured separately too.
Does not know: what is printed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import psutil

from localllm.errors import ConfigError
from localllm.tuning.load_client import Endpoint, fetch_json
from localllm.tuning.report import quantile
from scripts.bench_peers.engines import EngineFailed, ServerEngine, tree_cpu_s
from scripts.bench_peers.files import Files
from scripts.bench_peers.known import Room, spec_of
from scripts.stream_bench.load import Load
from scripts.stream_bench.paced import Pace

ROOT = Path(__file__).resolve().parents[2]
LOAD_S = 600.0
LONGEST_PROMPT = 96  # tokens, with some margin
CHOICES = ("paced", "localllm", "llama.cpp", "vllm")  # engines that accept prompts as ids
FOR_EVER = 1 << 60  # warm-up steps that the paced model's meter never reaches


class Server(Protocol):
    """A server that accepts requests."""

    endpoint: Endpoint
    model: str

    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A server known by its address and process id. engine_thread: localllm's, if known."""

    endpoint: Endpoint
    model: str
    pid: int
    engine_thread: int = 0

    @classmethod
    def at(cls, url: str, pid: int) -> Running:
        """Return the server at a URL. Raises `ConfigError` if no server answers, or the process does not exist."""
        endpoint = Endpoint.from_url(url)
        if endpoint.tls or not psutil.pid_exists(pid):
            raise ConfigError("A server on this machine is measured, over plain HTTP.", f"Given: {url}, process {pid}.")
        models = asyncio.run(fetch_json(endpoint, "/models"))["data"]
        return cls(endpoint, str(models[0]["id"]) if models else "", pid)

    def cpu_s(self) -> float:
        return tree_cpu_s(self.pid)

    def engine_cpu_s(self) -> float:
        threads = psutil.Process(self.pid).threads()
        return sum(each.user_time + each.system_time for each in threads if each.id == self.engine_thread)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one load, per token."""

    cpu_us: float
    engine_cpu_us: float  # the engine thread's part, if known
    tokens_per_s: float
    gap_p99_ms: float | None


def use(server: Server, streams: int, tokens: int, *, streamed: bool, seed: int, read_every_ms: int) -> Usage:
    """Put one load on a server. Raises `EngineFailed` unless each answer has all its tokens."""
    to = server.endpoint
    load = Load(to.host, to.port, to.base_path, server.model, streams, tokens, streamed, seed, read_every_ms)
    command = [sys.executable, "-m", "scripts.stream_bench.load", json.dumps(asdict(load))]
    cpu_s, engine_cpu_s = server.cpu_s(), _engine_cpu_s(server)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LOAD_S, check=True)
    cpu_s, engine_cpu_s = server.cpu_s() - cpu_s, _engine_cpu_s(server) - engine_cpu_s
    said = json.loads(done.stdout)
    if set(said["tokens"]) != {tokens}:
        raise EngineFailed(f"Answers have {sorted(set(said['tokens']))} tokens, not {tokens}. {said['refusal']}")
    count = streams * tokens
    gaps = sorted(said["gap_s"])
    return Usage(
        1e6 * cpu_s / count,
        1e6 * engine_cpu_s / count,
        count / said["seconds"],
        1e3 * quantile(gaps, 0.99) if gaps else None,
    )


def _engine_cpu_s(server: Server) -> float:
    return server.engine_cpu_s() if isinstance(server, Running) else 0.0


# Starting servers ---------------------------------------------------------------------------------------------------


@contextmanager
def paced(pace: Pace) -> Iterator[Running]:
    """Start localllm with a model that takes time but does no work."""
    command = [sys.executable, "-m", "scripts.stream_bench.server", "server", json.dumps(asdict(pace))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, thread = map(int, process.stdout.readline().split())
        yield Running(Endpoint.from_url(f"http://127.0.0.1:{port}"), "paced", process.pid, thread)
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def started(name: str, programs: Mapping[str, str], files: Files, room: Room, log: Path) -> Iterator[ServerEngine]:
    """Start one of `CHOICES` on the model in `files`. Raises `EngineFailed`, and `ConfigError` if it does not exist."""
    spec = spec_of(name, programs, room)
    engine = ServerEngine(spec, files.gguf if spec.reads_gguf else files.folder, log)
    try:
        yield engine
    finally:
        engine.stop()


def room_for(streams: int, tokens: int) -> Room:
    """Return equal limits with one thread: with more, waiting for a tiny model's shares takes CPU time."""
    return Room(context=-(-(LONGEST_PROMPT + tokens) // 256) * 256, streams=streams, threads=1, device="cpu")
