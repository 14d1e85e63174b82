"""Probes: is it alive, is it ready, which version. Open to everyone, also when a key is set."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler

from localllm import __version__
from localllm.web.api.openai.answer import json_response


@get(["/health", "/v1/health", "/ping"])
async def health(request: Request[Any, Any, Any]) -> ASGIResponse:
    """200 once the model answers; 503 with the reason while it loads, or after it could not be loaded."""
    request.app.state.manager.find(None)
    return json_response({"status": "ok"})


@get(["/version", "/api/version"])
async def version() -> ASGIResponse:
    return json_response({"version": __version__})


def routes() -> list[ControllerRouterHandler]:
    return [health, version]
