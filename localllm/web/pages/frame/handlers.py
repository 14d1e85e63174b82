"""The routes that belong to no single page: static files, the live status pill, the look, sign-in, `/dev/patterns`.

Does not know: what the pages show.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.response import Stream

from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.api.own.health import knock
from localllm.web.pages.frame import login, patterns
from localllm.web.pages.frame.live import live_stream, sse
from localllm.web.pages.frame.navigation import choose_look
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.sampler import Tick
from localllm.web.pages.frame.state import PagesState, pages_state
from localllm.web.pages.frame.static import static_files
from localllm.web.pages.frame.views import LiveUpdate

STATUS_EVERY_S = 1.0
RULES = RouteRules(infer=Paths("/look", "/dev/patterns", "/static/*", "/live/status"), linked=Paths("/login"))
FOREVER = "public, max-age=31536000, immutable"


@get(["/static/{path:path}", "/favicon.ico"], sync_to_thread=False)
def static_file(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return a file of a page. With its version in the URL it may be cached for ever. Browsers ask for /favicon.ico by
    themselves, where an answer names no icon."""
    path = str(request.path_params.get("path", "favicon.svg")).lstrip("/")
    file = static_files().get(path)
    if file is None:
        raise NotFoundException(f"There is no file {path}.")
    body, compressed = file.answers(request.headers.get("accept-encoding", ""))
    headers = {
        "ETag": f'"{file.etag}"',
        "Vary": "Accept-Encoding",
        "Cache-Control": FOREVER if request.query_params.get("v") == file.etag else "no-cache",
    }
    if compressed:
        headers["Content-Encoding"] = "gzip"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(b"", status_code=304, headers=headers)
    return Response(body, media_type=file.media_type, headers=headers)


@get("/live/status", sync_to_thread=False)
def live_status(request: Request[Any, Any, Any]) -> Stream:
    """Stream the header's status pill, once a second."""
    events = _status_events(pages_state(request), waits=shows_loading(request))
    return live_stream(request, events)


def shows_loading(request: Request[Any, Any, Any]) -> bool:
    """Return whether the page was rendered before a model was ready; it is then told to reload."""
    return "loading" in request.query_params


async def _status_events(state: PagesState, *, waits: bool) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    sent_s = 0.0
    async for tick in state.sampler.follow():
        if waits and state.served is not None:
            yield sse("", "ready")
            return
        if time.monotonic() - sent_s < STATUS_EVERY_S * 0.9:
            continue
        parts = state.live_parts(tick, waits=waits)
        if parts != sent:
            sent, sent_s = parts, time.monotonic()
            yield update_event(tick, "any", parts)


def update_event(tick: Tick, page: str, parts: dict[str, str]) -> bytes:
    """Return the event with these parts of a tick, encoded once for all followers of the page that need
    the same parts.
    """
    return tick.cached(f"update {page} {' '.join(parts)}", lambda: sse(render(LiveUpdate(parts))))


HANDLERS = (static_file, live_status, knock, choose_look, patterns.patterns_page, *login.HANDLERS)
