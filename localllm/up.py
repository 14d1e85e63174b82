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
import socket
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from localllm.config.settings import ServerConfig, Settings
from localllm.errors import ConfigError, LocalLLMError, PortInUse
from localllm.fleet.replicas import build_replicas
from localllm.logs.fault_log import FaultLog, fault_path
from localllm.machine.hardware import Hardware, read_hardware
from localllm.machine.memory import limit_arenas, permanent_objects
from localllm.machine.platforms import handled_signals, new_event_loop, raise_file_limit
from localllm.machine.processes import preload_torch_library
from localllm.machine.running_servers import announced, listener_in_words
from localllm.serving.manager import ModelManager
from localllm.serving.phases import DRAIN_S, Phase
from localllm.serving.reopen import put_to_sleep, wake_up
from localllm.serving.served import ServedModel
from localllm.serving.transitions import Loader
from localllm.web.access.connection import fingerprint
from localllm.web.access.keys import KeyRing, one_time_link
from localllm.web.app import Server, bind, create_app

MOST_FILES = 65_536
"""Limit of open files, the same as in the unit of `localllm service`."""
FIRST_ANSWERS_S = 0.3
"""The longest time for which a load waits for requests that came before it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The server is ready: its URL, its model, and how long the start took."""

    url: str
    name: str  # of the model
    model: ServedModel | None  # None: the first request loads it
    seconds: float  # since the command was given
    needs_key: bool
    has_pages: bool
    link: str = field(default="", repr=False)  # logs a browser in as the owner, once


class Announcer(Protocol):
    """Displays events of the server. Called on the event loop, so it must not block, except where a method says so."""

    def starting(self, settings: Settings) -> None: ...
    def found(self, hardware: Hardware) -> None: ...
    def phase(self, phase: Phase) -> None: ...
    def ready(self, ready: Ready) -> None:
        """Called in a thread of its own: looking for a model that fits takes a tenth of a second and longer."""

    def stopping(self, num_requests: int) -> None: ...


def up(
    settings: Settings,
    announcer: Announcer,
    *,
    started_s: float | None = None,
    passed: socket.socket | None = None,
    can_restart: bool = False,
) -> bool:
    """Serve until a signal arrives, or until the server was idle for `exit_when_idle`. Return whether to start again,
    which a person may ask for on the settings page if `can_restart`.

    `started_s`: when the command was given, by `time.perf_counter`. `passed`: a service manager's listening socket.

    Raises `LocalLLMError` after a failure, and `KeyboardInterrupt` if the signal came before the model was ready.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    if settings.upstreams and settings.source("model") == "default":  # nobody asked for a model of this machine
        settings = replace(settings, server=replace(settings.server, load_at_start=False))
    raise_file_limit(MOST_FILES)
    address = bind_address(settings.server, passed)
    announcer.starting(settings)
    limit_arenas()
    faults = FaultLog(fault_path(settings.server.port))
    with contextlib.closing(address), faults.installed(), asyncio.Runner(loop_factory=new_event_loop) as runner:
        with permanent_objects():
            serving = _Serving(settings, announcer, address, started_s, faults)
        if can_restart:
            serving.server.app.state["restart"] = serving.restart
        was_ready = runner.run(serving.run())
    if not was_ready and not serving.restarts:
        raise KeyboardInterrupt
    return serving.restarts


class _Serving:
    """One server, from binding its address to its last request."""

    def __init__(
        self, settings: Settings, announcer: Announcer, address: socket.socket, started_s: float, faults: FaultLog
    ) -> None:
        self.settings, self.announcer, self.address, self.started_s = settings, announcer, address, started_s
        self.faults = faults
        self.manager = ModelManager(Loader(build_replicas, put_to_sleep, wake_up))
        self.server = _Server(create_app(self.manager, settings, faults), drain_s=DRAIN_S)
        self.stop = asyncio.Event()
        self.restarts = False
        self.model: ServedModel | None = None  # the first model; None: not loaded at the start

    async def run(self) -> bool:
        """Serve until stopped. Return False if a signal came before the server was ready."""
        asyncio.get_running_loop().set_exception_handler(self.faults.on_event_loop)
        with handled_signals(self._on_signal):
            self.manager.register_first(self.settings, self._on_phase)
            serving = asyncio.create_task(self.server.serve(sockets=[self.address]), name="http")
            try:
                await self._answer_first(serving)
                was_ready = await self._load(serving)
                if was_ready:
                    await self._serve(serving)
            finally:
                self.server.should_exit = True
                await serving
                await self.manager.close()
        return was_ready

    def restart(self) -> None:
        """Stop as after a signal, and start again. Called on the event loop."""
        self.restarts = True
        self.stop.set()

    async def _answer_first(self, serving: asyncio.Task[None]) -> None:
        """Answer the requests that came while the server started, for at most FIRST_ANSWERS_S. A load begins with
        importing torch, which holds the lock of Python's interpreter for most of its time."""
        if self.settings.server.load_at_start:
            preload_torch_library()
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.001)
        end_s, state = time.perf_counter() + FIRST_ANSWERS_S, self.server.server_state
        await asyncio.sleep(0.005)  # a connection that waits is accepted, its request is read, and becomes a task
        while state.tasks and time.perf_counter() < end_s:
            await asyncio.sleep(0.001)

    async def _load(self, serving: asyncio.Task[None]) -> bool:
        """Load the first model. Return False if a signal came first."""
        loading = asyncio.create_task(self.manager.start(self.settings, self._on_phase), name="load")
        stop = asyncio.create_task(self.stop.wait())
        await asyncio.wait({loading, serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if loading.done():
            self.model = loading.result()
            return True
        loading.cancel()
        if serving.done():
            raise LocalLLMError("The web server did not start.", "The log says why.") from serving.exception()
        return False

    def _on_phase(self, phase: Phase) -> None:
        self.announcer.phase(phase)
        if phase.name == "torch" and phase.done:  # once torch is imported, reading the GPUs takes milliseconds
            self.announcer.found(read_hardware())

    async def _serve(self, serving: asyncio.Task[None]) -> None:
        server = self.settings.server
        url = url_of(self.address, server.scheme)
        name = self.manager.entries[0].name if self.model is None else self.model.name
        keys: KeyRing = self.server.app.state.key_ring
        with announced(url, name, fingerprint(server), keys.owner_secret):
            seconds, link = time.perf_counter() - self.started_s, one_time_link(url, keys.owner_secret)
            ready = Ready(url, name, self.model, seconds, keys.is_locked, server.ui, link)
            await asyncio.to_thread(self.announcer.ready, ready)
            if server.open_browser:
                opened = one_time_link(url, keys.owner_secret)
                asyncio.get_running_loop().run_in_executor(None, webbrowser.open, opened)
            stop = asyncio.create_task(self.stop.wait())
            lost = asyncio.create_task(self.manager.transitions.device_lost())
            idle = asyncio.create_task(self._idle())
            await asyncio.wait({serving, stop, lost, idle}, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (stop, lost, idle):
                waiting.cancel()
            self.announcer.stopping(self.manager.num_open)
            if lost.done():  # every stream has had its error; a service manager may restart the process
                raise lost.result()

    async def _idle(self) -> None:
        """Return once nothing has used the server for `exit_when_idle`; without that setting, never."""
        state, idle_s = self.server.app.state, self.settings.server.exit_when_idle
        if idle_s is None:
            await asyncio.Event().wait()
        else:
            await state.activity.until_idle(idle_s, self.manager, state.downloads, lambda: state.batches.is_busy)
            state.closing.is_idle = True

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


def bind_address(config: ServerConfig, passed: socket.socket | None = None) -> socket.socket:
    """Return a listening socket. Raises `PortInUse` naming the program that uses the port, or `ConfigError`."""
    try:
        return bind(config, passed)
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
