"""Views of the logs page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.web.pages.frame.views import ErrorNotice, Shell, View, view


@dataclass(frozen=True, slots=True)
class LogRow:
    """One record of the log, of one line or several."""

    kind: Literal["debug", "info", "warning", "error"]  # its colour class
    level: str
    clock: str  # local time, to the millisecond
    at: str  # date and time, ISO 8601
    logger: str
    text: str
    request_id: str = ""  # a long id in the text, which is then shown in short; empty: the text has none
    short_id: str = ""
    request_url: str = ""  # page of that request; empty: it has none
    rest: str = ""  # the text after the id


@view("logs/_lines.html")
class LogTable(View):
    """Log records in order: the records of the page, or the ones logged since."""

    rows: tuple[LogRow, ...]
    missed: int = 0  # records that were dropped before these could be sent


@view("logs/_card.html")
class LogCard(View):
    """The lines that match a filter. The filter's form replaces the card as one types."""

    lines: LogTable
    is_filtered: bool
    live_url: str  # empty: there are no live updates
    download_url: str
    chosen: int  # records that match the filter
    hidden: int  # matching records that are too old for this page
    kept: int


@view("logs/page.html")
class LogsPage(View):
    """`/logs`."""

    shell: Shell
    card: LogCard
    kind: str  # what is shown; empty: everything
    kinds: tuple[tuple[str, str], ...]  # (kind, name on the page)
    level: str  # the lowest level shown; empty: all
    levels: tuple[str, ...]
    text: str
    request_id: str
    most: int  # the capacity of the buffer
    path: str  # the log file, which holds older records
    error: ErrorNotice | None = None
