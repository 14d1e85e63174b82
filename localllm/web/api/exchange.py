"""HTTP basics for every dialect: read a JSON body, find the model by its name, send JSON and warnings.

Does not know: any dialect's fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse

from localllm.config.settings import Task
from localllm.errors import InvalidParameter, UnsupportedOption
from localllm.fleet.replicas import replicas_of
from localllm.fleet.upstreams import Upstreams
from localllm.machine.memory import paused_collection
from localllm.serving.answers.generation import observed
from localllm.serving.lease import HasModel, Leased
from localllm.serving.manager import ModelManager
from localllm.serving.served import ServedModel
from localllm.units import format_bytes, format_count, parse_keep_alive
from localllm.web.access.caller import is_background, key_name_of, owner_of, prefix_owner_of, source_of
from localllm.web.errors import BodyTooLarge, MalformedBody, UnsupportedMediaType
from localllm.web.shape import Shape

ApiRequest = Request[Any, Any, Any]
Body = TypeVar("Body", bound=msgspec.Struct)

MAX_NESTING = 128
"""Levels of arrays and objects in a body. JSON schemas of tools have some twenty."""
MAX_VALUES = 2_000_000
"""Numbers, texts, lists and objects in a body, counted by their separators. 2,048 texts to embed as 512 token ids each
have half of that; as many empty objects take 0.15 s and 150 MiB to parse.
"""
MOST_QUOTES, LONG_TEXT_BYTES = 200_000, 4096
"""Quotes of a body with pictures above --max-body-bytes, and the shortest picture in base64 that does not count."""
SMALL_BODY_BYTES = 256 * 1024
"""Largest body of routes that read names and switches but no prompts."""


TAKES_PICTURES = {"takes_pictures": True}
"""Option of the handlers whose bodies may bring pictures, for which --max-media-body-bytes is the limit."""


def manager_of(request: ApiRequest) -> ModelManager:
    """Return the model manager of the application."""
    manager: ModelManager = request.app.state.manager
    return manager


def upstreams_of(request: ApiRequest) -> Upstreams:
    """Return the other servers behind this address; there may be none."""
    upstreams: Upstreams = request.app.state.upstreams
    return upstreams


async def json_body(request: ApiRequest, *, may_be_untyped: bool = False) -> bytes:
    """Return the raw body. Raises unless the client declares it as JSON.

    `may_be_untyped`: a missing content type is accepted as well, unless a browser may have sent the request for a page
    of another site, which needs no permission to send such a body. A browser then sends an Origin.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    passes = may_be_untyped and not media_type and "origin" not in request.headers
    if media_type != "application/json" and not passes:
        raise UnsupportedMediaType(
            "The body must be sent as application/json.",
            f"Its content type is {media_type or 'missing'!r}.",
            "With curl: -H 'content-type: application/json'.",
        )
    raw = await request.body()
    limit_bytes = request.app.state.settings.server.max_body_bytes
    if len(raw) > limit_bytes:  # allowed only for pictures in base64: long texts without a space
        texts = raw.split(b'"') if raw.count(b'"') <= MOST_QUOTES else [raw]
        text_bytes = sum(len(text) for text in texts if len(text) < LONG_TEXT_BYTES or b" " in text)
        if text_bytes > limit_bytes:
            raise BodyTooLarge(
                "The request body is too large.",
                f"It has {format_bytes(text_bytes)} without pictures; the limit is {format_bytes(limit_bytes)}.",
                "Send less, or start the server with a higher --max-body-bytes.",
            )
    return raw


def parse_json(raw: bytes) -> Any:
    """Parse a body. Raises `MalformedBody` or `BodyTooLarge`. Nesting is limited here, so that no later code can run
    out of stack; the parser's own limit depends on the version of Python.
    """
    require_few_values(raw)
    try:
        with paused_collection():
            parsed = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody("The body is not valid JSON.", f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
    except RecursionError:
        raise _too_deep() from None
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:  # with fewer brackets it cannot be too deep
        _require_shallow(parsed)
    return parsed


def require_few_values(raw: bytes) -> None:
    """Raise `BodyTooLarge` if a body has too many values, without parsing it. Commas and brackets inside strings are
    counted, too; the limit leaves room for them.
    """
    count = sum(map(raw.count, (b",", b"[", b"{"))) if len(raw) > MAX_VALUES else 0
    if count > MAX_VALUES:
        raise BodyTooLarge(
            "The body has too many values.",
            f"It has {format_count(count)} commas and opening brackets; the limit is {format_count(MAX_VALUES)}.",
            "Send it in parts.",
        )


def _require_shallow(parsed: Any) -> None:
    level = [parsed]
    for _ in range(MAX_NESTING + 1):
        if not level:
            return
        nodes = (node.values() if type(node) is dict else node for node in level)
        level = [child for node in nodes for child in node if type(child) is dict or type(child) is list]
    raise _too_deep()


def _too_deep() -> MalformedBody:
    return MalformedBody("The body is nested too deeply.", f"The limit is {MAX_NESTING} levels.")


async def struct_body(request: ApiRequest, kind: type[Body]) -> Body:
    """Return the body of one of localllm's own routes; unknown fields are refused by name."""
    try:
        return msgspec.convert(parse_json(await json_body(request)), kind)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{error}.") from error


def keep_alive_seconds(asked: str | float | None) -> float | None:
    """Return how long a model stays loaded without a request; None if the request does not say."""
    try:
        return None if asked is None else parse_keep_alive(asked)
    except ValueError as error:
        why = "It must be seconds or a time such as 5m; -1: for ever."
        raise InvalidParameter(f"keep_alive is {asked!r}.", why, param="keep_alive") from error


async def served_model(
    request: ApiRequest, name: str | None, task: Task = "generate", *, keep_alive_s: float | None = None
) -> ServedModel:
    """Return the model of that name, loading or waking it if needed. Without a name: the last used model for `task`.
    `keep_alive_s`: how long the model stays loaded after this and later requests.

    The request holds the model until its last byte is sent: each request is one task from here to there.
    """
    await upstreams_of(request).looked()
    _refuse_remote(request, name)
    lease = await manager_of(request).acquire(name, task, keep_alive_s=keep_alive_s)
    model = held(lease)
    model = model.as_asked(
        name,
        prefix_owner_of(request),
        owner=owner_of(request),
        source=source_of(request),
        key_name=key_name_of(request),
        is_background=is_background(request),
        replica=_replica_of(request, model),
        hearing_models=[each.name for each in manager_of(request).ready if each.hearing is not None],
    )
    if (facts := observed.get()) is not None:
        facts.model, facts.asked_model = model.shown_name, name
    return model


def _replica_of(request: ApiRequest, model: ServedModel) -> int | None:
    """Return the replica that a request names (vLLM's header). Raises `InvalidParameter` where there is none."""
    asked = request.headers.get("x-data-parallel-rank")
    if asked is None:
        return None
    count = len(replicas_of(model)) or 1
    if not asked.isascii() or not asked.isdigit() or int(asked[:9]) >= count:
        raise InvalidParameter(
            f"There is no replica {asked[:20]!r}.",
            f"{model.name} has {count}, numbered from 0.",
            "Start with a larger --data-parallel-size, or leave the header out.",
            param="x-data-parallel-rank",
        )
    return int(asked)


def _refuse_remote(request: ApiRequest, name: str | None) -> None:
    """Raise `UnsupportedOption` if only other servers have the model: this endpoint is not passed on."""
    has = next((each.name for each in upstreams_of(request).all if name and each.lists(name)), None)
    if has is not None and manager_of(request).register.find(name) is None:
        raise UnsupportedOption(
            f"{request.scope['path']} is not passed on to other servers.",
            f"{name} is a model of {has}.",
            "Supported: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/messages, /api/chat, "
            "/api/generate.",
            param="model",
        )


def held(lease: HasModel[Leased]) -> Leased:
    """Return the model of a lease, which is released when the task that handles the request ends."""
    handling = asyncio.current_task()
    assert handling is not None
    handling.add_done_callback(lambda _: lease.release())
    return lease.model


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header with the warnings. It must be printable ASCII, while a field name from a client may be
    anything.
    """
    text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()
    return {"x-localllm-warning": "".join(c if c.isprintable() else "?" for c in text)[:2000]} if text else {}


def json_response(
    content: Shape | Sequence[Shape] | dict[str, Any], headers: dict[str, str] | None = None, status_code: int = 200
) -> ASGIResponse:
    body = msgspec.json.encode(content)
    return ASGIResponse(body=body, media_type="application/json", headers=headers, status_code=status_code)
