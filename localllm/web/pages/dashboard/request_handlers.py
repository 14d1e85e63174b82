"""The dashboard's data by request and as files: pages of requests, CSV, JSON.

Does not know: how a row is filled (request_presenters.py) or rendered (templates).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from typing import Any

import msgspec
from litestar import Request, get
from litestar.response import Response

from localllm.engine.stats import EngineStats, RequestTimeline, StepComposition
from localllm.errors import EngineStopped
from localllm.web.pages.dashboard.request_presenters import finished_requests, live_requests, request_page
from localllm.web.pages.dashboard.views import RequestsPage
from localllm.web.pages.frame.errors import UnknownRequest
from localllm.web.pages.frame.sampler import Sample
from localllm.web.pages.frame.state import html, pages_state

MOST_LIVE = 1000


@get("/dashboard/requests", sync_to_thread=False)
def requests_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all running and waiting requests, and all finished ones that are still known."""
    stats = _stats(request)
    shell = pages_state(request).shell(request, "Requests", "dashboard")
    finished = finished_requests(stats.recent, len(stats.recent))
    return html(RequestsPage(shell, live_requests(stats, MOST_LIVE), finished))


@get("/dashboard/requests/{request_id:str}", sync_to_thread=False)
def one_request(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the timeline of one request."""
    stats = _stats(request)
    wanted = request.path_params["request_id"]
    found = next((line for line in (*stats.requests, *stats.recent) if line.request_id == wanted), None)
    if found is None:
        why = f"The server knows {len(stats.requests)} live requests and the last {len(stats.recent)} finished ones."
        raise UnknownRequest(f"There is no request {wanted[:80]}.", why, "Open /dashboard/requests.")
    shell = pages_state(request).shell(request, "Request", "dashboard")
    return html(request_page(shell, found, stats.taken_s))


@get("/dashboard/minute.csv", sync_to_thread=False)
def minute_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the samples of the last minute, as far as a page was open."""
    return _csv(Sample, pages_state(request).sampler.tick().samples)


@get("/dashboard/hour.csv", sync_to_thread=False)
def hour_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the five-second means of the last hour, oldest first."""
    return _csv(Sample, pages_state(request).sampler.hour)


@get("/dashboard/steps.csv", sync_to_thread=False)
def steps_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the last steps, oldest first."""
    return _csv(StepComposition, _stats(request).steps)


@get("/dashboard/requests.csv", sync_to_thread=False)
def requests_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Return every known request."""
    stats = _stats(request)
    return _csv(RequestTimeline, (*stats.requests, *stats.recent))


@get("/dashboard/stats.json", sync_to_thread=False)
def stats_json(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the whole snapshot that the tiles show."""
    return Response(msgspec.json.encode(_stats(request)), media_type="application/json", headers=_FRESH)


_FRESH = {"Cache-Control": "no-store"}


def _stats(request: Request[Any, Any, Any]) -> EngineStats:
    stats = pages_state(request).sampler.tick().stats
    if stats is None:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    return stats


def _csv(kind: type[Any], lines: Iterable[Any]) -> Response[str]:
    """Return a header of field names, then one line each; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(kind))
    writer.writerows(_without_formulas(astuple(line)) for line in lines)
    return Response(text.getvalue(), media_type="text/csv", headers=_FRESH)


def _without_formulas(cells: Sequence[Any]) -> list[Any]:
    """Return cells that a spreadsheet cannot read as formulas, because a client chooses its request's id."""
    return [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" else cell for cell in cells]


HANDLERS = (requests_page, one_request, minute_csv, hour_csv, steps_csv, requests_csv, stats_json)
