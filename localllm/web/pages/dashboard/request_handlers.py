"""The dashboard's data by request and as files: pages of requests, CSV, JSON.

Does not know: how a row is filled (request_views.py) or rendered (templates).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, fields, replace
from typing import Any

import msgspec
from litestar import Request, get
from litestar.response import Response

from localllm.engine.client import EngineClient
from localllm.engine.stats import EngineStats, RequestTimeline, StepComposition
from localllm.errors import EngineStopped
from localllm.web.access.caller import owner_of
from localllm.web.pages.dashboard.request_views import (
    RequestsPage,
    Viewer,
    finished_requests,
    live_requests,
    request_page,
)
from localllm.web.pages.dashboard.shown import shown
from localllm.web.pages.frame.errors import UnknownRequest
from localllm.web.pages.frame.sampler import StatsSample
from localllm.web.pages.frame.state import html, pages_state

MOST_LIVE = 1000


@get("/dashboard/requests", sync_to_thread=False)
def requests_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all running requests, the first waiting ones, and all finished ones that are still known."""
    stats, viewer = _stats(request), _viewer(request)
    shell = pages_state(request).shell(request, "Requests", "dashboard")
    finished = finished_requests(stats.recent, viewer, len(stats.recent))
    return html(RequestsPage(shell, live_requests(stats, viewer, MOST_LIVE), finished))


@get("/dashboard/requests/{request_id:str}", sync_to_thread=False)
def one_request(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the timeline of one request."""
    wanted, state = request.path_params["request_id"], pages_state(request)
    known = [_stats(request), *(model.client.stats() for model in state.manager.ready)]
    for stats in known:
        found = next((line for line in (*stats.requests, *stats.recent) if line.request_id == wanted), None)
        if found is not None:
            shell = state.shell(request, "Request", "dashboard")
            owner = owner_of(request)  # the texts are for the sender alone, not even for admins
            clients = [model.client for model in state.manager.ready if isinstance(model.client, EngineClient)]
            miss = next((miss for each in clients if (miss := each.cache_miss(found, owner)) is not None), None)
            return html(request_page(shell, found, stats.taken_s, _viewer(request), miss))
    live, ended = len(known[0].requests), len(known[0].recent)
    why = f"The dashboard knows {live} running and next waiting requests and the last {ended} finished ones."
    raise UnknownRequest(f"There is no request {wanted[:80]}.", why, "The dashboard lists them.")


@get("/dashboard/minute.csv", sync_to_thread=False)
def minute_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the samples of the last minute, as far as a page was open."""
    return _csv(StatsSample, shown(request).sampler.tick().samples)


@get("/dashboard/hour.csv", sync_to_thread=False)
def hour_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the five-second means of the last hour, oldest first."""
    return _csv(StatsSample, shown(request).sampler.hour)


@get("/dashboard/steps.csv", sync_to_thread=False)
def steps_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the last steps, oldest first."""
    return _csv(StepComposition, _stats(request).steps)


@get("/dashboard/requests.csv", sync_to_thread=False)
def requests_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the running requests, the first waiting ones and the last finished ones."""
    stats = _stats(request)
    return _csv(RequestTimeline, (*stats.requests, *stats.recent))


@get("/dashboard/stats.json", sync_to_thread=False)
def stats_json(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the whole snapshot that the tiles show."""
    return Response(msgspec.json.encode(_stats(request)), media_type="application/json", headers=_FRESH)


_FRESH = {"Cache-Control": "no-store"}


def _viewer(request: Request[Any, Any, Any]) -> Viewer:
    seen = shown(request)
    return Viewer(seen.names_keys, seen.base_url, seen.query())


def _stats(request: Request[Any, Any, Any]) -> EngineStats:
    """Return the statistics of the model that the dashboard shows. The names of keys are for admins only."""
    seen = shown(request)
    stats = seen.sampler.tick().stats
    if stats is None:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    if seen.names_keys:
        return stats
    return replace(stats, requests=_without_keys(stats.requests), recent=_without_keys(stats.recent))


def _without_keys(lines: Iterable[RequestTimeline]) -> tuple[RequestTimeline, ...]:
    return tuple(replace(line, key_name="") for line in lines)


def _csv(kind: type[Any], lines: Iterable[Any]) -> Response[str]:
    """Return a header of field names, then one line each; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(kind))
    writer.writerows(  # a client chooses its request's id; a spreadsheet must not read it as a formula
        [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" else cell for cell in astuple(line)]
        for line in lines
    )
    return Response(text.getvalue(), media_type="text/csv", headers=_FRESH)


HANDLERS = (requests_page, one_request, minute_csv, hour_csv, steps_csv, requests_csv, stats_json)
