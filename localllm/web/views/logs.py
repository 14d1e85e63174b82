"""Views of the logs page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Shell, View


@dataclass(frozen=True, slots=True)
class LogRow:
    """One record of the log, of one line or several."""

    kind: Literal["debug", "info", "warning", "error"]  # its colour
    level: str
    clock: str  # of this machine, to the millisecond
    at: str  # the same with its date, ISO 8601
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class LogLines(View):
    """Records in their order: those of the page, or those that have come since."""

    template: ClassVar[str] = "logs/_lines.html"
    rows: tuple[LogRow, ...]
    missed: int = 0  # records before these that were gone before they could be sent


@dataclass(frozen=True, slots=True)
class LogsPage(View):
    """`/logs`."""

    template: ClassVar[str] = "logs/page.html"
    shell: Shell
    lines: LogLines
    level: str  # the lowest that is shown; empty: all
    levels: tuple[str, ...]
    text: str
    request_id: str
    live_url: str  # empty: nothing comes
    download_url: str
    chosen: int  # records that the filter lets through
    hidden: int  # of those, the ones too old for this page
    kept: int
    most: int  # that can be kept
    path: str  # of the log file, which holds more
    error: ErrorNotice | None = None
