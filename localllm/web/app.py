"""The web application and its server: routes, access checks, limits, and an orderly shutdown.

`create_app` needs a `ModelManager`, which may still be loading a model. `Server` runs the app on sockets that the
caller has bound, and ends open streams at shutdown.
Does not know: what the routes do, the terminal.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import _lru_cache_wrapper
from typing import TYPE_CHECKING, Any

import uvicorn
from litestar import Litestar, _parsers
from litestar._asgi.routing_trie import traversal
from litestar._kwargs import extractors
from litestar.datastructures import State
from litestar.datastructures.url import URL
from litestar.handlers import HTTPRouteHandler
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import ControllerRouterHandler

from localllm.config.settings import ServerConfig, Settings
from localllm.errors import ConfigError, PortInUse
from localllm.files.folders import data_folder
from localllm.fleet.upstreams import Upstreams
from localllm.logs.fault_log import FaultLog
from localllm.machine.install_kind import InstallKind, how_to_install, install_kind
from localllm.machine.platforms import use_port_alone
from localllm.mcp.servers import McpServers
from localllm.models.library.hub.downloads import Downloads
from localllm.serving.answers.tool_calls import no_decisions
from localllm.serving.manager import ModelManager
from localllm.serving.phases import DRAIN_S
from localllm.web.access.auth import FrontDoor
from localllm.web.access.connection import Connection, Connections, check_certificate
from localllm.web.access.keys import KeyRing, keys_path, read_keys
from localllm.web.access.limits import Guesses
from localllm.web.access.scopes import API_RULES
from localllm.web.activity import Activity, Closing
from localllm.web.api import anthropic, batches, llamacpp, model_list, ollama, openai, responses, router
from localllm.web.api.answer import EngineIds
from localllm.web.api.batches.line_runner import Endpoints, LineRunner
from localllm.web.api.batches.worker import BatchWorker
from localllm.web.api.openai.chat import answer_chat
from localllm.web.api.openai.completions import answer_completion
from localllm.web.api.openai.embeddings import answer_embeddings
from localllm.web.api.openai.pooling import answer_classify, answer_pooling
from localllm.web.api.openai.rerank import answer_rerank, answer_score
from localllm.web.api.openapi import openapi_json
from localllm.web.api.own import health, hub, media, running
from localllm.web.api.responses.responses import answer_response
from localllm.web.api.responses.stored import ResponseStore
from localllm.web.errors import handle_exception
from localllm.web.metrics import metrics
from localllm.web.watchdog import Watchdog

if TYPE_CHECKING:
    from localllm.web.tracing import Traces


log = logging.getLogger(__name__)

ENDPOINTS: Endpoints = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/v1/embeddings": answer_embeddings,
    "/v1/responses": answer_response,
    "/v1/rerank": answer_rerank,
    "/v1/score": answer_score,
    "/pooling": answer_pooling,
    "/classify": answer_classify,
}
"""What a line of a batch can ask for."""

DATE_S = 1.0
LAST_S = 0.2
"""How long a server that ends because it is idle waits for requests on connections that it has accepted."""


class Application(Litestar):
    """Litestar without its plugins for pydantic and attrs: importing pydantic takes a tenth of a second, and no
    handler's parameter is a model of either."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def create_app(manager: ModelManager, settings: Settings, faults: FaultLog | None = None) -> Litestar:
    """Return the application. Its `app.state` holds `manager`, `upstreams` (other servers), `settings`, `downloads`,
    `responses` (the stored ones), `mcp` (the servers of tools), `tool_decisions`, `key_ring`, `guesses`, `http_counts`,
    `engine_ids`, `watchdog`, `activity`, `batches`, and `closing`, which is set at shutdown.
    `faults` records unhandled errors.
    """
    handlers: list[ControllerRouterHandler] = [*health.routes(with_root=not settings.server.ui), metrics]
    handlers += [*openai.routes(settings.server), *responses.routes(), *anthropic.routes(), *ollama.routes()]
    handlers += [*llamacpp.routes(), *model_list.routes(), *batches.routes(settings.server)]
    handlers += [*running.routes(), *router.routes(), *hub.routes(), *media.routes(), openapi_json]
    template_config, rules = None, API_RULES
    if settings.server.ui:
        from localllm.web import pages

        handlers += pages.routes()
        template_config, rules = pages.template_config(), API_RULES + pages.rules()
    for i, handler in enumerate(handlers):
        if isinstance(handler, HTTPRouteHandler) and handler.opt.get("takes_pictures"):
            handlers[i] = taker = copy(handler)
            taker.request_max_body_size = settings.server.largest_media_body_bytes
    upstreams = Upstreams(settings)
    keys = KeyRing(settings.server.api_keys, always_locked=not settings.server.is_loopback)
    counts: Counter[tuple[str, str, int]] = Counter()
    guesses = Guesses()
    watchdog = Watchdog(manager, faults or FaultLog())
    activity = Activity()
    app = Application(
        handlers,
        state=State(
            {
                "manager": manager,
                "upstreams": upstreams,
                "settings": settings,
                "downloads": Downloads(),
                "responses": ResponseStore(),
                "mcp": McpServers(settings.mcp),
                "tool_decisions": no_decisions,
                "key_ring": keys,
                "guesses": guesses,
                "http_counts": counts,
                "engine_ids": EngineIds(),
                "watchdog": watchdog,
                "activity": activity,
                "closing": Closing(),
            }
        ),
        exception_handlers={Exception: handle_exception},
        template_config=template_config,
        request_max_body_size=settings.server.max_body_bytes,
        openapi_config=None,  # Litestar's own document knows only types; api/openapi.py knows every field
        logging_config=None,
    )
    app.state["batches"] = worker = BatchWorker(
        data_folder() / "batches", settings, LineRunner(app, ENDPOINTS), keys, lambda: bool(manager.entries)
    )
    keep_nothing_of_requests(app)
    # This wraps the router, so it sees unknown URLs as well.
    app.asgi_handler = FrontDoor(activity.around(app.asgi_handler), settings.server, keys, counts, guesses, rules)
    app.on_startup.append(upstreams.start)
    app.on_shutdown.append(upstreams.close)
    app.on_startup.append(watchdog.start)
    app.on_shutdown.append(watchdog.stop)
    app.on_startup.append(worker.start)
    app.on_shutdown.append(worker.close)
    if settings.server.ui:
        pages.mount(app)
    app.on_shutdown.append(app.state.mcp.close)
    if settings.server.otlp_traces_endpoint is not None:
        traces = _traces()(settings.server.otlp_traces_endpoint)
        app.asgi_handler = traces.around(app.asgi_handler)
        app.on_shutdown.append(traces.close)
    return app


def _traces() -> type[Traces]:
    """Return the class that exports traces, imported on demand.

    Raises `ConfigError` if OpenTelemetry is not installed.
    """
    try:
        from localllm.web.tracing import Traces
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("opentelemetry"):
            raise
        what, why = "--otlp-traces-endpoint needs OpenTelemetry.", f"{error}."
        raise ConfigError(what, why, how_to_install("localllm[otel]"), param="otlp_traces_endpoint") from error
    return Traces


# The server ---------------------------------------------------------------------------------------------------------


def bind(config: ServerConfig, passed: socket.socket | None = None) -> socket.socket:
    """Return a listening socket. Raises `PortInUse`; the server never picks another port, which would break saved
    clients. `passed`: the socket that a service manager passed, whose address `config` has; it is returned.

    Raises `ConfigError` if the address cannot be bound for another reason (unknown host, privileged port), or if a
    setting needs something that is missing: a key, a valid certificate, OpenTelemetry.
    """
    if config.otlp_traces_endpoint is not None:
        _traces()
    check_certificate(config)
    if not config.is_loopback and not config.api_keys and not read_keys(keys_path()):
        raise ConfigError(
            f"Refusing to listen on {config.host} without a key.",
            "Anyone on the network could use this machine's model and read its chats.",
            _how_to_set_a_key(config.host),
            param="host",
        )
    if passed is not None:
        return passed
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # the protocol makes asyncio set TCP_NODELAY
    try:
        use_port_alone(sock)
        sock.bind((config.host, config.port))
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        what, why = f"Cannot listen on {config.host}:{config.port}.", f"{error.strerror or error}."
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(what, why, "localllm up --help", param="host") from error
        other = config.port + 1 if config.port < 65535 else 8000
        raise PortInUse(what, why, f"--port {other}, or stop the program that listens on it.", param="port") from error
    return sock


def _how_to_set_a_key(host: str) -> str:
    """Return the next command after a refusal to listen without a key."""
    if install_kind() is InstallKind.CONTAINER:
        return "docker run -e LOCALLLM_API_KEY=YOUR-KEY …, or the same variable from a Secret in a pod"
    return f"localllm keys add NAME, or localllm up --host {host} --api-key YOUR-KEY"


class Server(uvicorn.Server):
    """uvicorn with limits for its connections (access/connection.py) and a shutdown that ends open streams.

    At the first signal it accepts no new connections, closes live pages, and lets running generations finish for
    `drain_s`; then the engine stops and each open stream gets an error event. At the second signal it ends immediately.
    """

    def __init__(self, app: Litestar, *, drain_s: float = DRAIN_S) -> None:
        self.app, self.drain_s = app, drain_s
        self._engine_stop: asyncio.Future[None] | None = None
        self._should_exit = False
        self._exit_is_near: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None  # of the main loop
        asked: ServerConfig = app.state.settings.server
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ssl_certfile=asked.ssl_certfile,
                ssl_keyfile=asked.ssl_keyfile,
                log_config=None,
                access_log=False,
                proxy_headers=False,  # access/proxies.py does this, for trusted proxies only
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_keep_alive=65,  # longer than most clients' timeouts, so that the client closes first
                timeout_graceful_shutdown=int(drain_s) + 5,
            )
        )
        self.server_state = Connections(lambda: app.state.key_ring.is_locked)

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        """May be set by a signal's handler, or on another thread."""
        self._should_exit = value
        if value and self._exit_is_near is not None:
            loop, event = self._exit_is_near
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(event.set)

    async def main_loop(self) -> None:
        """Set the date of the headers once a second, until `should_exit`. uvicorn's own loop wakes ten times a second,
        which are two thirds of what wakes an idle server."""
        near = asyncio.Event()
        self._exit_is_near = asyncio.get_running_loop(), near
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(near.wait(), DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.closing.set()
        self.app.state.downloads.close()
        if self.app.state.closing.is_idle:  # a client that connected in this moment still sends its request
            for server in self.servers:
                server.close()
            await asyncio.sleep(LAST_S)
        drained = asyncio.get_running_loop().call_later(self.drain_s, self._stop_engine)
        try:
            await super().shutdown(sockets)
        finally:
            drained.cancel()
            if self._engine_stop is not None:
                await self._engine_stop

    def _stop_engine(self) -> None:
        log.info("requests still run after %.0f s and are ended", self.drain_s)

        async def end_requests() -> None:
            await self.app.state.upstreams.close()
            await self.app.state.manager.close()

        self._engine_stop = asyncio.ensure_future(end_requests())


CACHED_FUNCTIONS = (
    (_parsers, "parse_url_encoded_form_data"),
    (_parsers, "parse_query_string"),
    (_parsers, "parse_cookie_string"),
    (extractors, "create_query_default_dict"),
    (traversal, "parse_path_params"),
)
CACHED_METHODS = ("_new", "from_components")
"""Cached class methods of `URL`."""


def keep_nothing_of_requests(app: Litestar) -> None:
    """Replace the caches in Litestar's modules, once per process, and in this application's router.

    Litestar keeps the last 1,024 forms, cookie headers, queries, paths and path parameters in process-wide
    `lru_cache`s. A message, a key typed at /login and a deleted chat would stay in memory until as many others arrived,
    and 1,024 large forms take gigabytes. Nothing of a request may outlive it, so plain functions replace the cached
    ones wherever Litestar has imported them.
    """
    for module, name in CACHED_FUNCTIONS:
        if isinstance(cached := getattr(module, name), _lru_cache_wrapper):
            _put_in_place_of(cached, cached.__wrapped__)
    for name in CACHED_METHODS:
        if isinstance(cached := URL.__dict__[name].__func__, _lru_cache_wrapper):
            setattr(URL, name, classmethod(cached.__wrapped__))
    app.asgi_router.handle_routing = app.asgi_router._handle_routing  # type: ignore[assignment]


def _put_in_place_of(cached: Any, plain: Callable[..., Any]) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("litestar.")]:
        for name, value in list(vars(module).items()):
            if value is cached:
                setattr(module, name, plain)
