"""An engine in a child process, with the face of an `EngineLoop`: `EngineClient` cannot tell them apart.

The child has its own interpreter, so a step never waits for the web's Python; what a step brings comes back in one
message, which the event loop reads from a socket. Tokenising, text and streams stay here.
Create it with `launch`, on the event loop that will serve. Does not know: what is built, HTTP, torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from localllm.engine.loop import Deliver
from localllm.engine.outputs import EngineOutput
from localllm.engine.recorder import now_s
from localllm.engine.request import Request
from localllm.engine.stats import EngineStats
from localllm.engine.wire import (
    READ_BYTES,
    Frames,
    Kind,
    decode_outputs,
    decode_stats,
    encode_requests,
    frame,
    pickled,
)
from localllm.errors import EngineProcessDied, EngineStopped, LocalLLMError

log = logging.getLogger(__name__)

STOP_S = 30.0
"""How long a child may take to end its requests and give its memory back before it is killed."""


class EngineProcess:
    """`deliver`, `on_lost` and `on_progress` are called on the event loop. `told`: what the builder said of its engine."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.deliver: Deliver = lambda outputs: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_progress: Callable[[object], None] = lambda news: None
        self.lost: LocalLLMError | None = None  # why it ended by itself
        self.told: object = None
        self._process, self._connection = process, connection
        self._frames, self._sending = Frames(), threading.Lock()
        self._event_loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._event_loop.create_future()
        self._numbers = count()
        self._names: dict[int, str] = {}  # request ids by handle
        self._open: dict[str, int] = {}  # handles by request id
        self._stats_payload, self._stats = b"", None
        self._stopping, self._ended = False, threading.Event()
        self._event_loop.add_reader(connection.fileno(), self._read)

    @classmethod
    async def launch(
        cls, builder: str, argument: object, on_progress: Callable[[object], None] = lambda news: None
    ) -> EngineProcess:
        """Start a child and wait until `builder` ("module:function", see `child.Build`) has built its engine there.

        Raises what the builder raised. Cancelled, it kills the child. The child lives as long as the thread that
        calls this: Linux counts the end of that thread as the end of the parent.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start(theirs)
        engine = cls(process, ours)
        engine.on_progress = on_progress
        engine._send(pickled(Kind.BUILD, (builder, argument, logging.getLogger().getEffectiveLevel())))
        try:
            await engine._built
        except BaseException:
            engine.kill()
            raise
        return engine

    # As an EngineLoop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._send(frame(Kind.START))

    def submit(self, *requests: Request) -> None:
        """Queue requests in order. Raises `EngineStopped`."""
        if self._stopping or self.lost is not None:
            raise EngineStopped("The engine is shutting down.", hint="Retry once the server is back.")
        handled = [(next(self._numbers), request) for request in requests]
        for handle, request in handled:
            self._names[handle], self._open[request.request_id] = request.request_id, handle
        self._send(frame(Kind.SUBMIT, encode_requests(handled)))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step. Unknown ids are ignored: it may have ended by itself."""
        if request_id in self._open:
            self._send(frame(Kind.CANCEL, request_id.encode()))

    def stats(self) -> EngineStats:
        """The latest snapshot: at most 100 ms old while the engine works, exact when it rests."""
        if self._stats is None:
            self._stats = decode_stats(self._stats_payload)
        return self._stats.as_of(now_s())

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End every request with an `EngineStopped` error, then the process. Idempotent; not on the event loop."""
        self._stopping = True
        self._send(frame(Kind.STOP))
        if not self._ended.wait(STOP_S):
            log.warning("killed the engine process pid=%d reason=did-not-stop-in-%.0f-s", self.pid, STOP_S)
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """`stop`; the child has given the memory back."""
        self.stop()

    def kill(self) -> None:
        """At once, without a word to the requests."""
        self._stopping = True
        self._process.kill()
        self._process.wait()
        self._close()

    # On the event loop ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """What has come; a step's frames came in one piece."""
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._on_death()
            return
        for kind, payload in self._frames.feed(data):
            self._take(kind, payload)

    def _take(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STEP:
            self._step(payload)
        elif kind is Kind.STATS:
            self._stats_payload, self._stats = payload, None
        elif kind is Kind.LOG:
            name, level, text = pickle.loads(payload)
            logging.getLogger(name).log(level, "%s", text)
        elif kind is Kind.PROGRESS:
            self.on_progress(pickle.loads(payload))
        elif kind is Kind.BUILT:
            self.told = pickle.loads(payload)
            _resolve(self._built)
        elif kind is Kind.FAILED:
            _resolve(self._built, pickle.loads(payload))
        elif kind is Kind.LOST:
            self.lost = pickle.loads(payload)
            self.on_lost()
        elif kind is Kind.ENDED:
            self._close()

    def _step(self, payload: bytes) -> None:
        outputs = decode_outputs(payload, self._names)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        self.deliver(outputs)

    def _on_death(self) -> None:
        """The socket closed before the child said that it ended."""
        self._close()
        if self._stopping:
            return
        code = self._process.wait()
        self.lost = EngineProcessDied(
            "The engine's process ended by itself.",
            f"It was killed by {signal.Signals(-code).name}." if code < 0 else f"Its exit status was {code}.",
            "The log may say why; the kernel's log (dmesg) tells of a process killed for want of memory.",
        )
        _resolve(self._built, self.lost)
        failed = [EngineOutput(name, finish_reason="error", error=self.lost) for name in list(self._open)]
        self._open.clear()
        self._names.clear()
        if failed:
            self.deliver(failed)
        self.on_lost()

    def _forget(self, request_id: str) -> None:
        handle = self._open.pop(request_id, None)
        if handle is not None:
            del self._names[handle]

    def _close(self) -> None:
        if not self._ended.is_set():
            self._event_loop.remove_reader(self._connection.fileno())
            self._connection.close()
            self._ended.set()

    # From any thread --------------------------------------------------------------------------------------------

    def _send(self, frames: bytes) -> None:
        with self._sending, suppress(OSError):  # a child that is gone is noticed where the socket is read
            self._connection.sendall(frames)


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """The child: not in the terminal's foreground group, so that Ctrl-C reaches us alone."""
    fd = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", "localllm.engine.child", str(fd), str(os.getpid())],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        process_group=0,
    )


def _resolve(future: asyncio.Future[None], error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
