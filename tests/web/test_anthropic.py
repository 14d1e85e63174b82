"""Anthropic's dialect: the real anthropic client against a real socket, golden events, and bad input in every field."""

import json
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.errors import StepFailed
from localllm.serving.answers.generation import Progress
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from localllm.text.messages import TemplateTraits, plain_messages
from localllm.web.api.anthropic.answer import AnthropicHead, MessageEvents
from localllm.web.api.anthropic.conversation import messages_of, template_of
from localllm.web.api.anthropic.schema import RULES, CountBody, InputMessage, MessagesBody
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, fake_model, settings

PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "Hello, 世界 🙂"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 20}


@pytest.fixture
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def refusal(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message = body["error"]["message"]
    assert message
    assert isinstance(message, str)
    return message


def test_a_message_answers_with_its_usage(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ASKED, system="Be brief.", extra_body={"temperature": 0})
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.usage.output_tokens == 20
    counted = claude.messages.count_tokens(model="tiny", messages=USER, system="Be brief.")
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert answer._request_id


def test_a_stream_says_the_same_as_the_whole_answer(claude: anthropic.Anthropic) -> None:
    asked = {**ASKED, "max_tokens": 60, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 60)
    assert (final.usage.cache_read_input_tokens or 0) > 0  # the second time around
    assert [event.type for event in claude.messages.create(**asked, stream=True)][:2] == [
        "message_start",
        "content_block_start",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_end_the_answer_and_are_named(server: LiveServer, stream: bool) -> None:
    body = {**ASKED, "max_tokens": 100, "temperature": 0}
    full = server.post(PATH, body).json()["content"][0]["text"]
    stop = full[40:43]
    response = server.post(PATH, {**body, "stop_sequences": ["never to be found", stop], "stream": stream})
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        end = events[-2]["delta"]
    else:
        end, text = response.json(), response.json()["content"][0]["text"]
    assert text == full[: full.index(stop)]
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", stop)


def test_a_limit_beyond_the_context_ends_at_the_context(server: LiveServer) -> None:
    answer = server.post(PATH, {**ASKED, "max_tokens": 10**30}).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert used == MAX_MODEL_LEN


def test_a_last_message_of_the_assistant_is_continued(server: LiveServer) -> None:
    prefilled = {"messages": [*USER, {"role": "assistant", "content": "It is"}]}
    count = server.post(f"{PATH}/count_tokens", prefilled).json()["input_tokens"]
    body = {**prefilled, "continue_final_message": True, "add_generation_prompt": False}
    assert count == server.post("/tokenize", body).json()["count"]


GOLDEN = b"""event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"tiny","content":[],\
"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":9,"cache_creation_input_tokens":0,\
"cache_read_input_tokens":0,"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: ping
data: {"type":"ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Say \\"hi\\""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"\\n!"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"input_tokens":5,\
"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":3}}

event: message_stop
data: {"type":"message_stop"}

"""


def test_golden_events() -> None:
    events = MessageEvents(AnthropicHead("msg_1", "tiny", 9, 20), {"state": {"request_id": "r1"}})  # type: ignore[typeddict-item]
    progress = Progress(1, 9, 1)
    news = [
        GenerationEvent(0, 'Say "hi"', (5, 6)),
        GenerationEvent(0, "", (7,)),
        GenerationEvent(0, "\n!", (), finish_reason="stop", usage=Usage(9, 3, 4), timings=Timings()),
    ]
    written = b""
    for event in news:
        progress.count(event)
        written += events.event(event, progress)
    assert written + events.end(progress) == GOLDEN
    told = b'{"type":"error","error":{"type":"api_error","message":"It failed."},"request_id":"r1"}'
    assert events.error(StepFailed("It failed.")) == b"event: error\ndata: " + told + b"\n\n"


def test_blocks_become_the_messages_that_templates_read() -> None:
    body = CountBody(
        system=[{"type": "text", "text": "Be", "cache_control": {}}, {"type": "text", "text": "kind"}],
        messages=[
            InputMessage(role="user", content="Weather?"),
            InputMessage(role="assistant", content=[
                {"type": "thinking", "thinking": "Ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Seoul"}},
            ]),
            InputMessage(role="user", content=[
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t9"},
                {"type": "text", "text": "Well?"},
            ]),
            InputMessage(role="system", content="Be quick."),
        ],
    )  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Seoul"}}}
    assert plain_messages(messages_of(body), TemplateTraits()) == [
        {"role": "system", "content": "Be\nkind"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Ask.", "reasoning": "Ask.",
         "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t9", "content": ""},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Be quick."},
    ]  # fmt: skip


KNOWS = "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}<think>"


@pytest.mark.parametrize(
    ("source", "thinking", "told", "num_warnings"),
    [
        (KNOWS, "disabled", {"enable_thinking": False, "reasoning_effort": "low"}, 0),
        (KNOWS, "enabled", {"enable_thinking": True, "reasoning_effort": "low"}, 0),
        (KNOWS, "adaptive", {"reasoning_effort": "low"}, 0),
        ("{{ messages }}{{ thinking }}", "enabled", {"thinking": True}, 1),
        ("{{ messages }}", "enabled", {}, 2),  # it does not reason
        ("{{ messages }}", "disabled", {}, 1),
        ("{{ messages }}<think>", "enabled", {}, 1),  # it always does
        ("{{ messages }}<think>", "disabled", {}, 2),
        ("{{ messages }}<think>", "adaptive", {}, 1),
    ],
)
def test_the_template_hears_of_thinking_and_effort_where_it_can(
    source: str, thinking: str, told: dict[str, Any], num_warnings: int
) -> None:
    asked = CountBody(messages=[InputMessage(role="user", content="Hi")], thinking={"type": thinking})
    chat_template = ChatTemplate(source)
    model: Any = SimpleNamespace(chat_template=chat_template, answers=answer_format(chat_template))
    template, warnings = template_of(asked, "low", model)
    assert (template, len(warnings)) == (told, num_warnings)


# Refusals -----------------------------------------------------------------------------------------------------------

SDK_FIELDS = {
    *typing.get_type_hints(message_create_params.MessageCreateParamsBase),
    *typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams),
    "stream",
}


@pytest.mark.parametrize("name", sorted(SDK_FIELDS))
def test_every_field_of_the_client_has_a_place(name: str) -> None:
    assert name in {*MessagesBody.__struct_fields__, *RULES.harmless, *RULES.hints, *RULES.refused}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", "content": list(blocks)}, *USER]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    (block(type="image", source={"type": "url", "url": "x"}), "messages[0].content[0] is a picture"),
    (block(type="document"), "messages[0].content[0].source"),
    (block(text="Hi"), "messages[0].content[0] has no type"),
    (block(type="text"), "messages[0].content[0].text"),
    (block(type="tool_result"), "messages[0].content[0].tool_use_id"),
    (block(type="tool_result", tool_use_id="a", content=7), "messages[0].content[0].content"),
    (block(type="tool_result", tool_use_id="a", content=[{"type": "image"}]), "messages[0].content[0].content[0]"),
    (block(type="tool_use", id="a", name="f", input={}), "'tool_use'"),
    (said({"type": "tool_use", "id": "a", "name": 1}), "messages[1].content[0].name"),
    (said({"type": "tool_use", "id": "a", "name": "f", "input": "x"}), "messages[1].content[0].input"),
    (said({"type": "thinking", "thinking": None}), "messages[1].content[0].thinking"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": "x"}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "does not support tools"),
    (
        {"tools": [{"type": "web_search_20260209", "name": "web_search"}],
         "tool_choice": {"type": "tool", "name": "web_search"}},
        "tools[0].type",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"tools": [{"type": 5, "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
    ({"tools": [{"input_schema": {}}]}, "'tools[0].name'"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "'tools[0].name'"),
    ({"tools": [{"name": 5, "input_schema": {}}]}, "'tools[0].name'"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "'tools[0].input_schema'"),
    ({"tools": [{"name": "f", "input_schema": {}, "description": 5}]}, "'tools[0].description'"),
    ({"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "Two tools"),
    ({"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(513)]}, "513 tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": 5}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "no tool 'f'"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"thinking": {}}, "'thinking.type'"),
    ({"thinking": 5}, "thinking"),
    ({"output_config": 5}, "output_config"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": "json"}}, "output_config.format"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "not"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD)
def test_bad_fields_are_named(server: LiveServer, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(server.post(PATH, {**ASKED, **fields}), 400, "invalid_request_error")


def test_what_asks_for_nothing_passes_without_a_warning(server: LiveServer) -> None:
    nothing = {
        "tools": [], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "output_config": {},
        "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto", "mcp_servers": [],
    }  # fmt: skip
    response = server.post(PATH, {**ASKED, **nothing}, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert "x-localllm-warning" not in response.headers


def test_what_has_no_effect_is_said(server: LiveServer) -> None:
    fields = {
        "output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 2000}, "tempersture": 1,
        "context_management": {"edits": []},
    }  # fmt: skip
    warning = server.post(PATH, {**ASKED, **fields, "stream": True}).headers["x-localllm-warning"]
    for name in (
        "output_config.effort", "'thinking' has no effect: the model does not reason", "thinking.budget_tokens",
        "tempersture", "context_management",
    ):  # fmt: skip
        assert name in warning


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"max_tokens": 1e999}', b"[" * 100_000, b"\xff"])
def test_malformed_json(server: LiveServer, raw: bytes) -> None:
    response = server.http.post(PATH, content=raw, headers={"content-type": "application/json"})
    refusal(response, 400, "invalid_request_error")


def test_errors_are_the_clients_exceptions(server: LiveServer, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**{**ASKED, "model": "claude"})
    assert "Served: tiny" in str(caught.value)
    assert caught.value.request_id
    with pytest.raises(anthropic.BadRequestError) as too_long:
        claude.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "word " * 2000}]})
    assert str(MAX_MODEL_LEN) in str(too_long.value)
    refusal(server.get(PATH), 405, "invalid_request_error")
    refusal(server.post(f"{PATH}/batches", {}), 404, "not_found_error")
    refusal(server.post(PATH, ASKED, headers={"host": "evil.example"}), 403, "permission_error")
    refusal(server.http.post(PATH, content="{}"), 415, "invalid_request_error")
    assert server.post("/v1/messagesx", {}).json()["error"]["code"] == "unknown_url"


def test_a_key_and_a_full_queue(tmp_path: Path) -> None:
    model = fake_model(tmp_path, PacedRunner(), max_num_seqs=1, max_num_queued_reqs=0)
    with LiveServer(model, settings(api_key="sesame")) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                client.messages.create(**ASKED)
            client.api_key = "sesame"
            with pytest.raises(anthropic.OverloadedError) as caught:
                client.messages.create(**ASKED)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (529, "1")


def test_an_error_in_mid_stream_reaches_the_client(
    claude: anthropic.Anthropic, server: LiveServer, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    stream = claude.messages.create(**{**ASKED, "max_tokens": 400}, stream=True)
    next(stream)
    runner.failing = True
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_the_example_in_the_guide_runs(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_URL", f"{server.url}/v1")
    runpy.run_path("docs/examples/anthropic_client.py")
    assert len(capsys.readouterr().out) > 20
