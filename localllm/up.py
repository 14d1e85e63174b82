"""Builds everything in order and takes it down in reverse.

    up    address · web application · HTTP server · model          each needs the ones before it
    down  new connections · running requests · model · address

The address is taken first, so a taken port is known before gigabytes are read. The server answers while the model
loads: 503 on the API, the progress on the pages. What happens is told to an `Announcer`.
Does not know: how things are said (cli/announce.py), flags, what the manager does to load a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import uvicorn

from localllm.config import Settings
from localllm.errors import ConfigError, LocalLLMError, PortInUse

if TYPE_CHECKING:
    from litestar import Litestar

    from localllm.hardware import Hardware
    from localllm.manager import ModelManager, Phase, ServedModel

DRAIN_LIMIT_S = 30
"""How long running requests may go on after the first Ctrl-C."""

INTERRUPTED = 130
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Ready:
    """The server answers: where, with which model, and how long it took."""

    url: str
    model: ServedModel
    seconds: float  # since the process started, the interpreter's own start included
    needs_key: bool
    has_pages: bool


class Announcer(Protocol):
    """Says what happens. Called on the event loop: it must not block."""

    def starting(self, settings: Settings) -> None: ...
    def found(self, hardware: Hardware) -> None: ...
    def phase(self, phase: Phase) -> None: ...
    def ready(self, ready: Ready) -> None: ...
    def stopping(self, num_requests: int) -> None: ...


def up(settings: Settings, announcer: Announcer) -> int:
    """Serve until a signal says stop. Returns the exit code; raises what made it fail (`LocalLLMError`)."""
    announcer.starting(settings)
    address = bind(settings.server.host, settings.server.port)
    with contextlib.closing(address), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        stopped_while_loading = runner.run(_House(settings, announcer, address).live())
        if stopped_while_loading:
            # Python would wait for the thread that loads the weights, which nothing can interrupt. Nothing was
            # started yet that needs an orderly end.
            _leave_now(INTERRUPTED)
    return 0


class _House:
    """One server from its address to its last request."""

    def __init__(self, settings: Settings, announcer: Announcer, address: socket.socket) -> None:
        from localllm.manager import ModelManager
        from localllm.web.app import create_app

        self.settings, self.announcer, self.address = settings, announcer, address
        self.manager: ModelManager = ModelManager()
        self.app: Litestar = create_app(self.manager, settings)
        self.server = _Server(self.app, settings.server.log_level)
        self.stop = asyncio.Event()

    async def live(self) -> bool:
        """True if it was told to stop before the model was there."""
        with _signals(self._on_signal):
            serving = asyncio.create_task(self.server.serve(sockets=[self.address]), name="http")
            try:
                if not await self._load(serving):
                    return True
                await self._run(serving)
            finally:
                await self._end_requests(serving)
                await self.manager.close()
        return False

    async def _load(self, serving: asyncio.Task[None]) -> bool:
        from localllm.hardware import read_hardware

        self.announcer.found(await asyncio.to_thread(read_hardware))
        loading = asyncio.create_task(self.manager.start(self.settings, self.announcer.phase), name="load")
        stop = asyncio.create_task(self.stop.wait())
        await asyncio.wait({loading, serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if loading.done():
            self._announce(loading.result())
            return True
        loading.cancel()
        if serving.done():
            raise LocalLLMError("The web server did not start.", "The log says why.") from serving.exception()
        return False

    def _announce(self, model: ServedModel) -> None:
        server = self.settings.server
        url = url_of(self.address)
        started_s = psutil.Process().create_time()
        self.announcer.ready(Ready(url, model, time.time() - started_s, bool(server.api_key), server.ui))
        if server.open_browser:
            asyncio.get_running_loop().run_in_executor(None, webbrowser.open, url)

    async def _run(self, serving: asyncio.Task[None]) -> None:
        assert self.manager.current is not None
        with _runtime_file(url_of(self.address), self.manager.current.name):
            stop = asyncio.create_task(self.stop.wait())
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            self.announcer.stopping(self._num_requests())

    def _num_requests(self) -> int:
        if self.manager.current is None:
            return 0
        stats = self.manager.current.client.stats()
        return stats.num_running + stats.num_waiting

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.server.force_exit = True
        self.stop.set()

    async def _end_requests(self, serving: asyncio.Task[None]) -> None:
        """No new connections; pages' live streams end at once, answers may run to their end."""
        from localllm.web.live import closing

        closing(self.app.state).set()
        self.server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """uvicorn with our signals: one place decides what Ctrl-C means."""

    def __init__(self, app: Litestar, log_level: str) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="info" if log_level == "debug" else "warning",  # its info lines repeat what we announce
            access_log=False,  # a finished request has its own line
            lifespan="on",
            timeout_graceful_shutdown=DRAIN_LIMIT_S,
            server_header=False,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---- the address -----------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortInUse` naming the program that has it, or `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address of this machine.", str(error), param="host") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"Port {port} is in use.",
            _who_listens(port),
            f"localllm up --port {port + 1}, or stop the other program",
            param="port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {port} needs administrator rights.", str(error), "--port 8000", param="port")
    return ConfigError(f"Cannot listen on {host}:{port}.", str(error), param="host")


def _who_listens(port: int) -> str:
    """The program behind a port, as far as this user may know."""
    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        ]
        return f"{psutil.Process(pids[0]).name()} (pid {pids[0]}) listens there." if pids else ""
    except psutil.Error:
        return ""


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds it: the loopback address when it listens everywhere."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


# ---- small things ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM mean the same: stop in order; a second one: stop now."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _runtime_file(url: str, model: str) -> Iterator[None]:
    """$XDG_RUNTIME_DIR/localllm.json while we serve, so that other programs of this user find us."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(folder) / "localllm.json" if folder and Path(folder).is_dir() else None
    mine = json.dumps({"url": url, "pid": os.getpid(), "model": model})
    if path is not None:
        path.write_text(mine)
    try:
        yield
    finally:
        if path is not None and path.exists() and path.read_text() == mine:  # a later server may have taken it over
            path.unlink()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _leave_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
