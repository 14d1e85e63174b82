"""A program of ours at the other end of a pty."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import psutil


class Terminal:
    """A program at the other end of a pty."""

    def __init__(self, *words: str) -> None:
        ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "localllm", *words]
        self.program = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
        )  # fmt: skip
        os.close(theirs)
        self._ours, self.seen = ours, ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Once it waits: between readline's prompt and its wait Python keeps a signal until a key comes."""
        program = psutil.Process(self.program.pid)
        while program.status() == psutil.STATUS_RUNNING:
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)

    def wait_for(self, pattern: str) -> str:
        """What came up to and with the pattern; the rest is left for the next call."""
        until = time.monotonic() + 30
        while not (match := re.search(pattern, self.seen, re.S)):
            assert time.monotonic() < until, f"{pattern} is not in {self.seen[-2000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 4096).decode(errors="replace").replace("\r\n", "\n")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        os.close(self._ours)
