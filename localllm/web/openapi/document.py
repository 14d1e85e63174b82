"""Make an OpenAPI 3.1 document from the routes of an application.

The table of a dialect (openai.py, anthropic.py, ...) says what each handler reads and answers. Paths, methods and
parameters come from the routes, the required scope from access/scopes.py, the shape of errors from errors.py.
Does not know: any dialect's fields, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.routes import BaseRoute, HTTPRoute

from localllm.version import __version__
from localllm.web.access.scopes import is_open, scope_of
from localllm.web.errors import Dialect, dialect_of
from localllm.web.openapi.bodies import Body, Schema, body_schemas, reference, struct_schemas

JSON, TEXT, EVENTS, LINES = "application/json", "text/plain", "text/event-stream", "application/x-ndjson"

REFUSALS = (400, 403, 408, 414, 431, 500)  # any request
LOCKED = (401, 429)  # routes that may need a key
OF_BODIES = (413, 415, 503)
OF_MODELS = (404, 409, 502, 503, 507)  # model unknown, or its download, load or wake-up failed
OVERLOADED: Mapping[Dialect, int] = {"anthropic": 529}

DESCRIPTION = """\
The API of this server, generated from the code that parses requests. Each field is either honoured, accepted without
effect, or refused with status 400 and its name. A value that its type allows may still be refused if it is out of
range or contradicts another field. `null` means absent."""

SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
HEADERS: dict[str, Schema] = {
    "x-request-id": {"description": "Id of the request in the log.", "required": True, "schema": {"type": "string"}},
    "x-localllm-warning": {
        "description": "Fields that were accepted but have no effect.",
        "schema": {"type": "string"},
    },
    "retry-after": {"description": "Seconds to wait before the next attempt.", "schema": {"type": "integer"}},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """The request and the answers of one handler."""

    what: str
    answer: Any = None  # a type: JSON; a string: that media type; None: only the status
    body: Body | None = None
    events: Any = None  # type of each streamed event or line, if the body may ask for a stream
    query: type[msgspec.Struct] | None = None
    path: Mapping[str, Schema] | None = None  # schemas of path parameters that are more than plain text
    also: Sequence[int] = ()  # further error statuses
    success: Sequence[int] = (200,)


Table = Mapping[HTTPRouteHandler, Operation]


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of objects that have exactly these fields."""


class OpenAIProblem(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Shape):
    error: OpenAIProblem


class AnthropicProblem(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    type: Literal["error"]
    error: AnthropicProblem
    request_id: str


class OllamaError(Shape):
    error: str


ERRORS: Mapping[Dialect, type] = {"openai": OpenAIError, "anthropic": AnthropicError, "ollama": OllamaError}


def document(routes: Iterable[BaseRoute], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes. `tables` is keyed by the prefix of component names. Raises
    `KeyError` if a handler is missing from every table.
    """
    rows = {str(handler): (name, operation) for name, table in tables.items() for handler, operation in table.items()}
    components: dict[str, Schema] = {}
    for error in ERRORS.values():
        components |= struct_schemas("Error", error)[1]
    errors: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for route, handler in _documented(routes):
        name, operation = rows[str(handler)]
        for method in sorted(handler.http_methods):
            maker = _Maker(name, operation, method, route, components, errors)
            paths.setdefault(route.path_format, {})[method.lower()] = maker.schema()
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__, "description": DESCRIPTION},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": dict(sorted(errors.items())),
            "headers": HEADERS,
            "securitySchemes": SECURITY,
        },
    }


def _documented(routes: Iterable[BaseRoute]) -> Iterator[tuple[HTTPRoute, HTTPRouteHandler]]:
    for route in routes:
        if isinstance(route, HTTPRoute):
            yield from ((route, handler) for handler in route.route_handlers if handler.resolve_include_in_schema())


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes one operation; adds the components and errors it refers to to `components` and `errors`."""

    name: str
    operation: Operation
    method: str
    route: HTTPRoute
    components: dict[str, Schema]
    errors: dict[str, Schema]

    def schema(self) -> Schema:
        path, operation = self.route.path_format, self.operation
        is_free = is_open(path)
        made: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{path}").strip("_"),
            "summary": operation.what,
            "tags": [self.name],
            "parameters": [*self._path_parameters(), *self._query_parameters()],
            "responses": self._responses(is_free),
            # A key is needed if the server has keys; `{}` stands for a server without keys.
            "security": [] if is_free else [{}, *({scheme: []} for scheme in SECURITY)],
        }
        if not is_free:
            made["x-scope"] = scope_of(self.method, path)
        if operation.body is not None:
            self.components.update(body_schemas(self.name, operation.body))
            content = {JSON: {"schema": reference(self.name, operation.body.kind)}}
            made["requestBody"] = {"required": True, "content": content}
        return made

    def _path_parameters(self) -> Iterator[Schema]:
        known = self.operation.path or {}
        for name in self.route.path_parameters:
            yield {"name": name, "in": "path", "required": True, "schema": known.get(name, {"type": "string"})}

    def _query_parameters(self) -> Iterator[Schema]:
        if self.operation.query is None:
            return
        components = struct_schemas(self.name, self.operation.query)[1]
        schema = next(iter(components.values()))
        for name, each in schema["properties"].items():
            yield {"name": name, "in": "query", "required": name in schema["required"], "schema": each}

    def _responses(self, is_free: bool) -> Schema:
        operation, dialect = self.operation, dialect_of(self.route.path_format)
        answers: Schema = {str(status): self._success(status) for status in operation.success}
        statuses = {*REFUSALS, *operation.also}
        if not is_free:
            statuses |= {*LOCKED}
        if operation.body is not None:
            statuses |= {*OF_BODIES}
        if 503 in statuses and dialect in OVERLOADED:
            statuses.add(OVERLOADED[dialect])
        for status in sorted(statuses):
            name = f"HEAD.{status}" if self.method == "HEAD" else f"{dialect}.{status}"
            content = {} if self.method == "HEAD" else {JSON: {"schema": reference("Error", ERRORS[dialect])}}
            self.errors.setdefault(name, _response(_phrase(status), content))
            answers[str(status)] = {"$ref": f"#/components/responses/{name}"}
        return answers

    def _success(self, status: int) -> Schema:
        operation, dialect = self.operation, dialect_of(self.route.path_format)
        content: Schema = {}
        if isinstance(operation.answer, str):
            content[operation.answer] = {"schema": {"type": "string"}}
        elif operation.answer is not None:
            content[JSON] = {"schema": self._schema_of(operation.answer)}
        if operation.events is not None:
            item = {"anyOf": [self._schema_of(operation.events), reference("Error", ERRORS[dialect])]}
            # OpenAPI describes the items of a stream from 3.2 on, with itemSchema.
            content[LINES if dialect == "ollama" else EVENTS] = {"x-item-schema": item}
        return _response("The answer.", content, "x-localllm-warning")

    def _schema_of(self, kind: Any) -> Schema:
        schema, components = struct_schemas(self.name, kind)
        self.components.update(components)
        return schema


def _response(description: str, content: Schema, *more: str) -> Schema:
    names = ("x-request-id", *more) if more else ("x-request-id", "retry-after")
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": description, "headers": headers} | ({"content": content} if content else {})


def _phrase(status: int) -> str:
    return "Overloaded" if status == 529 else HTTPStatus(status).phrase
