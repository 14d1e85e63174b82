"""The description of one operation, which stands beside its handler: `@post(path, operation=Operation(...))`.

The first paragraph of the handler's docstring is the operation's summary, the rest is its description. Paths, methods
and path parameters come from the route.
Does not know: how the OpenAPI document is made from it (openapi.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from localllm.web.api.fields import FieldRules

TEXT, JSON, FORM = "text/plain", "application/json", "multipart/form-data"
OF_MODELS = (404, 409, 502, 503, 507)  # model unknown, or its download, load or wake-up failed


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request body with its field rules. `inside`: fields whose objects, or lists of objects, have rules of their
    own.
    """

    kind: type[msgspec.Struct]
    rules: FieldRules | None = None  # None: fields that the struct does not have are refused
    inside: Mapping[str, RequestBody] = field(default_factory=lambda: MappingProxyType({}))
    example: Mapping[str, Any] | None = None
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """The request and the answers of one handler."""

    answer: Any = None  # a type: JSON; a string: that media type; None: only the status
    body: RequestBody | None = None
    events: Any = None  # type of each streamed event or line, if the body may ask for a stream
    query: type[msgspec.Struct] | None = None
    also: Sequence[int] = ()  # further error statuses
    success: Sequence[int] = (200,)
    guide: str = ""  # page of docs/guides that explains the operation, without .md
