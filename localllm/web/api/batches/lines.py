"""The lines of a batch: requests to read, and answers to write, in OpenAI's format.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, ...}

The id of an answer has the number of its request's line. So a batch that was interrupted knows which lines are done.
Does not know: how a request is answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from localllm.errors import InvalidParameter, LocalLLMError
from localllm.units import format_bytes
from localllm.web.shape import Shape

_ID = b'{"id":"batch_req_'


class LineBody(msgspec.Struct):
    model: Any = None
    stream: Any = None


class _LineOrder(msgspec.Struct):
    """The parts of a line that are read for the order of the lines."""

    custom_id: Any = None
    body: Any = None


class _RequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch."""

    custom_id: str
    url: str
    body: bytes  # JSON


class LineError(Shape):
    code: str
    message: str


class LineResponse(Shape):
    status_code: int
    request_id: str
    body: msgspec.Raw


class AnsweredLine(Shape):
    """A line of an output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


@dataclass(frozen=True, slots=True)
class InputIndex:
    """Offsets of the lines of an input file. Empty lines are not counted."""

    path: Path
    starts: array[int]
    lengths: array[int]
    order: list[int]  # numbers of the lines, those of one model together
    repeated: frozenset[int]  # numbers of the lines whose custom_id an earlier line has

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, number: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.starts[number])
            return file.read(self.lengths[number])


def index_of(path: Path, max_lines: int) -> InputIndex:
    """Return the index of a file. Blocking. Raises `InvalidParameter` for an empty file and for too many lines."""
    starts, lengths, repeated = array("Q"), array("Q"), list[int]()
    ids, models = set[str](), dict[str, list[int]]()
    at = 0
    with path.open("rb") as file:
        for raw in file:
            if raw.strip():
                number = len(starts)
                if number >= max_lines:
                    raise InvalidParameter(
                        f"The file has more than {max_lines:,} lines.",
                        "This is the limit of a batch.",
                        "Split it, or start the server with a higher --max-batch-lines.",
                        param="input_file_id",
                    )
                starts.append(at)
                lengths.append(len(raw))
                custom_id, model = _order_of(raw)
                if custom_id is not None and custom_id in ids:
                    repeated.append(number)
                elif custom_id is not None:
                    ids.add(custom_id)
                models.setdefault(model, []).append(number)
            at += len(raw)
    if not starts:
        what = "The file has no lines."
        raise InvalidParameter(what, "A batch needs at least one request.", param="input_file_id")
    order = [number for numbers in models.values() for number in numbers]
    return InputIndex(path, starts, lengths, order, frozenset(repeated))


def _order_of(raw: bytes) -> tuple[str | None, str]:
    """Return the custom_id of a line and its model's name; a line that cannot be read has neither."""
    try:
        head = msgspec.json.decode(raw, type=_LineOrder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, ""
    model = head.body.get("model") if isinstance(head.body, dict) else None
    return (head.custom_id if isinstance(head.custom_id, str) else None), (model if isinstance(model, str) else "")


def custom_id_of(raw: bytes) -> str | None:
    """Return the custom_id of a line, if it has one, whatever else the line has."""
    return _order_of(raw)[0]


@dataclass(frozen=True, slots=True)
class LineRules:
    """Rules that each line must obey."""

    urls: frozenset[str]  # endpoints
    max_bytes: int
    is_repeated: bool = False  # an earlier line has its custom_id


def read_line(raw: bytes, rules: LineRules) -> BatchLine:
    """Parse a line. Raises `InvalidParameter` for anything but a request to one of the endpoints."""
    if rules.is_repeated:
        why = "An earlier line of the file has it."
        raise InvalidParameter("The custom_id is not unique.", why, param="custom_id")
    if len(raw) > rules.max_bytes:
        raise InvalidParameter(
            f"The line has {format_bytes(len(raw))}.",
            f"The limit is {format_bytes(rules.max_bytes)}, as for the body of a request.",
            "Shorten it, or start the server with a higher --max-body-bytes.",
        )
    try:
        line = msgspec.json.decode(raw, type=_RequestLine)
        body = msgspec.json.decode(line.body, type=LineBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"{str(error)[:1].upper()}{str(error)[1:]}."
        hint = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise InvalidParameter("The line is not a request.", why, hint) from None
    if line.method != "POST":
        raise InvalidParameter(f"The method {line.method[:20]!r} is not supported.", "Use POST.", param="method")
    if line.url not in rules.urls:
        known = ", ".join(sorted(rules.urls))
        raise InvalidParameter(f"{line.url[:80]!r} is not an endpoint of this batch.", f"Use {known}.", param="url")
    if body.stream:
        raise InvalidParameter("'stream' is not supported in a batch.", "A line has one answer.", param="stream")
    return BatchLine(line.custom_id, line.url, bytes(line.body))


def request_name(batch_id: str, number: int) -> str:
    """Return the id of an answer."""
    return f"batch_req_{batch_id.removeprefix('batch_')}-{number}"


def failed_line(name: str, custom_id: str | None, error: LocalLLMError) -> bytes:
    """Return the line for a request that was not sent to its endpoint."""
    message = " ".join(part for part in (error.what, error.why, error.hint) if part)
    return written(AnsweredLine(id=name, custom_id=custom_id, response=None,
                                error=LineError(code=error.code or "error", message=message)))  # fmt: skip


def written(line: AnsweredLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def answered_numbers(path: Path) -> tuple[set[int], int]:
    """Return the numbers of the lines that an output file answers, and the length of its whole lines: a process that
    was killed may have left a part of a line at the end."""
    numbers, end = set[int](), 0
    for raw in _raw_lines(path):
        if not raw.endswith(b"\n"):
            break
        end += len(raw)
        name = raw[len(_ID) : len(_ID) + 100].partition(b'"')[0]
        number = name.rpartition(b"-")[2]
        if raw.startswith(_ID) and number.isdigit():
            numbers.add(int(number))
    return numbers, end


def _raw_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file
