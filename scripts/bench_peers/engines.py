"""Engines as adapters: launch, wait until ready, answer requests, count what they used, stop by process id.

Every engine runs in processes of its own, started here and stopped here. A server is driven over HTTP by the load
client of localllm; transformers' `generate` runs in a child that reads requests from a pipe, one at a time.
Does not know: scenarios, tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from localllm.errors import ConfigError
from localllm.tuning.load_client import Endpoint, LoadClient, fetch_json
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import WorkloadRequest

READY_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30
REPOSITORY = Path(__file__).resolve().parent.parent.parent


class EngineFailed(Exception):
    """The engine ended or never became ready; the message quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine. `command` None: transformers in a child process. {model} and {port} are filled in."""

    name: str
    command: tuple[str, ...] | None
    env: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"  # of transformers; a command says its own


class Engine(Protocol):
    """A running engine."""

    name: str
    one_at_a_time: bool

    def ask(self, requests: Sequence[WorkloadRequest], concurrency: int) -> list[RequestTimes]: ...

    def greedy_text(self, request: WorkloadRequest) -> str: ...

    def cpu_s(self) -> float: ...

    def memory_bytes(self) -> int: ...

    def stop(self) -> None: ...


def launch(spec: EngineSpec, model: Path, log: Path) -> Engine:
    """Start the engine and wait until it answers. Raises `EngineFailed`."""
    if spec.command is None:
        return TransformersEngine(spec, model, log)
    return ServerEngine(spec, model, log)


class _Process:
    """A child in a process group of its own, its output in a log file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, piped: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log
        self._log = log.open("w", encoding="utf-8")
        pipe = subprocess.PIPE if piped else None
        self.child = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=pipe,
            stdout=pipe or self._log,
            stderr=self._log,
            text=piped or None,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def last_words(self) -> str:
        self._log.flush()
        return "\n".join(self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def cpu_s(self) -> float:
        return tree_cpu_s(self.child.pid)

    def memory_bytes(self) -> int:
        total = 0
        for process in tree(self.child.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """Ask the process group to end, insist after a while."""
        group = self.child.pid  # its own session: group id and process id are one
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(STOP_TIMEOUT_S)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # workers that outlived their parent
        self._log.close()


class ServerEngine:
    """Any OpenAI-compatible server that a command starts."""

    one_at_a_time = False

    def __init__(self, spec: EngineSpec, model: Path, log: Path) -> None:
        assert spec.command is not None
        self.name, port = spec.name, free_port()
        command = [part.format(model=model, port=port) for part in spec.command]
        self._process = _Process(command, spec.env, log)
        self.endpoint = Endpoint.from_url(f"http://127.0.0.1:{port}")
        try:
            self.model = self._wait_until_ready()
        except BaseException:
            self._process.stop()
            raise

    def _wait_until_ready(self) -> str:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.has_ended:
                raise EngineFailed(f"{self.name} ended before it was ready:\n{self._process.last_words()}")
            with contextlib.suppress(ConfigError):
                models = asyncio.run(fetch_json(self.endpoint, "/models"))["data"]
                if models:
                    return str(models[0]["id"])
            time.sleep(0.25)
        raise EngineFailed(f"{self.name} was not ready after {READY_TIMEOUT_S} s:\n{self._process.last_words()}")

    def ask(self, requests: Sequence[WorkloadRequest], concurrency: int) -> list[RequestTimes]:
        return asyncio.run(LoadClient(self.endpoint, self.model).run(requests, concurrency))

    def greedy_text(self, request: WorkloadRequest) -> str:
        fields = {
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"http://{self.endpoint.host}:{self.endpoint.port}{self.endpoint.base_path}/completions"
        asked = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def cpu_s(self) -> float:
        return self._process.cpu_s()

    def memory_bytes(self) -> int:
        return self._process.memory_bytes()

    def stop(self) -> None:
        self._process.stop()


class TransformersEngine:
    """transformers' `generate`, batch 1, in a child process."""

    one_at_a_time = True

    def __init__(self, spec: EngineSpec, model: Path, log: Path) -> None:
        self.name = spec.name
        child = Path(__file__).with_name("transformers_child.py")
        self._process = _Process([sys.executable, str(child), str(model), spec.dtype], spec.env, log, piped=True)
        try:
            self._read()  # says that the model is loaded
        except BaseException:
            self._process.stop()
            raise

    def ask(self, requests: Sequence[WorkloadRequest], concurrency: int) -> list[RequestTimes]:
        answers = [self._generate(request) for request in requests]
        return [
            RequestTimes(
                started_s=answer["started_s"],
                finished_s=answer["token_times_s"][-1],
                prompt_tokens=len(request.prompt_token_ids),
                output_tokens=len(answer["token_times_s"]),
                first_token_s=answer["token_times_s"][0],
                inter_token_s=tuple(
                    b - a for a, b in zip(answer["token_times_s"], answer["token_times_s"][1:], strict=False)
                ),
            )
            for request, answer in zip(requests, answers, strict=True)
        ]

    def greedy_text(self, request: WorkloadRequest) -> str:
        return str(self._generate(request)["text"])

    def _generate(self, request: WorkloadRequest) -> dict[str, Any]:
        line = json.dumps({"prompt_token_ids": request.prompt_token_ids, "max_tokens": request.max_tokens})
        _pipe(self._process.child.stdin).write(line + "\n")
        _pipe(self._process.child.stdin).flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = _pipe(self._process.child.stdout).readline()
        if not line:
            raise EngineFailed(f"{self.name} ended:\n{self._process.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        return self._process.cpu_s()

    def memory_bytes(self) -> int:
        return self._process.memory_bytes()

    def stop(self) -> None:
        self._process.stop()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything that it has started; nothing where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def tree_cpu_s(pid: int) -> float:
    """CPU time of the process and its children, user and system."""
    total_s = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def vllm_environment() -> dict[str, str]:
    """What vLLM's documentation recommends for a CPU, without its telemetry."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
