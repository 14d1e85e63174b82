"""Probes: is it alive, is it ready, which version. Open to everyone, also when a key is set; but what stands at / is
not, and what the watchdog knows is for admins."""

from __future__ import annotations

from litestar import get, head
from litestar.response.base import ASGIResponse, Response
from litestar.types import ControllerRouterHandler

from localllm import __version__
from localllm.errors import EngineError
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.watchdog import Watchdog, worst


class StandsStill(EngineError):
    """A part of the server does not get on, and will not by itself."""

    status, code, type = 503, "stands_still", "unavailable_error"


@get(["/health", "/v1/health", "/ping"])
async def health(request: ApiRequest) -> ASGIResponse:
    """200 once requests are answered, a sleeping or idle model's too: they wake it. 503 with the reason while the
    first model loads, after it could not be loaded, and where an engine stands still. What is only slow is 200."""
    manager_of(request).require_working()
    parts = watchdog_of(request).parts()
    status = worst(parts)
    if status == "ok":
        return json_response({"status": "ok"})
    if status == "slow":
        return json_response({"status": "slow", "parts": [each for each in parts if each.state != "ok"]})
    part = next(each for each in parts if each.state == status)
    raise StandsStill(f"{part.part} is {part.state}.".capitalize(), part.why, "localllm doctor --server")


@get("/localllm/v1/server")
async def server(request: ApiRequest) -> ASGIResponse:
    """What the watchdog knows."""
    return json_response({"object": "server", **watchdog_of(request).report()})


def watchdog_of(request: ApiRequest) -> Watchdog:
    watchdog: Watchdog = request.app.state.watchdog
    return watchdog


@get(["/version", "/api/version"])
async def version() -> ASGIResponse:
    return json_response({"version": __version__})


@head("/")
async def knock() -> None:
    """For those who only knock."""


@get("/")
async def root() -> Response[str]:
    """What stands there without pages."""
    return is_running()


def is_running() -> Response[str]:
    """What clients made for Ollama look for before they ask anything."""
    return Response("Ollama is running", media_type="text/plain")


def routes(*, with_root: bool) -> list[ControllerRouterHandler]:
    """`with_root`: nothing else answers at /."""
    return [health, version, server, *([root, knock] if with_root else [])]
