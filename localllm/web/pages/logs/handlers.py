"""The logs page: recent lines, new lines live, and a download of all.

Does not know: how lines are filtered and split (views.py), who logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from litestar import Request, get
from litestar.response import Response, Stream

from localllm.errors import InvalidParameter
from localllm.logs.log_file import log_path
from localllm.logs.recent_logs import KEPT, RecentLogs, installed
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.live import live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import ErrorNotice
from localllm.web.pages.logs.views import (
    KINDS,
    LEVELS,
    LogCard,
    LogFilter,
    LogsPage,
    LogTable,
    filter_from,
    request_urls,
    row,
)

SHOWN = 500
"""Lines shown at first; a script keeps the page at this number as more arrive."""
EVERY_S = 0.2
"""Lines within this time are sent together."""

NO_LOGS = ErrorNotice("This server keeps no log in memory.", "It was not started by localllm up or serve.")


@get("/logs", sync_to_thread=False)
def logs_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the last lines; more arrive over SSE. htmx gets the lines alone, as one types into the filter."""
    log_filter, recent = filter_from(request.query_params), installed()
    card = _card(log_filter, recent, _urls(request))
    if is_scripted(request):
        query = f"?{log_filter.query}" if log_filter.query else ""
        return html(card, headers={"HX-Replace-Url": f"/logs{query}"})
    page = LogsPage(
        pages_state(request).shell(request, "Logs", "logs"),
        card,
        kind=log_filter.kind,
        kinds=tuple(KINDS.items()),
        level=log_filter.level,
        levels=LEVELS,
        text=log_filter.text,
        request_id=log_filter.request_id,
        most=KEPT,
        path=str(log_path(request.app.state.settings.server.port)),
        error=NO_LOGS if recent is None else None,
    )
    return html(page)


def _card(log_filter: LogFilter, recent: RecentLogs | None, urls: Mapping[str, str]) -> LogCard:
    kept = recent.after() if recent is not None else []
    chosen = log_filter.of(kept)
    shown = chosen[-SHOWN:]
    last = kept[-1].number if kept else 0
    query = f"?{log_filter.query}" if log_filter.query else ""
    return LogCard(
        LogTable(tuple(row(line, urls) for line in shown)),
        is_filtered=bool(query),
        live_url=f"/logs/live{query}{'&' if query else '?'}after={last}" if recent is not None else "",
        download_url=f"/logs/download{query}",
        chosen=len(chosen),
        hidden=len(chosen) - len(shown),
        kept=len(kept),
    )


def _urls(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Return the pages of the requests that the dashboard can show."""
    stats, ids = pages_state(request).stats(), request.app.state.engine_ids
    if stats is None:
        return {}
    return request_urls((line.request_id for line in (*stats.requests, *stats.recent)), ids.pairs())


@get("/logs/live", sync_to_thread=False)
def live_logs(request: Request[Any, Any, Any]) -> Stream:
    """Stream the lines after number `after`; a reconnecting browser sends the number of its last line."""
    log_filter = filter_from(request.query_params)
    after = _number(request.headers.get("last-event-id", "") or request.query_params.get("after", "0"))
    recent = installed()
    if recent is None:
        raise InvalidParameter(NO_LOGS.what, NO_LOGS.why)
    return live_stream(request, _new_lines(request, recent, log_filter, after))


@get("/logs/download", sync_to_thread=False)
def download_logs(request: Request[Any, Any, Any]) -> Response[str]:
    """Return every matching line in memory, as it was logged."""
    recent = installed()
    lines = filter_from(request.query_params).of(recent.after() if recent is not None else ())
    headers = {"Content-Disposition": 'attachment; filename="localllm-log.txt"', "Cache-Control": "no-store"}
    text = "".join(f"{line.text}\n" for line in lines)
    return Response(text, media_type="text/plain", headers=headers)


async def _new_lines(
    request: Request[Any, Any, Any], recent: RecentLogs, log_filter: LogFilter, number: int
) -> AsyncIterator[bytes]:
    while True:
        lines = await recent.wait_after(number)
        missed = lines[0].number - number - 1
        number = lines[-1].number
        chosen = log_filter.of(lines)
        if chosen or missed:
            urls = _urls(request) if chosen else {}
            drawn = render(LogTable(tuple(row(line, urls) for line in chosen), missed))
            yield f"id: {number}\n".encode() + sse(drawn)
        await asyncio.sleep(EVERY_S)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidParameter(f"after is {text[:40]!r}.", "It must be the number of a line.", param="after")
    return int(text)


HANDLERS = (logs_page, live_logs, download_logs)
