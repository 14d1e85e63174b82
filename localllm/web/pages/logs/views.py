"""Views of the logs page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.pages.frame.views import ErrorNotice, Shell, View


@dataclass(frozen=True, slots=True)
class LogRow:
    """One record of the log, of one line or several."""

    kind: Literal["debug", "info", "warning", "error"]  # its colour class
    level: str
    clock: str  # local time, to the millisecond
    at: str  # date and time, ISO 8601
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class LogTable(View):
    """Log records in order: those of the page, or those logged since."""

    template: ClassVar[str] = "logs/_lines.html"
    rows: tuple[LogRow, ...]
    missed: int = 0  # records that were dropped before these could be sent


@dataclass(frozen=True, slots=True)
class LogsPage(View):
    """`/logs`."""

    template: ClassVar[str] = "logs/page.html"
    shell: Shell
    lines: LogTable
    level: str  # the lowest level shown; empty: all
    levels: tuple[str, ...]
    text: str
    request_id: str
    live_url: str  # empty: there are no live updates
    download_url: str
    chosen: int  # records that match the filter
    hidden: int  # matching records that are too old for this page
    kept: int
    most: int  # the capacity of the buffer
    path: str  # the log file, which holds older records
    error: ErrorNotice | None = None
