"""The dashboard's handlers, and its live stream.

Does not know: how a tile is filled (views.py) or rendered (templates).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import EngineStopped
from localllm.serving.served import ServedModel
from localllm.web.pages.dashboard import request_handlers, views
from localllm.web.pages.dashboard.machine import MachineMonitor
from localllm.web.pages.dashboard.plots import MINUTE, SPANS
from localllm.web.pages.dashboard.request_views import Viewer
from localllm.web.pages.dashboard.shown import DashboardLink, DashboardQuery, loaded_models, model_choices, shown
from localllm.web.pages.dashboard.views import Dashboard, DashboardPage
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.handlers import shows_loading, update_event
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.sampler import Tick
from localllm.web.pages.frame.state import html, once_per_app, pages_state


@get("/dashboard")
async def dashboard_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the dashboard."""
    state, seen = pages_state(request), shown(request)
    board = await _dashboard(seen, _monitor(request), seen.sampler.tick())
    live_url = f"/live/dashboard{seen.query()}"
    shell = state.shell(request, "Dashboard", "dashboard", live_url, waits=board is None, moves=True)
    spans = tuple(
        DashboardLink(each.title, f"/dashboard{seen.query(last=each.key)}", each is seen.span) for each in SPANS
    )
    page = DashboardPage(shell, board, None if board else state.loading(), spans, model_choices(seen), seen.query())
    return html(page)


@get("/live/dashboard")
async def live_dashboard(request: Request[Any, Any, Any]) -> Stream:
    """Stream every changed tile, twice a second. When other models can be chosen, tell the page to reload."""
    events = _dashboard_events(shown(request), _monitor(request), shows_loading(request))
    return live_stream(request, events)


@post("/dashboard/requests/{request_id:str}/cancel", status_code=200, sync_to_thread=False)
def cancel_request(request: Request[Any, Any, Any]) -> Response[Any]:
    """Cancel a request, also one of another client."""
    for model in _serving(request):
        model.generator.cancel(request.path_params["request_id"])
    return _back(request, "")


@post("/dashboard/requests/cancel", status_code=200, sync_to_thread=False)
def cancel_all(request: Request[Any, Any, Any]) -> Response[Any]:
    """Cancel every request of the model that the dashboard shows."""
    seen = shown(request)
    for model in _serving(request):
        if seen.served is not None and model.name == seen.served.name:
            model.generator.cancel_all()
    return _back(request, seen.query())


def _serving(request: Request[Any, Any, Any]) -> list[ServedModel]:
    """Return the ready models that generate text. Raises `EngineStopped` if there are none."""
    found = [model for model in pages_state(request).manager.ready if model.spec.task == "generate"]
    if not found:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    return found


def _back(request: Request[Any, Any, Any], query: str) -> Response[Any]:
    if is_scripted(request):
        return Response(None, status_code=204)
    return Redirect(f"/dashboard{query}", status_code=303)


def _monitor(request: Request[Any, Any, Any]) -> MachineMonitor:
    """Return the application's monitor, created at first use."""
    return once_per_app(request.app, "machine_monitor", MachineMonitor)


async def _dashboard_events(seen: DashboardQuery, monitor: MachineMonitor, loading: bool) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    models = loaded_models(seen.state)
    async for tick in seen.sampler.follow():
        tiles = await tick.drawn(f"tiles {seen.variant}", partial(_tiles, seen, monitor, tick))
        now = loaded_models(seen.state)
        has_other_tabs = now != models and max(len(now), len(models)) > 1
        if has_other_tabs or (loading and tiles):
            yield sse("", "ready")
            return
        if news := changed(_frame_parts(seen, tick, loading) | tiles, sent):
            yield update_event(tick, f"dashboard {seen.variant}", news)


async def _tiles(seen: DashboardQuery, monitor: MachineMonitor, tick: Tick) -> dict[str, str]:
    """Return each tile's markup by the id of its element; empty while no model is served."""
    board = await _dashboard(seen, monitor, tick)
    return render_tiles(board) if board is not None else {}


def _frame_parts(seen: DashboardQuery, tick: Tick, loading: bool) -> dict[str, str]:
    """Return the live parts of every page. The tick of a chosen model says nothing about the model used last, which the
    status shows.
    """
    if seen.model:
        return {"status-pill": tick.cached("pill", lambda: render(seen.state.pill()))}
    return seen.state.live_parts(tick, waits=loading)


async def _dashboard(seen: DashboardQuery, monitor: MachineMonitor, tick: Tick) -> Dashboard | None:
    served, stats = seen.served, tick.stats
    if served is None or stats is None:
        return None
    machine = await monitor.read([rank.pid for rank in stats.runner.ranks if rank.pid])
    past = tick.samples if seen.span is MINUTE else seen.sampler.hour
    viewer = Viewer(seen.names_keys, seen.base_url, seen.query())
    return tick.cached(
        f"dashboard {seen.variant}",
        lambda: views.dashboard(stats, tick, served, machine, past, seen.span, viewer),
    )


def render_tiles(board: Dashboard) -> dict[str, str]:
    """Return each tile's markup by the id of its element."""
    drawn = {f"tile-{headline.id}": render(headline) for headline in board.headlines}
    return drawn | {
        "tile-ranks": render(board.ranks),
        "tile-kv-usage": render(board.kv_usage),
        "tile-steps": render(board.steps),
        "tile-latency": render(board.latency),
        "tile-counters": render(board.counters),
        "tile-drafts": render(board.drafts),
        "tile-live-requests": render(board.live_requests),
        "tile-finished-requests": render(board.finished_requests),
        "tile-machine": render(board.machine),
        "tile-model": render(board.model),
    }


HANDLERS = (dashboard_page, live_dashboard, cancel_request, cancel_all, *request_handlers.HANDLERS)
