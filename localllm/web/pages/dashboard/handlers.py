"""The dashboard's handlers, and the live streams of the dashboard and the status pill.

Does not know: how a tile is filled (presenters.py) or rendered (templates).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import EngineStopped, InvalidParameter
from localllm.web.pages.chat import message_presenters
from localllm.web.pages.dashboard import presenters, request_handlers
from localllm.web.pages.dashboard.plots import MINUTE, SPANS, Span
from localllm.web.pages.dashboard.views import Dashboard, DashboardPage
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.live import Tick, changed, closing, event_stream, sse, until_closing
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import Room, html, room_of
from localllm.web.pages.frame.views import LiveUpdate

STATUS_EVERY_S = 1.0


@get("/dashboard")
async def dashboard_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the dashboard."""
    room, span = room_of(request), _span(request)
    board = await _dashboard(room, room.sampler.look(), span)
    live_url = "/live/dashboard" if span is MINUTE else f"/live/dashboard?last={span.key}"
    shell = room.shell(request, "Dashboard", "dashboard", live_url, waits=board is None, moves=True)
    spans = tuple((each.key, each.title, each is span) for each in SPANS)
    return html(DashboardPage(shell, board, None if board else message_presenters.loading(room), spans))


@get("/live/dashboard")
async def live_dashboard(request: Request[Any, Any, Any]) -> Stream:
    """Stream every changed tile, twice a second."""
    room = room_of(request)
    return event_stream(
        until_closing(_dashboard_events(room, _span(request), _from_loading(request)), closing(request.app.state))
    )


@get("/live/status", sync_to_thread=False)
def live_status(request: Request[Any, Any, Any]) -> Stream:
    """Stream the header's status pill, once a second."""
    room = room_of(request)
    return event_stream(until_closing(_status_events(room, _from_loading(request)), closing(request.app.state)))


@post("/dashboard/requests/{request_id:str}/cancel", guards=[same_origin], status_code=200, sync_to_thread=False)
def cancel_request(request: Request[Any, Any, Any]) -> Response[Any]:
    """Cancel a request, also one of another client."""
    room = room_of(request)
    if room.served is None:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    room.served.generator.cancel(request.path_params["request_id"])
    if is_scripted(request):
        return Response(None, status_code=204)
    return Redirect("/dashboard", status_code=303)


def _from_loading(request: Request[Any, Any, Any]) -> bool:
    """Return whether the page was rendered before a model was ready; it is then told to reload."""
    return "loading" in request.query_params


def _span(request: Request[Any, Any, Any]) -> Span:
    """Return the requested time range. Raises `InvalidParameter`."""
    asked = request.query_params.get("last", MINUTE.key)
    for span in SPANS:
        if span.key == asked:
            return span
    known = ", ".join(span.key for span in SPANS)
    raise InvalidParameter(f"Unknown time span {asked[:40]!r}.", f"Known: {known}.", param="last")


async def _dashboard_events(room: Room, span: Span, loading: bool) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    async for tick in room.sampler.follow():
        board = await _dashboard(room, tick, span)
        if loading and board is not None:
            yield sse("", "ready")
            return
        parts = _shared_parts(room, tick, loading)
        if board is not None:
            parts |= tick.drawn(f"tiles {span.key}", lambda board=board: draw_tiles(board))  # type: ignore[misc]
        if news := changed(parts, sent):
            yield _update(tick, f"dashboard {span.key}", news)


async def _status_events(room: Room, loading: bool) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    sent_s = 0.0
    async for tick in room.sampler.follow():
        if loading and room.served is not None:
            yield sse("", "ready")
            return
        if time.monotonic() - sent_s < STATUS_EVERY_S * 0.9:
            continue
        parts = _shared_parts(room, tick, loading)
        if parts != sent:
            sent, sent_s = parts, time.monotonic()
            yield _update(tick, "any", parts)


def _update(tick: Tick, page: str, parts: dict[str, str]) -> bytes:
    """Return the event with these parts of a tick, encoded once for all followers of the page that need
    the same parts.
    """
    return tick.drawn(f"update {page} {' '.join(parts)}", lambda: sse(render(LiveUpdate(parts))))


async def _dashboard(room: Room, tick: Tick, span: Span) -> Dashboard | None:
    served, stats = room.served, tick.stats
    if served is None or stats is None:
        return None
    machine = await room.machine.read()
    past = tick.samples if span is MINUTE else room.history.samples
    return tick.drawn(f"dashboard {span.key}", lambda: presenters.dashboard(stats, tick, served, machine, past, span))


def _shared_parts(room: Room, tick: Tick, waiting: bool) -> dict[str, str]:
    """Return the parts of every page: the status pill, and the load progress on a page that waits for its model."""
    parts = {"status-pill": tick.drawn("pill", lambda: render(room.pill(tick)))}
    if room.served is None and waiting:
        parts["loading"] = tick.drawn("loading", lambda: render(message_presenters.loading(room)))
    return parts


def draw_tiles(board: Dashboard) -> dict[str, str]:
    """Return each tile's markup by the id of its element."""
    drawn = {f"tile-{headline.id}": render(headline) for headline in board.headlines}
    return drawn | {
        "tile-kv-usage": render(board.kv_usage),
        "tile-steps": render(board.steps),
        "tile-latency": render(board.latency),
        "tile-counters": render(board.counters),
        "tile-live-requests": render(board.live_requests),
        "tile-finished-requests": render(board.finished_requests),
        "tile-machine": render(board.machine),
        "tile-model": render(board.model),
    }


HANDLERS = (dashboard_page, live_dashboard, live_status, cancel_request, *request_handlers.HANDLERS)
