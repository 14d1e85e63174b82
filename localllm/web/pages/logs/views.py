"""Log lines as the page shows them, filtered by level, kind, text and request id.

Does not know: where lines come from.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from localllm.errors import InvalidParameter
from localllm.logs.recent_logs import LogLine
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


LEVELS = ("debug", "info", "warning", "error")

KINDS = {"server": "Server", "requests": "Requests"}
"""What a filter may select, with its name on the page: the lines about requests, or all others."""

ACCESS_LOGGER = "localllm.access"
LONGEST_TEXT = 200

SHORT_ID_CHARS = 8
"""Characters shown of the id of a request, which usually has 32."""

_ID = re.compile(r"[A-Za-z0-9._:-]{0,128}")
_ID_IN_TEXT = re.compile(r"(?<=\sid=)[A-Za-z0-9._:/-]{13,128}(?!\S)")
NO_URLS: Mapping[str, str] = {}
_LEVEL_NUMBERS = logging.getLevelNamesMapping()


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A filter; an empty field matches every line."""

    level: str = ""  # this level and above
    text: str = ""  # anywhere in the line, case-insensitive
    request_id: str = ""  # as in the header x-request-id, or at the end of a line
    kind: str = ""  # "server" or "requests"

    def __post_init__(self) -> None:
        if self.kind not in ("", *KINDS):
            raise InvalidParameter(f"Unknown kind {self.kind[:40]!r}.", f"Known: {', '.join(KINDS)}.", param="what")
        if self.level not in ("", *LEVELS):
            raise InvalidParameter(f"Unknown level {self.level[:40]!r}.", f"Known: {', '.join(LEVELS)}.", param="level")
        if len(self.text) > LONGEST_TEXT:
            why = f"It has {len(self.text)} characters; the limit is {LONGEST_TEXT}."
            raise InvalidParameter("The search text is too long.", why, param="text")
        if not _ID.fullmatch(self.request_id):
            why = "A request id has up to 128 letters, digits and . _ : -."
            raise InvalidParameter("This is not a request id.", why, param="id")

    @property
    def query(self) -> str:
        """The filter as a URL query."""
        given = {"level": self.level, "text": self.text, "id": self.request_id, "what": self.kind}
        return urlencode({name: value for name, value in given.items() if value})

    def of(self, lines: Iterable[LogLine]) -> list[LogLine]:
        """Return the matching lines, in order."""
        lowest = _LEVEL_NUMBERS.get(self.level.upper(), 0)
        text = self.text.casefold()
        # an id inside a longer id is another request; the id of a log_filter (`id-0`) still matches
        whole_id = re.compile(rf"(?<![\w.:-]){re.escape(self.request_id)}(?![\w.:])") if self.request_id else None
        return [
            line
            for line in lines
            if _LEVEL_NUMBERS.get(line.level, lowest) >= lowest
            and (not self.kind or (self.kind == "requests") == (line.logger == ACCESS_LOGGER))
            and text in line.text.casefold()
            and (whole_id is None or whole_id.search(line.text))
        ]


def filter_from(query: Mapping[str, str]) -> LogFilter:
    """Return the filter of a query. Raises `InvalidParameter`."""
    texts = (query.get(name, "").strip() for name in ("text", "id", "what"))
    return LogFilter(query.get("level", ""), *texts)


def request_urls(engine_ids: Iterable[str], pairs: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the dashboard's page of each request that the engine knows, by each id that a log line may have: the
    engine's, and that of the HTTP request. `pairs`: (id of the HTTP request, id of the engine). Choices of a request
    for several, whose ids have a slash, have no pages.
    """
    urls = {each: f"/dashboard/requests/{each}" for each in engine_ids if "/" not in each}
    return {**urls, **{request_id: urls[engine_id] for request_id, engine_id in pairs if engine_id in urls}}


def row(line: LogLine, urls: Mapping[str, str] = NO_URLS) -> LogRow:
    """Split a line for the table: time, level, logger and a long request id have places of their own. `urls`: pages of
    requests by id.
    """
    text = _message_text(line)
    found = _ID_IN_TEXT.search(text)
    request_id = found[0] if found else ""
    at = time.localtime(line.at_s)
    number = _LEVEL_NUMBERS.get(line.level, logging.INFO)
    kind = "debug" if number < logging.INFO else "info" if number < logging.WARNING else "warning"
    return LogRow(
        kind="error" if number >= logging.ERROR else kind,  # type: ignore[arg-type]
        level=line.level,
        clock=f"{time.strftime('%H:%M:%S', at)}.{int(line.at_s % 1 * 1000):03d}",
        at=time.strftime("%Y-%m-%dT%H:%M:%S%z", at),
        logger=line.logger.removeprefix("localllm."),
        text=text[: found.start()] if found else text,
        request_id=request_id,
        short_id=f"{request_id[:SHORT_ID_CHARS]}…" if found else "",
        request_url=urls.get(request_id, ""),
        rest=text[found.end() :] if found else "",
    )


def _message_text(line: LogLine) -> str:
    """Return the text without the prefix of the server's log format."""
    head, found, said = line.text.partition(f" {line.logger} ")
    return said if found and line.level in head and "\n" not in head else line.text
