"""The document at /openapi.json is true: it has every route, each field is read, or refused, as it says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from litestar import Litestar, get

from localllm.serving.manager import ModelManager
from localllm.web.api.openapi import JSON, document
from localllm.web.app import create_app
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

DOCUMENT = document(create_app(ModelManager(), settings()).routes)
SCHEMAS = DOCUMENT["components"]["schemas"]
READS = {  # once where several paths lead to one handler
    (operation["tags"][0], operation["summary"]): (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if JSON in operation.get("requestBody", {}).get("content", {})  # test_fuzz.py sends forms
}
ODD = ({"?": 1}, "?", 3.5, True, [{}])


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema: dict[str, Any] = SCHEMAS[name]
    return schema


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema | {"components": DOCUMENT["components"]}).is_valid(value)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(found := node.get("$ref"), str):
            yield found
        for each in node.values():
            yield from references(each)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_references_lead_to_schemas_that_are_schemas() -> None:
    for reference in {*references(DOCUMENT)}:
        found: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_pages_are_left_out_and_all_else_is_in() -> None:
    """A handler without an operation fails here, by its name."""
    app = create_app(ModelManager(), settings(ui=True))
    with_pages = document(app.routes)["paths"]
    assert with_pages.keys() == DOCUMENT["paths"].keys() - {"/"}
    ids = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(ids) == len({*ids}) > 60


def test_every_operation_has_a_summary() -> None:
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert not [each["operationId"] for each in operations if not re.fullmatch(r"[A-Z].+\.", each["summary"])]


def test_a_handler_without_an_operation_is_named() -> None:
    @get("/forgotten")
    async def forgotten() -> None: ...

    with pytest.raises(LookupError, match="forgotten has no operation"):
        document(Litestar([forgotten], openapi_config=None, logging_config=None).routes)


@pytest.fixture
def read_kinds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server has read bodies as."""
    kinds: list[Any] = []
    convert = msgspec.convert

    def noting(value: Any, type: Any, **options: Any) -> Any:
        kinds.append(type)
        return convert(value, type, **options)

    monkeypatch.setattr(msgspec, "convert", noting)
    return kinds


def test_bodies_are_read_as_the_structs_that_are_shown(server: LiveServer, read_kinds: list[Any]) -> None:
    for route in server.server.app.routes:
        for handler in getattr(route, "route_handlers", ()):
            operation = handler.opt.get("operation")
            if operation is None or operation.body is None or operation.body.media_type != JSON:
                continue
            read_kinds.clear()
            server.http.request(min(handler.http_methods), route.path, json={"nobody": "knows"})
            assert read_kinds[:1] == [operation.body.kind], route.path


@pytest.mark.parametrize(("method", "path", "operation"), READS.values(), ids=[path for _, path, _ in READS.values()])
def test_every_field_is_read_or_refused_as_the_document_says(
    server: LiveServer, method: str, path: str, operation: dict[str, Any]
) -> None:
    schema = body_of(operation)
    [example] = schema["examples"]
    assert is_valid(example, schema)
    refusals = 0
    for name, each in schema["properties"].items():
        for value in (odd for odd in ODD if not is_valid(odd, each)):
            answer = server.http.request(method.upper(), path, json=example | {name: value})
            assert answer.status_code == 400, f"{name}: {value!r} is taken"
            assert re.search(rf"\b{name}\b", answer.text), answer.text
            if each.get("x-refused"):
                assert "is not supported with this value" in answer.text
            refusals += 1
            break
    assert refusals
    unknown = server.http.request(method.upper(), path, json=example | {"nobody": 1})
    if schema.get("additionalProperties", True):
        assert unknown.status_code != 400 or "nobody" not in unknown.text
        assert unknown.status_code != 200 or "nobody" in unknown.headers["x-localllm-warning"]
    else:
        assert unknown.status_code == 400
        assert "nobody" in unknown.text


def sent_by(server: LiveServer, method: str, path: str, operation: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each JSON value that answers the operation's example, whole and streamed, with its schema."""
    example = body_of(operation)["examples"][0] if "requestBody" in operation else None
    content = operation["responses"].get("200", {}).get("content", {})
    whole = example | {"stream": False} if any("x-item-schema" in each for each in content.values()) else example
    answer = server.http.request(method.upper(), path, json=whole)
    if answer.status_code == 200 and "application/json" in content:
        yield answer.json(), content["application/json"]["schema"]
    for items in (each["x-item-schema"] for each in content.values() if "x-item-schema" in each):
        lines = server.http.request(method.upper(), path, json=example | {"stream": True}).text.splitlines()
        for line in (line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))):
            yield msgspec.json.decode(line), items


def test_answers_have_the_shapes_that_the_document_shows(server: LiveServer) -> None:
    checked = set()
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            needed = [each for each in operation["parameters"] if each["required"]]
            takes_json = JSON in operation.get("requestBody", {}).get("content", {})
            if needed or method == "delete" or not (takes_json or method == "get"):
                continue
            for value, schema in sent_by(server, method, path, operation):
                assert is_valid(value, schema), f"{path}: {value}"
                checked.add(path)
    generate = {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    }
    assert checked >= generate | {"/v1/models", "/slots", "/localllm/v1/models/stats", "/tokenize", "/health"}


def test_errors_of_the_api_are_no_pages(server: LiveServer) -> None:
    """Also for programs that say that they read HTML."""
    for path in DOCUMENT["paths"].keys() - {"/"}:
        response = server.http.request("PATCH", path, headers={"accept": "text/html"})
        assert response.headers["content-type"] == "application/json", path


def test_the_document_needs_a_key_where_one_is_set(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(api_key="sesame", ui=True)) as server:
        assert server.get("/openapi.json").status_code == 401
        shown = server.get("/openapi.json", headers={"x-api-key": "sesame"}).json()
        assert shown["openapi"] == "3.1.0"
        assert shown["paths"]["/metrics"]["get"]["x-scope"] == "infer"
        assert shown["paths"]["/health"]["get"]["security"] == []
