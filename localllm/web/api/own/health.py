"""Probes: liveness, readiness and version. They are open to everyone, even if keys are set; `/` and the watchdog's
report are not.
"""

from __future__ import annotations

from litestar import get, head, route
from litestar.enums import HttpMethod
from litestar.response.base import ASGIResponse, Response
from litestar.types import ControllerRouterHandler

from localllm.errors import EngineError, LocalLLMError
from localllm.version import __version__
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.api.openapi import TEXT, Operation
from localllm.web.api.own import shapes
from localllm.web.watchdog import ServerReport, Watchdog, worst

OLLAMA_API = "0.20.0"
"""The newest version of Ollama whose calls this server answers."""


class StandsStill(EngineError):
    """A part of the server is stuck and will not recover by itself."""

    status, code, type = 503, "stands_still", "unavailable_error"


class NotLoadable(EngineError):
    """The model that requests without a name get cannot be loaded."""

    status, code, type = 503, "not_loadable", "unavailable_error"


@get(["/health", "/v1/health", "/ping"], operation=Operation(shapes.Health, also=(503,), guide="watchdog"))
async def health(request: ApiRequest) -> ASGIResponse:
    """Report whether the server answers requests.

    The status is 200 once requests are answered, also for sleeping or idle models, which wake on request, and while a
    part is only slow. It is 503, with the reason, while the first model loads, after it failed to load, or while an
    engine is stuck.
    """
    try:
        manager_of(request).loads.require_working()
    except LocalLLMError as error:
        if error.status >= 500:
            raise
        # A load that failed because files are gone is a 404 for a request; a probe would read 404 as a wrong path.
        raise NotLoadable(error.what, "", "localllm ps") from error
    parts = watchdog_of(request).parts()
    status = worst(parts)
    if status == "ok":
        return json_response(shapes.Health("ok"))
    if status == "slow":
        return json_response(shapes.Health("slow", [each for each in parts if each.state != "ok"]))
    part = next(each for each in parts if each.state == status)
    raise StandsStill(f"{part.part} is {part.state}.".capitalize(), part.why, "localllm doctor --server")


@get("/localllm/v1/server", operation=Operation(ServerReport, guide="watchdog"))
async def server(request: ApiRequest) -> ASGIResponse:
    """Report the state of the server's parts."""
    return json_response(watchdog_of(request).report())


def watchdog_of(request: ApiRequest) -> Watchdog:
    watchdog: Watchdog = request.app.state.watchdog
    return watchdog


@get("/version", operation=Operation(shapes.Version))
async def version() -> ASGIResponse:
    """Show the version."""
    return json_response(shapes.Version(__version__))


@route("/api/version", http_method=[HttpMethod.GET, HttpMethod.HEAD], operation=Operation(shapes.OllamaVersion))
async def ollama_version() -> ASGIResponse:
    """Show the version of Ollama's API that this server speaks, and its own.

    Clients refuse servers that speak an older version than they need.
    """
    return json_response(shapes.OllamaVersion(OLLAMA_API, __version__))


@head("/", operation=Operation())
async def knock() -> None:
    """Report that the server is running."""


@get("/", operation=Operation(TEXT))
async def root() -> Response[str]:
    """Report that the server is running."""
    return is_running()


def is_running() -> Response[str]:
    """Return the text that Ollama's clients look for before their first request."""
    return Response("Ollama is running", media_type="text/plain")


def routes(*, with_root: bool) -> list[ControllerRouterHandler]:
    """Return the routes. `with_root`: no page answers at `/`."""
    return [health, version, ollama_version, server, *([root, knock] if with_root else [])]
