"""The dashboard's handlers, and its live stream.

Does not know: how a tile is filled (presenters.py) or rendered (templates).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import EngineStopped, InvalidParameter
from localllm.web.pages.dashboard import presenters, request_handlers
from localllm.web.pages.dashboard.machine import MachineMonitor
from localllm.web.pages.dashboard.plots import MINUTE, SPANS, Span
from localllm.web.pages.dashboard.views import Dashboard, DashboardPage
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.handlers import shows_loading, update_event
from localllm.web.pages.frame.live import changed, closing, event_stream, sse, until_closing
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.sampler import Tick
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import PagesState, html, once_per_app, pages_state


@get("/dashboard")
async def dashboard_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the dashboard."""
    state, span = pages_state(request), _span(request)
    board = await _dashboard(state, _monitor(request), state.sampler.tick(), span)
    live_url = "/live/dashboard" if span is MINUTE else f"/live/dashboard?last={span.key}"
    shell = state.shell(request, "Dashboard", "dashboard", live_url, waits=board is None, moves=True)
    spans = tuple((each.key, each.title, each is span) for each in SPANS)
    return html(DashboardPage(shell, board, None if board else state.loading(), spans))


@get("/live/dashboard")
async def live_dashboard(request: Request[Any, Any, Any]) -> Stream:
    """Stream every changed tile, twice a second."""
    state = pages_state(request)
    events = _dashboard_events(state, _monitor(request), _span(request), shows_loading(request))
    return event_stream(until_closing(events, closing(request.app.state)))


@post("/dashboard/requests/{request_id:str}/cancel", guards=[same_origin], status_code=200, sync_to_thread=False)
def cancel_request(request: Request[Any, Any, Any]) -> Response[Any]:
    """Cancel a request, also one of another client."""
    state = pages_state(request)
    if state.served is None:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    state.served.generator.cancel(request.path_params["request_id"])
    if is_scripted(request):
        return Response(None, status_code=204)
    return Redirect("/dashboard", status_code=303)


def _monitor(request: Request[Any, Any, Any]) -> MachineMonitor:
    """Return the application's monitor, created at first use."""
    return once_per_app(request.app, "machine_monitor", MachineMonitor)


def _span(request: Request[Any, Any, Any]) -> Span:
    """Return the requested time range. Raises `InvalidParameter`."""
    asked = request.query_params.get("last", MINUTE.key)
    for span in SPANS:
        if span.key == asked:
            return span
    known = ", ".join(span.key for span in SPANS)
    raise InvalidParameter(f"Unknown time span {asked[:40]!r}.", f"Known: {known}.", param="last")


async def _dashboard_events(
    state: PagesState, monitor: MachineMonitor, span: Span, loading: bool
) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    async for tick in state.sampler.follow():
        board = await _dashboard(state, monitor, tick, span)
        if loading and board is not None:
            yield sse("", "ready")
            return
        parts = state.live_parts(tick, waits=loading)
        if board is not None:
            parts |= tick.cached(f"tiles {span.key}", lambda board=board: render_tiles(board))  # type: ignore[misc]
        if news := changed(parts, sent):
            yield update_event(tick, f"dashboard {span.key}", news)


async def _dashboard(state: PagesState, monitor: MachineMonitor, tick: Tick, span: Span) -> Dashboard | None:
    served, stats = state.served, tick.stats
    if served is None or stats is None:
        return None
    machine = await monitor.read([rank.pid for rank in stats.runner.ranks if rank.pid])
    past = tick.samples if span is MINUTE else state.sampler.hour
    return tick.cached(f"dashboard {span.key}", lambda: presenters.dashboard(stats, tick, served, machine, past, span))


def render_tiles(board: Dashboard) -> dict[str, str]:
    """Return each tile's markup by the id of its element."""
    drawn = {f"tile-{headline.id}": render(headline) for headline in board.headlines}
    return drawn | {
        "tile-ranks": render(board.ranks),
        "tile-kv-usage": render(board.kv_usage),
        "tile-steps": render(board.steps),
        "tile-latency": render(board.latency),
        "tile-counters": render(board.counters),
        "tile-live-requests": render(board.live_requests),
        "tile-finished-requests": render(board.finished_requests),
        "tile-machine": render(board.machine),
        "tile-model": render(board.model),
    }


HANDLERS = (dashboard_page, live_dashboard, cancel_request, *request_handlers.HANDLERS)
