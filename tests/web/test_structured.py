"""Structured output over a real socket: every way of asking, whole and streamed, and refusals that name the field."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.text.schemas import SCHEMAS
from tests.web.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = SCHEMAS["sentiment"]
AS_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TAG = {
    "triggers": ["<f>"],
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "type": "structural_tag",
}

WAYS: dict[str, tuple[dict[str, Any], str | None]] = {  # the fields, and what the whole text matches; None: SCHEMA
    "json_schema": ({"response_format": AS_FORMAT}, None),
    "json_object": ({"response_format": {"type": "json_object"}}, r"\{.*"),
    "format tag": ({"response_format": TAG}, ".*"),
    "json": ({"structured_outputs": {"json": SCHEMA}}, None),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, None),
    "regex": ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] [0-9]'}}, r"x\d\d"),
    "tag": ({"structured_outputs": {"structural_tag": TAG}}, ".*"),
    "guided_json": ({"guided_json": SCHEMA}, None),
    "guided_json_object": ({"guided_json_object": True, "guided_whitespace_pattern": " "}, r"\{.*"),
    "guided_regex": ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_grammar": ({"guided_grammar": 'root ::= "x" [0-9]'}, r"x\d"),
    "llama.cpp's grammar": ({"grammar": 'root ::= "x" [0-9]'}, r"x\d"),
    "llama.cpp's json_schema": ({"json_schema": SCHEMA}, None),
}


def fits(text: str, pattern: str | None) -> None:
    if pattern is None:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_asking(server: LiveServer, way: str) -> None:
    fields, pattern = WAYS[way]
    body = {"messages": USER, "max_tokens": 100, **fields}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    fits(choice["message"]["content"], pattern)
    if pattern is None:
        assert choice["finish_reason"] == "stop"
    lines = server.post(CHAT, {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert streamed == choice["message"]["content"]  # the model made of memory says the same again
    text = server.post(TEXT, {"prompt": "Hi", "max_tokens": 100, **fields}).json()["choices"][0]["text"]
    fits(text, pattern)


def test_with_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_tokens=100,
        n=2,
        response_format=AS_FORMAT,
        logprobs=True,  # type: ignore[call-overload]
    )
    for choice in answer.choices:
        fits(choice.message.content, None)
        assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(
            model="tiny",
            messages=USER,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
    assert refusal.value.param == "response_format"
    assert "uniqueItems" in refusal.value.message


def test_many_schemas_at_once_beside_streams_without_one(server: LiveServer) -> None:
    names = random.Random(0).sample(sorted(SCHEMAS), 24)

    def ask(name: str | None) -> str:
        fields = {} if name is None else {"structured_outputs": {"json": SCHEMAS[name]}}
        body = {"messages": USER, "max_tokens": 400 if name else 30, **fields}
        [choice] = server.post(CHAT, body).json()["choices"]
        if name is not None and choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[name])
        return str(choice["message"]["content"])

    alone = ask(None)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, [*names, None, None]))
    assert answers[-1] == answers[-2] == alone


def test_stop_strings_still_stop(server: LiveServer) -> None:
    body = {"messages": USER, "max_tokens": 50, "structured_outputs": {"regex": "aaab.*"}, "stop": ["aab"]}
    [choice] = server.post(CHAT, body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "aab")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 7}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"grammar": "root ::= "}, "grammar"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"grammar": "root ::= ("}, "grammar"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_the_field(server: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = server.post(CHAT, {"messages": USER, "max_tokens": 5, "stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
