"""Start the parts of a server in order, and stop them in reverse order.

    start  address · web application · HTTP server · model          each needs the ones before it
    stop   new connections · running requests · model · address

The address is bound first, so a port in use is reported before gigabytes are read. The server answers while the model
loads: /health reports the load, requests wait, the pages show the progress. Events go to an `Announcer`.
Does not know: how events are displayed (cli/announce.py), flags, how the manager loads a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import uvloop

from localllm.config.settings import ServerConfig, Settings
from localllm.errors import ConfigError, LocalLLMError, PortInUse
from localllm.logs.fault_log import FaultLog, fault_path
from localllm.machine.hardware import Hardware, read_hardware
from localllm.machine.memory import limit_arenas
from localllm.machine.running_servers import announced, listener_in_words
from localllm.serving.drain import DRAIN_S
from localllm.serving.manager import ModelManager
from localllm.serving.phases import Phase
from localllm.serving.served import ServedModel
from localllm.web.app import Server, bind, create_app

MOST_FILES = 65_536
"""Limit of open files, the same as in the unit of `localllm service`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The server is ready: its URL, its model, and how long the start took."""

    url: str
    model: ServedModel
    seconds: float  # since the command was given
    needs_key: bool
    has_pages: bool


class Announcer(Protocol):
    """Displays events of the server. Called on the event loop, so it must not block."""

    def starting(self, settings: Settings) -> None: ...
    def found(self, hardware: Hardware) -> None: ...
    def phase(self, phase: Phase) -> None: ...
    def ready(self, ready: Ready) -> None: ...
    def stopping(self, num_requests: int) -> None: ...


def up(settings: Settings, announcer: Announcer, *, started_s: float | None = None) -> None:
    """Serve until a signal arrives. `started_s`: when the command was given, by `time.perf_counter`.

    Raises `LocalLLMError` after a failure, and `KeyboardInterrupt` if the signal came before the model was ready.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    raise_file_limit()
    address = bind_address(settings.server)
    announcer.starting(settings)
    limit_arenas()
    faults = FaultLog(fault_path(settings.server.port))
    with contextlib.closing(address), faults.installed(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        was_ready = runner.run(_Serving(settings, announcer, address, started_s, faults).run())
    if not was_ready:
        raise KeyboardInterrupt


def raise_file_limit() -> None:
    """Raise the process's limit of open files: each connection needs one, and shells default to 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems report a higher limit than they grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Serving:
    """One server, from binding its address to its last request."""

    def __init__(
        self, settings: Settings, announcer: Announcer, address: socket.socket, started_s: float, faults: FaultLog
    ) -> None:
        self.settings, self.announcer, self.address, self.started_s = settings, announcer, address, started_s
        self.faults = faults
        self.manager = ModelManager()
        self.server = _Server(create_app(self.manager, settings, faults), drain_s=DRAIN_S)
        self.stop = asyncio.Event()

    async def run(self) -> bool:
        """Serve until stopped. Return True if the model was served, False if a signal came first."""
        asyncio.get_running_loop().set_exception_handler(self.faults.on_event_loop)
        with _signals(self._on_signal):
            serving = asyncio.create_task(self.server.serve(sockets=[self.address]), name="http")
            try:
                model = await self._load(serving)
                if model is not None:
                    await self._serve(model, serving)
            finally:
                self.server.should_exit = True
                await serving
                await self.manager.close()
        return model is not None

    async def _load(self, serving: asyncio.Task[None]) -> ServedModel | None:
        loading = asyncio.create_task(self.manager.start(self.settings, self._on_phase), name="load")
        stop = asyncio.create_task(self.stop.wait())
        await asyncio.wait({loading, serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if loading.done():
            return loading.result()
        loading.cancel()
        if serving.done():
            raise LocalLLMError("The web server did not start.", "The log says why.") from serving.exception()
        return None

    def _on_phase(self, phase: Phase) -> None:
        self.announcer.phase(phase)
        if phase.name == "torch" and phase.done:  # once torch is imported, reading the GPUs takes milliseconds
            self.announcer.found(read_hardware())

    async def _serve(self, model: ServedModel, serving: asyncio.Task[None]) -> None:
        server = self.settings.server
        url = url_of(self.address, server.scheme)
        with announced(url, model.name):
            seconds = time.perf_counter() - self.started_s
            self.announcer.ready(Ready(url, model, seconds, self.server.app.state.key_ring.is_locked, server.ui))
            if server.open_browser:
                asyncio.get_running_loop().run_in_executor(None, webbrowser.open, url)
            stop = asyncio.create_task(self.stop.wait())
            lost = asyncio.create_task(self.manager.device_lost())
            await asyncio.wait({serving, stop, lost}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            lost.cancel()
            self.announcer.stopping(self.manager.num_open)
            if lost.done():  # every stream has had its error; a service manager may restart the process
                raise lost.result()

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.server.force_exit = True
        self.stop.set()


class _Server(Server):
    """A uvicorn server without signal handlers: `up` alone handles Ctrl-C, also before anything is served."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---- the address -----------------------------------------------------------------------------------------------------


def bind_address(config: ServerConfig) -> socket.socket:
    """Return a listening socket. Raises `PortInUse` naming the program that uses the port, or `ConfigError`."""
    try:
        return bind(config)
    except PortInUse as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno != errno.EADDRINUSE:
            raise ConfigError(error.what, error.why, "localllm up --help", param="host") from cause
        raise PortInUse(error.what, listener_in_words(config.port) or error.why, error.hint, param="port") from cause


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL for a browser on this machine: the loopback address if the server listens on all addresses."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"


# ---- small things ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM until the block ends: the first signal stops in order, the second at once."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
