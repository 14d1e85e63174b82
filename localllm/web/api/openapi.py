"""GET /openapi.json: the OpenAPI document of the API, for programs that generate clients, tests or tools.

The document is made from the routes of the application. Beside each handler stands what it reads and answers:
`@post(path, operation=Operation(...))`. The first paragraph of the handler's docstring is the operation's summary, the
rest is its description. access/scopes.py has the required scope, errors.py the shape of errors. There is no interactive
page: the common ones load scripts from the internet, and this server works without it.
Does not know: any dialect's fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.routes import BaseRoute, HTTPRoute

from localllm.version import __version__
from localllm.web.access.scopes import is_open, scope_of
from localllm.web.api.exchange import ApiRequest
from localllm.web.api.fields import FieldRules, ListOf, OneOf, Refused
from localllm.web.errors import AnthropicError, Dialect, OllamaError, OpenAIError, dialect_of

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


Schema = dict[str, Any]
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
REFERENCE = "#/components/schemas/{name}"
UNKNOWN = "Fields that are not listed are accepted; the answer's header x-localllm-warning names them."

REFUSALS = (400, 403, 408, 414, 431, 500)  # any request
LOCKED = (401, 429)  # routes that may need a key
OF_BODIES = (413, 415, 503)
OVERLOADED: Mapping[Dialect, int] = {"anthropic": 529}
REPEATED = re.compile(r"\b(openai|anthropic|ollama|responses)\.(?:OpenAI|Anthropic|Ollama|Response)(?=[A-Z])")
"""Component names in which a struct's own prefix follows the dialect's: `ollama.OllamaMessage` is `ollama.Message`."""
DIALECTS, OWN = ("openai", "responses", "anthropic", "ollama"), "localllm"

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

ERRORS: Mapping[Dialect, type] = {"openai": OpenAIError, "anthropic": AnthropicError, "ollama": OllamaError}


@get("/openapi.json", operation=Operation(dict))
async def openapi_json(request: ApiRequest) -> ASGIResponse:
    """The OpenAPI document of this API: fields, answers, errors."""
    state = request.app.state
    if "openapi" not in state:  # made at the first request
        state.openapi = msgspec.json.encode(document(request.app.routes))
    return ASGIResponse(body=state.openapi, media_type="application/json")


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes. Raises `LookupError` naming a handler without an operation."""
    components: dict[str, Schema] = {}
    for error in ERRORS.values():
        components |= struct_schemas("Error", error)[1]
    errors: dict[str, Schema] = {}
    paths: dict[str, Schema] = {}
    for route, handler in documented(routes):
        for method in sorted(handler.http_methods):
            maker = _Maker(tag_of(handler), operation_of(handler), handler, method, route, components, errors)
            paths.setdefault(route.path_format, {})[method.lower()] = maker.schema()
    made = {
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
    decoded: dict[str, Any] = msgspec.json.decode(REPEATED.sub(r"\1.", msgspec.json.encode(made).decode()))
    for name, schema in decoded["components"]["schemas"].items():
        schema["title"] = name.rpartition(".")[2]
    return decoded


def documented(routes: Iterable[BaseRoute]) -> Iterator[tuple[HTTPRoute, HTTPRouteHandler]]:
    """Yield each route of the API with its handlers; pages are left out."""
    for route in routes:
        if isinstance(route, HTTPRoute):
            yield from ((route, handler) for handler in route.route_handlers if handler.resolve_include_in_schema())


def operation_of(handler: HTTPRouteHandler) -> Operation:
    if not isinstance(found := handler.opt.get("operation"), Operation):
        raise LookupError(f"{handler} has no operation.")
    return found


def said_of(handler: HTTPRouteHandler) -> tuple[str, str]:
    """Return the summary and the description of a handler: the first paragraph of its docstring, and the rest."""
    summary, _, rest = (inspect.getdoc(handler.fn) or "").partition("\n\n")
    return " ".join(summary.split()), " ".join(rest.split())


def tag_of(handler: HTTPRouteHandler) -> str:
    """Return the handler's dialect, which is also the prefix of the names of its components."""
    room = handler.fn.__module__.removeprefix("localllm.web.api.").partition(".")[0]
    return room if room in DIALECTS else OWN


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes one operation; adds the components and errors it refers to to `components` and `errors`."""

    name: str
    operation: Operation
    handler: HTTPRouteHandler
    method: str
    route: HTTPRoute
    components: dict[str, Schema]
    errors: dict[str, Schema]

    def schema(self) -> Schema:
        path, operation = self.route.path_format, self.operation
        is_free = is_open(path)
        summary, description = said_of(self.handler)
        text = {"type": "string"}
        in_path = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in self.route.path_parameters
        ]
        made: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{path}").strip("_"),
            "summary": summary,
            "tags": [self.name],
            "parameters": [*in_path, *self._query_parameters()],
            "responses": self._responses(is_free),
            # A key is needed if the server has keys; `{}` stands for a server without keys.
            "security": [] if is_free else [{}, *({scheme: []} for scheme in SECURITY)],
        }
        if description:
            made["description"] = description
        if not is_free:
            made["x-scope"] = scope_of(self.method, path)
        if operation.body is not None:
            self.components.update(body_schemas(self.name, operation.body))
            content = {operation.body.media_type: {"schema": reference(self.name, operation.body.kind)}}
            made["requestBody"] = {"required": True, "content": content}
        return made

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
            self.errors.setdefault(
                name, _response("Overloaded" if status == 529 else HTTPStatus(status).phrase, content)
            )
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


# Schemas ------------------------------------------------------------------------------------------------------------


def named(dialect: str, name: str) -> str:
    """Return a component's name; the prefix separates structs of the same name in different dialects."""
    return f"{dialect}.{name}"


def reference(dialect: str, kind: type) -> Schema:
    return {"$ref": REFERENCE.format(name=named(dialect, kind.__name__))}


def struct_schemas(dialect: str, kind: Any) -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of a type, and the components that the schema refers to."""
    [schema], components = msgspec.json.schema_components(
        [kind], ref_template=REFERENCE.format(name=named(dialect, "{name}"))
    )
    return schema, {named(dialect, name): component for name, component in components.items()}


def body_schemas(dialect: str, body: RequestBody) -> dict[str, Schema]:
    """Return the components of a body; the body's own component is named after its struct."""
    components = struct_schemas(dialect, body.kind)[1]
    schema = components[named(dialect, body.kind.__name__)]
    properties: dict[str, Schema] = schema["properties"]
    for name, inner in body.inside.items():
        components |= body_schemas(dialect, inner)
        properties[name] = _pointing(properties[name], reference(dialect, inner.kind))
    if body.rules is not None:
        schema["description"] = " ".join(filter(None, (schema.get("description"), UNKNOWN)))
        _add_rules(properties, body.rules)
    if body.example is not None:
        schema["examples"] = [body.example]
    return components


def _pointing(schema: Any, target: Schema) -> Any:
    """Return the schema with `target` in place of every plain object."""
    if isinstance(schema, list):
        return [_pointing(each, target) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return target if schema == {"type": "object"} else {name: _pointing(each, target) for name, each in schema.items()}


def _add_rules(properties: dict[str, Schema], rules: FieldRules) -> None:
    for name in rules.harmless:
        properties.setdefault(name, {"description": "Accepted; it has no effect."})
    for name, hint in rules.hints.items():
        properties.setdefault(name, {"description": f"Accepted with a warning; it has no effect: {hint.why}."})
    for name, rule in rules.refused.items():
        schema = _refused(rule)
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema


def _refused(rule: Refused) -> Schema:
    told = {"description": f"Refused with status 400 unless its value has no effect. {rule.why}", "x-refused": True}
    match rule.harmless:
        case OneOf(values):
            return {"enum": [None, *values], **told}
        case ListOf(words):
            return {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": sorted(words)}}], **told}
