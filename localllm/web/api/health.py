"""Probes: is it alive, is it ready, which version. Open to everyone, also when a key is set; but what stands at / is
not."""

from __future__ import annotations

from litestar import get, head
from litestar.response.base import ASGIResponse, Response
from litestar.types import ControllerRouterHandler

from localllm import __version__
from localllm.web.api.exchange import ApiRequest, json_response, manager_of


@get(["/health", "/v1/health", "/ping"])
async def health(request: ApiRequest) -> ASGIResponse:
    """200 once requests are answered, a sleeping or idle model's too: they wake it. 503 with the reason while the
    first model loads, or after it could not be loaded."""
    manager_of(request).require_working()
    return json_response({"status": "ok"})


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
    return [health, version, *([root, knock] if with_root else [])]
