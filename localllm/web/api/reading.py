"""Parse JSON bytes into structs; errors name the field. `null` means absent.

Does not know: any dialect's fields, HTTP beyond the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from localllm.errors import InvalidParameter, RequestError
from localllm.units import format_count
from localllm.web.api.exchange import ApiRequest, parse_json
from localllm.web.api.fields import FieldRules
from localllm.web.errors import InvalidType, MalformedBody, MissingParameter

Body = TypeVar("Body", bound=msgspec.Struct)

LARGE_BODY_BYTES = 256 * 1024
"""Bodies from this size on are parsed in a thread; a smaller one takes a few milliseconds."""
MAX_OBJECTS = 10_000
"""Most objects in one field: messages, tools, items. Each one is checked, which takes some ten microseconds."""


class ModelQuery(msgspec.Struct, kw_only=True):
    """The query of the GET routes that concern one model."""

    model: str | msgspec.UnsetType = msgspec.UNSET


async def read(raw: bytes, kind: type[Body], rules: FieldRules) -> tuple[Body, list[str]]:
    """Return the parsed body and its warnings. Raises the `RequestError` that names the wrong field."""
    if len(raw) < LARGE_BODY_BYTES:
        return read_object(_parse(raw), kind, rules)
    return await anyio.to_thread.run_sync(lambda: read_object(_parse(raw), kind, rules))


def read_object(
    given: Mapping[str, Any], kind: type[Body], rules: FieldRules, inside: str = ""
) -> tuple[Body, list[str]]:
    """Return a parsed object and its warnings. `inside`: its path within the body, such as `options.`."""
    warnings = rules.check(given, kind.__struct_encode_fields__, inside)
    try:
        return msgspec.convert(given, kind), warnings
    except msgspec.ValidationError as error:
        raise _named(str(error), inside) from None


def read_query(request: ApiRequest, kind: type[Body]) -> Body:
    """Return the parsed query. Parameters that `kind` does not have are left to the caller. Raises the error that names
    the wrong parameter.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _named(str(error), "") from None


def text_field(given: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text field of an object without a struct. `where`: the object's path within the body."""
    if not isinstance(value := given.get(name), str):
        raise wrong_type(f"{where}.{name}", "text", value)
    return value


def wrong_type(where: str, expected: str, got: object) -> InvalidType:
    return InvalidType(f"Invalid type for {where!r}.", f"Expected {expected}, got {type(got).__name__}.", param=where)


def _parse(raw: bytes) -> dict[str, Any]:
    given = parse_json(raw)
    if not isinstance(given, dict):
        raise MalformedBody("The body must be a JSON object.", f"It is of type {type(given).__name__}.")
    for name, value in given.items():
        if type(value) is list and len(value) > MAX_OBJECTS and any(type(each) is dict for each in value):
            what = f"{name!r} holds {format_count(len(value))} items."
            raise InvalidParameter(what, f"The limit is {format_count(MAX_OBJECTS)}.", param=name)
    return given


def _named(message: str, inside: str) -> RequestError:
    """Turn msgspec's 'Expected `int`, got `str` - at `$.n`' into OpenAI's wording, with the field as `param`."""
    complaint, _, path = message.partition(" - at `$")
    param = (inside + path.strip("`").lstrip(".")).rstrip(".") or None
    if missing := re.match(r"Object missing required field `(\w+)`", complaint):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return MissingParameter(f"Missing required parameter: {param!r}.", param=param)
    if complaint.startswith("Expected") and not re.search("[<>]=", complaint):
        return InvalidType(f"Invalid type for {param!r}.", _sentence(complaint.replace("`", "")), param=param)
    return InvalidParameter(f"Invalid value for {param!r}.", _sentence(complaint.replace("`", "")), param=param)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
