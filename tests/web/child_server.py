"""`localllm serve MODEL` as a process of its own, with a client beside it that measures what others feel.

What a test cannot see from inside shows here: a native crash is an exit code, a frozen event loop is a wait for
/health, a leak is resident memory.
Does not know: what is done to the server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import psutil

import localllm

DEMO = Path(localllm.__file__).parent / "models" / "demo"
START_S, STOP_S = 180.0, 60.0


class Felt(NamedTuple):
    """What one request of the bystander took."""

    what: str  # health or stream
    began_s: float  # time.monotonic()
    took_s: float  # of a stream: the longest wait for its next piece
    complaint: str


class ChildServer:
    """Runs until the `with` block ends; `exit_code` says afterwards how it ended. `files`: what it may find on disk."""

    def __init__(self, folder: Path, *flags: str, model: str = "demo", with_bystander: bool = True) -> None:
        self.folder, self.flags, self.model = folder, flags, model
        self.log_path = folder / "server.log"
        self.port = 0
        self.exit_code: int | None = None
        self._with_bystander = with_bystander
        self._bystander: Bystander | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "XDG_DATA_HOME": str(self.folder / "data"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_RUNTIME_DIR": str(self.folder),
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "localllm", "serve", self.model, "--port", str(self.port), *self.flags]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.exit_code = None
        self._wait_ready()
        if self._with_bystander:
            self._bystander = Bystander(self.port)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bystander is not None:
            self._bystander.close()
        self.stop()

    def stop(self) -> int:
        """Ask it to end; its exit code. One that does not end is killed, and says so."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self.exit_code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()
        return self.exit_code

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if self.died is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self.log()[-2000:]}")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bystander(self) -> Bystander:
        assert self._bystander is not None
        return self._bystander

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def died(self) -> int | None:
        """The exit code of a server that ended by itself."""
        assert self._process is not None
        return self._process.poll()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def rss(self) -> int:
        """Bytes of resident memory, 0 for a server that has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False, **options)

    def engine(self) -> dict[str, Any]:
        """The engine's snapshot."""
        [model] = [each for each in self.get("/localllm/v1/models/stats").json()["data"] if each["id"] == "demo"]
        stats: dict[str, Any] = model["stats"]
        return stats


class Bystander:
    """tests/web/bystander.py, and what it has felt so far."""

    def __init__(self, port: int) -> None:
        self.felt: list[Felt] = []
        self._news = threading.Condition()
        command = [sys.executable, "-m", "tests.web.bystander", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self.settle(time.monotonic(), "stream")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # what it waits for may never come
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.felt.append(Felt(*json.loads(line)))
                self._news.notify_all()

    def settle(self, since_s: float, what: str = "health", patience_s: float = 120.0) -> bool:
        """Wait until a request that began after `since_s` has been answered: none is still held up by what was."""
        with self._news:
            return self._news.wait_for(
                lambda: any(each.what == what and each.began_s >= since_s for each in reversed(self.felt)), patience_s
            )

    def since(self, since_s: float, what: str) -> list[Felt]:
        """What was answered after `since_s`."""
        with self._news:
            return [each for each in self.felt if each.what == what and each.began_s + each.took_s >= since_s]

    def longest_s(self, since_s: float, what: str) -> float:
        return max((each.took_s for each in self.since(since_s, what)), default=0.0)


def copy_of_demo(folder: Path, **changed: str) -> Path:
    """A checkpoint like the demo model; `changed`: a file's name without its ending, and other text for it."""
    folder.mkdir(parents=True)
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".safetensors"):
            if path.stem in changed:
                (folder / path.name).write_text(changed[path.stem])
            elif path.suffix == ".json":
                shutil.copy(path, folder / path.name)
            else:
                (folder / path.name).symlink_to(path)
    return folder
