"""What the dashboard knows, request by request and as files: pages of requests, CSV, JSON.

Does not know: how a row is filled (rows.py) or drawn (templates).
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
from localllm.web.live import Sample
from localllm.web.pages.dashboard.rows import finished_requests, live_requests, request_page
from localllm.web.pages.errors import UnknownRequest
from localllm.web.pages.room import html, room_of
from localllm.web.views.dashboard import RequestsPage

MOST_LIVE = 1000


@get("/dashboard/requests", sync_to_thread=False)
def requests_page(request: Request[Any, Any, Any]) -> Response[str]:
    """All requests that live, and all finished ones that are still known."""
    stats = _stats(request)
    shell = room_of(request).shell(request, "Requests", "dashboard")
    finished = finished_requests(stats.recent, len(stats.recent))
    return html(RequestsPage(shell, live_requests(stats, MOST_LIVE), finished))


@get("/dashboard/requests/{request_id:str}", sync_to_thread=False)
def one_request(request: Request[Any, Any, Any]) -> Response[str]:
    """Where the time of one request went."""
    stats = _stats(request)
    wanted = request.path_params["request_id"]
    found = next((line for line in (*stats.requests, *stats.recent) if line.request_id == wanted), None)
    if found is None:
        why = f"{len(stats.requests)} that live and the last {len(stats.recent)} finished ones are."
        raise UnknownRequest(f"There is no request {wanted[:80]}.", why, "Open /dashboard/requests.")
    shell = room_of(request).shell(request, "Request", "dashboard")
    return html(request_page(shell, found, stats.taken_s))


@get("/dashboard/minute.csv", sync_to_thread=False)
def minute_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """The samples of the last minute, as far as somebody looked."""
    return _csv(Sample, room_of(request).sampler.look().samples)


@get("/dashboard/hour.csv", sync_to_thread=False)
def hour_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Five-second means of the last hour, oldest first."""
    return _csv(Sample, room_of(request).history.samples)


@get("/dashboard/steps.csv", sync_to_thread=False)
def steps_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """The last steps, oldest first."""
    return _csv(StepComposition, _stats(request).steps)


@get("/dashboard/requests.csv", sync_to_thread=False)
def requests_csv(request: Request[Any, Any, Any]) -> Response[str]:
    """Every request that is known."""
    stats = _stats(request)
    return _csv(RequestTimeline, (*stats.requests, *stats.recent))


@get("/dashboard/stats.json", sync_to_thread=False)
def stats_json(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The whole snapshot that every tile is drawn from."""
    return Response(msgspec.json.encode(_stats(request)), media_type="application/json", headers=_FRESH)


_FRESH = {"Cache-Control": "no-store"}


def _stats(request: Request[Any, Any, Any]) -> EngineStats:
    stats = room_of(request).sampler.look().stats
    if stats is None:
        raise EngineStopped("No model is being served.", hint="Wait until it has loaded.")
    return stats


def _csv(kind: type[Any], lines: Iterable[Any]) -> Response[str]:
    """A header of field names, then a line each; what is not known yet stays empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(kind))
    writer.writerows(_harmless(astuple(line)) for line in lines)
    return Response(text.getvalue(), media_type="text/csv", headers=_FRESH)


def _harmless(cells: Sequence[Any]) -> list[Any]:
    """A client chooses its request's id: a spreadsheet must not read it as a formula."""
    return [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" else cell for cell in cells]


HANDLERS = (requests_page, one_request, minute_csv, hour_csv, steps_csv, requests_csv, stats_json)
