"""What every dialect needs of HTTP: a JSON body in, the model by its name, JSON and warnings out.

Does not know: any dialect's fields.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse

from localllm.config import Task
from localllm.errors import InvalidParameter
from localllm.manager import ModelManager
from localllm.served import ServedModel
from localllm.units import format_count, parse_keep_alive
from localllm.web.api.generation import observed
from localllm.web.caller import prefix_owner_of
from localllm.web.errors import BodyTooLarge, MalformedBody, UnsupportedMediaType

ApiRequest = Request[Any, Any, Any]
Body = TypeVar("Body", bound=msgspec.Struct)

MAX_NESTING = 128
"""Levels of arrays and objects in a body. JSON schemas of tools have some twenty."""
MAX_VALUES = 2_000_000
"""Numbers, texts, lists and objects in a body, counted by what stands between them. 2,048 texts to embed as 512 token
ids each have half of that; the same in empty objects takes 0.15 s and 150 MiB to parse."""
SMALL_BODY_BYTES = 256 * 1024
"""What routes read that take names and switches and no prompts."""


def manager_of(request: ApiRequest) -> ModelManager:
    """Who has the models of the application that was asked."""
    manager: ModelManager = request.app.state.manager
    return manager


async def json_body(request: ApiRequest, *, may_be_untyped: bool = False) -> bytes:
    """The raw body. Raises unless the client says that it sends JSON.

    may_be_untyped: a missing content type passes, too, unless a browser may have sent the request for another site's
    page, which needs no permission to send such a body. A browser then sends an Origin.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    passes = may_be_untyped and not media_type and "origin" not in request.headers
    if media_type != "application/json" and not passes:
        raise UnsupportedMediaType(
            "The body must be sent as application/json.",
            f"Its content type is {media_type or 'missing'!r}.",
            "With curl: -H 'content-type: application/json'.",
        )
    return await request.body()


def parse_json(raw: bytes) -> Any:
    """Raises `MalformedBody`, `BodyTooLarge`. Nesting is bounded here, so that nobody after this can run out of stack:
    how deep the parser itself goes depends on the version of Python."""
    require_few_values(raw)
    try:
        with _uncollected():
            parsed = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody("The body is not valid JSON.", f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
    except RecursionError:
        raise _too_deep() from None
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:  # otherwise it cannot be deep
        _require_shallow(parsed)
    return parsed


def require_few_values(raw: bytes) -> None:
    """Raise `BodyTooLarge` without parsing. Commas and brackets inside texts count, too: the limit leaves room."""
    count = sum(map(raw.count, (b",", b"[", b"{"))) if len(raw) > MAX_VALUES else 0
    if count > MAX_VALUES:
        raise BodyTooLarge(
            "The body has too many values.",
            f"Its commas and opening brackets are {format_count(count)}, and {format_count(MAX_VALUES)} is the limit.",
            "Send it in parts.",
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which else looks at all new lists and dicts again and again: ten times the work.

    The parser keeps the interpreter to itself meanwhile, so no other thread goes without.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _require_shallow(parsed: Any) -> None:
    level = [parsed]
    for _ in range(MAX_NESTING + 1):
        if not level:
            return
        nodes = (node.values() if type(node) is dict else node for node in level)
        level = [child for node in nodes for child in node if type(child) is dict or type(child) is list]
    raise _too_deep()


def _too_deep() -> MalformedBody:
    return MalformedBody("The body is nested too deeply.", f"At most {MAX_NESTING} levels are read.")


async def struct_body(request: ApiRequest, kind: type[Body]) -> Body:
    """The body of one of our own routes; a field that it does not know is refused by name."""
    try:
        return msgspec.convert(parse_json(await json_body(request)), kind)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{error}.") from error


def keep_alive_seconds(asked: str | float | None) -> float | None:
    """How long a model is to stay without a request; None where nobody says."""
    try:
        return None if asked is None else parse_keep_alive(asked)
    except ValueError as error:
        why = "It takes seconds or a time such as 5m; -1 is for good."
        raise InvalidParameter(f"keep_alive is {asked!r}.", why, param="keep_alive") from error


async def served_model(
    request: ApiRequest, name: str | None, task: Task = "generate", *, keep_alive_s: float | None = None
) -> ServedModel:
    """The model of that name, loaded or woken if need be; without a name, of those for `task` the one used last.
    keep_alive_s: how long it stays after this and later requests.

    The request holds it until its last byte is sent: a request is a task of its own, from here to there.
    """
    lease = await manager_of(request).acquire(name, task, keep_alive_s=keep_alive_s)
    handling = asyncio.current_task()
    assert handling is not None
    handling.add_done_callback(lambda _: lease.release())
    model = lease.model.as_asked(name, prefix_owner_of(request))
    if (facts := observed.get()) is not None:
        facts.model, facts.asked_model = model.shown_name, name
    return model


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Header values carry printable ASCII only; a field name is the client's and may be anything."""
    text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()
    return {"x-localllm-warning": "".join(c if c.isprintable() else "?" for c in text)[:2000]} if text else {}


def json_response(
    content: dict[str, Any] | list[dict[str, Any]], headers: dict[str, str] | None = None, status_code: int = 200
) -> ASGIResponse:
    body = msgspec.json.encode(content)
    return ASGIResponse(body=body, media_type="application/json", headers=headers, status_code=status_code)
