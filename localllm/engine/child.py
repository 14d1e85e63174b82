"""The engine's own process: builds an engine, runs its loop, and answers the process that started it.

    python -m localllm.engine.child FD PARENT          # engine/process.py starts it so

The main thread reads the socket, the loop has its thread, and what a step brings leaves in one write. The process ends
with its parent, whatever becomes of that: the socket closes, and Linux sends a signal besides. Ctrl-C is the parent's
business.
Does not know: what it builds (the parent names a function), asyncio, text.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from localllm.engine.loop import EngineLoop
from localllm.engine.outputs import EngineOutput
from localllm.engine.stats import EngineStats
from localllm.engine.wire import Kind, decode_requests, encode_outputs, encode_stats, frame, frames_of, pickled
from localllm.errors import EngineError, EngineStopped, LocalLLMError

log = logging.getLogger(__name__)

Build = Callable[[Any, Callable[[object], None]], tuple[EngineLoop, object]]
"""(argument, report progress) -> (the engine, what the parent is told about it)."""

PR_SET_PDEATHSIG = 1


class Child:
    """One engine at the end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._loop: EngineLoop | None = None
        self._handles: dict[str, int] = {}  # of open requests
        self._outbox: list[bytes] = []  # this step's frames
        self._published: EngineStats | None = None

    def run(self) -> None:
        """Answer until told to stop, or until the parent is gone."""
        for kind, payload in frames_of(self._connection):
            if kind is Kind.BUILD:
                # A thread that ends with the build: libgomp counts the team of every thread that has ever computed.
                threading.Thread(target=self._build, args=(payload,), name="localllm-loader", daemon=True).start()
            elif kind is Kind.STOP:
                self._stop()
                return
            else:
                self._answer(kind, payload)

    def _answer(self, kind: Kind, payload: bytes) -> None:
        assert self._loop is not None, "asked before there was an engine"
        if kind is Kind.START:
            self._loop.start()
        elif kind is Kind.SUBMIT:
            self._submit(self._loop, payload)
        elif kind is Kind.CANCEL:
            self._loop.cancel(payload.decode())

    def _build(self, payload: bytes) -> None:
        builder, argument, log_level = pickle.loads(payload)
        logging.basicConfig(level=log_level, handlers=[_LogOverSocket(self._send)], force=True)
        try:
            module, name = builder.split(":")
            build: Build = getattr(importlib.import_module(module), name)
            loop, told = build(argument, lambda news: self._send(pickled(Kind.PROGRESS, news)))
        except BaseException as error:
            self._send(pickled(Kind.FAILED, as_local_error(error)))
            return
        loop.deliver, loop.publish, loop.on_lost = self._deliver, self._publish, self._on_lost
        self._loop = loop
        self._send(frame(Kind.STATS, encode_stats(loop.stats())) + pickled(Kind.BUILT, told))

    def _submit(self, loop: EngineLoop, payload: bytes) -> None:
        asked = decode_requests(payload)
        self._handles.update((request.request_id, handle) for handle, request in asked)
        try:
            loop.submit(*(request for _, request in asked))
        except EngineStopped as error:  # the parent had not heard yet
            refused = [
                EngineOutput(request.request_id, finish_reason="error", error=loop.lost or error)
                for _, request in asked
            ]
            self._send(frame(Kind.STEP, encode_outputs(refused, self._handles)))

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop.runner.close()
        self._send(frame(Kind.ENDED))

    # On the engine's thread -------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        self._outbox.append(frame(Kind.STEP, encode_outputs(outputs, self._handles)))
        for output in outputs:
            if output.finish_reason is not None:
                self._handles.pop(output.request_id, None)

    def _publish(self, stats: EngineStats) -> None:
        """A step is over: its outputs leave, behind the snapshot that already counts them."""
        if stats is not self._published:
            self._published = stats
            self._outbox.insert(0, frame(Kind.STATS, encode_stats(stats)))
        if self._outbox:
            news = b"".join(self._outbox)
            self._outbox.clear()
            self._send(news)

    def _on_lost(self) -> None:
        assert self._loop is not None
        self._send(pickled(Kind.LOST, self._loop.lost))

    def _send(self, frames: bytes) -> None:
        """Blocks while the parent is behind by more than the socket's buffer: seconds of steps."""
        with self._sending:
            try:
                self._connection.sendall(frames)
            except ConnectionError:
                os._exit(1)  # nobody is left to work for


class _LogOverSocket(logging.Handler):
    """One place says things: the parent's log, with the parent's format."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send_frames = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send_frames(pickled(Kind.LOG, (record.name, record.levelno, self.format(record))))


def as_local_error(error: BaseException) -> LocalLLMError:
    """An error that may cross; anything else becomes words, and its traceback a line in the log."""
    if isinstance(error, LocalLLMError):
        return error.with_traceback(None)
    log.error("the engine could not be built", exc_info=error)
    return EngineError(
        "The engine could not be built.", f"{type(error).__name__}: {error}", "The log has the details."
    )


def end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, also while it is deep in somebody's C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Child(socket.socket(fileno=fd)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # past the teardown of libraries, which can take seconds and tidies nothing that the kernel does not


if __name__ == "__main__":
    main()
