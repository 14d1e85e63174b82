"""Servers under comparison: launch, wait until ready, send requests, measure resources, stop by process id.

Each runs in its own processes, started and stopped here, and is driven over HTTP by localllm's load client.
Does not know: which engines there are (known.py), loads, tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from localllm.errors import ConfigError
from localllm.tuning.load_client import Endpoint, LoadClient, fetch_json
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import WorkloadRequest
from scripts.bench_peers.texts import TextClient, Texts

READY_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30
FIRST = WorkloadRequest(tuple(range(100, 108)), 2)
NOT_YET = ("cannot connect", "connection lost", "status 503")  # prefixes of temporary errors


class EngineFailed(Exception):
    """The engine ended or did not become ready; the message quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine, and its properties. {model} and {port} in the command are filled in."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    reads_gguf: bool = False  # the model is a file instead of a folder
    reads_text: bool = False  # prompts are sent as text: `transformers serve`
    differs: tuple[str, ...] = ()  # differences from the other engines' settings, in words


class _Process:
    """A child in its own process group, with its output in a log file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log
        self._log = log.open("w", encoding="utf-8")
        self.child = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def last_words(self) -> str:
        self._log.flush()
        return "\n".join(self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """Terminate the process group; kill it after a timeout."""
        group = self.child.pid  # it leads its session: group id and process id are equal
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
    """An OpenAI-compatible server started by a command. texts: for a server that only reads text."""

    def __init__(self, spec: EngineSpec, model: Path, log: Path, texts: Texts | None = None) -> None:
        """Start the server. Raises `EngineFailed` if it is not ready in time, `OSError` if there is no program."""
        self.name, port = spec.name, free_port()
        command = [part.format(model=model, port=port) for part in spec.command]
        self._process = _Process(command, spec.env, log)
        self.endpoint = Endpoint.from_url(f"http://127.0.0.1:{port}")
        try:
            if spec.reads_text:
                assert texts is not None, "an engine that reads text needs `texts`"
                self.model = str(model)
                self._client: LoadClient = TextClient(self.endpoint, self.model, texts)
            else:
                self.model = self._wait_until(self._listed_model)
                self._client = LoadClient(self.endpoint, self.model)
            self._first = texts.worded(FIRST) if texts is not None else FIRST
            self._wait_until(self._first_answer)
        except BaseException:
            self._process.stop()
            raise

    def _wait_until(self, what: Callable[[], str]) -> str:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.has_ended:
                raise EngineFailed(f"{self.name} ended before it was ready:\n{self._process.last_words()}")
            if there_is := what():
                return there_is
            time.sleep(0.25)
        raise EngineFailed(f"{self.name} was not ready after {READY_TIMEOUT_S} s:\n{self._process.last_words()}")

    def _listed_model(self) -> str:
        with contextlib.suppress(ConfigError):
            if models := asyncio.run(fetch_json(self.endpoint, "/models"))["data"]:
                return str(models[0]["id"])
        return ""

    def _first_answer(self) -> str:
        """Send a request, as some list their model while loading. Raises `EngineFailed` if it is refused."""
        (one,) = self.ask([self._first], 1)
        if one.error is not None and not one.error.startswith(NOT_YET):
            raise EngineFailed(f"{self.name}: {one.error}")
        return "" if one.error is not None else "ready"

    def ask(self, requests: Sequence[WorkloadRequest], streams: int) -> list[RequestTimes]:
        return asyncio.run(self._client.run(requests, streams))

    def last_words(self) -> str:
        """Return the end of the log of a server that has ended."""
        return f"\n{self._process.last_words()}" if self._process.has_ended else ""

    def greedy_text(self, request: WorkloadRequest) -> str:
        fields = self._client.fields(request)
        del fields["stream"], fields["stream_options"]
        url = f"http://{self.endpoint.host}:{self.endpoint.port}{self.endpoint.base_path}/completions"
        asked = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def cpu_s(self) -> float:
        return tree_cpu_s(self._process.child.pid)

    def memory_bytes(self) -> int:
        """Return the resident bytes now. Pages shared by several processes count several times."""
        total = 0
        for process in tree(self._process.child.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def peak_bytes(self) -> int:
        """Return the sum of the processes' peak memory, loading included; outside Linux, the current memory."""
        return sum(_peak_bytes(process.pid) for process in tree(self._process.child.pid)) or self.memory_bytes()

    def stop(self) -> None:
        self._process.stop()


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def tree_cpu_s(pid: int) -> float:
    """Return the user and system CPU time of the process and its children."""
    total_s = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:  # it has ended, or this is not Linux
        return 0
    return sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
