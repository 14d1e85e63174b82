"""Tool calls, reasoning and structured output in Anthropic's dialect: the real client, and a model that says a text."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.serving.answers.generation import Progress
from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.web.api.anthropic.answer import AnthropicHead, MessageEvents
from tests.web.harness import CALL, CLOCK_CALL, PARAMETERS, THOUGHT, USER
from tests.web.live_server import LiveServer

PATH = "/v1/messages"
WEATHER: dict[str, Any] = {"name": "weather", "description": "Now", "input_schema": PARAMETERS}
CLOCK: dict[str, Any] = {"name": "clock", "type": "custom", "input_schema": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 150, "tools": [WEATHER, CLOCK]}
TURNS = f"{THOUGHT}\n{CALL}\n{CLOCK_CALL}\nSo."


@pytest.fixture
def claude(hermes: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=hermes.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def blocks(message: anthropic.types.Message) -> list[Any]:
    """Without ids."""
    kept = {"thinking": "thinking", "text": "text"}
    return [
        (block.name, block.input) if block.type == "tool_use" else getattr(block, kept[block.type])
        for block in message.content
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_come_in_the_order_in_which_they_were_said(
    claude: anthropic.Anthropic, say: Callable[[str], None], stream: bool
) -> None:
    say(TURNS)
    if stream:
        with claude.messages.stream(**ASKED) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**ASKED)
    said = ["Warm?", "It is warm.\n", ("weather", {"city": "Paris"}), ("clock", {}), "\nSo."]
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert blocks(answer) == said
    assert answer.stop_reason == "tool_use"
    ids = {block.id for block in answer.content if block.type == "tool_use"}
    assert len(ids) == 2


def test_a_conversation_with_a_tool_goes_round(claude: anthropic.Anthropic, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}\n{CALL}")
    first = claude.messages.create(**ASKED)
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    history: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    say("It is warm.")
    answer = claude.messages.create(**{**ASKED, "messages": history})
    assert (blocks(answer), answer.stop_reason) == (["It is warm."], "end_turn")
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


def test_tools_and_thinking_count(claude: anthropic.Anthropic) -> None:
    def count(**fields: Any) -> int:
        return claude.messages.count_tokens(model="tiny", messages=USER, **fields).input_tokens

    assert count(tools=[WEATHER, CLOCK]) > count(tools=[CLOCK]) > count()
    assert count(tools=[CLOCK], tool_choice={"type": "none"}) == count()
    assert count(thinking={"type": "disabled"}) > count(thinking={"type": "enabled", "budget_tokens": 1024}) == count()
    answer = claude.messages.create(**{**ASKED, "max_tokens": 1})
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert used == count(tools=ASKED["tools"])


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": [CLOCK]}, {"tool_choice": {"type": "none"}}])
def test_what_may_not_be_called_is_text(
    claude: anthropic.Anthropic, say: Callable[[str], None], fields: dict[str, Any]
) -> None:
    say(CALL)
    answer = claude.messages.create(**{**ASKED, **fields})
    assert (blocks(answer), answer.stop_reason) == ([CALL], "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_ends_the_message_where_several_may_not_be(
    claude: anthropic.Anthropic, say: Callable[[str], None], stream: bool
) -> None:
    say(TURNS)
    asked: Any = {**ASKED, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    if stream:
        with claude.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    assert blocks(answer) == ["Warm?", "It is warm.\n", ("weather", {"city": "Paris"})]
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_forced_call_fits_its_schema(claude: anthropic.Anthropic, choice: Any) -> None:
    answer = claude.messages.create(**ASKED, tool_choice=choice)
    [call] = answer.content
    assert call.type == "tool_use"
    assert answer.stop_reason == "tool_use"
    if call.name == "weather":
        jsonschema.validate(call.input, PARAMETERS)
    else:
        assert choice["type"] == "any"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_is_valid_and_said_to_be_cut(
    claude: anthropic.Anthropic, say: Callable[[str], None], stream: bool
) -> None:
    say('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris is a city in France"}}\n</tool_call>')
    asked = {**ASKED, "max_tokens": 40}
    if stream:
        with claude.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**asked)
    [call] = answer.content
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert answer.stop_reason == "max_tokens"
    assert isinstance(call.input, dict)
    assert stream or call.input == {}


def test_a_format_is_kept_to(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    format: Any = {"type": "json_schema", "schema": schema}
    answer = claude.messages.create(model="tiny", messages=USER, max_tokens=150, output_config={"format": format})
    [text] = answer.content
    assert text.type == "text"
    jsonschema.validate(json.loads(text.text), schema)


def test_a_format_and_a_forced_call_exclude_each_other(hermes: LiveServer) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    body = {**ASKED, "output_config": {"format": format}, "tool_choice": {"type": "any"}}
    response = hermes.post(PATH, body)
    assert response.status_code == 400
    assert "output_config.format" in response.json()["error"]["message"]


def test_what_tools_ask_for_in_vain_is_said(hermes: LiveServer) -> None:
    tool = {**CLOCK, "strict": True, "input_examples": [{}], "cache_control": {"type": "ephemeral"}, "colour": "red"}
    response = hermes.post(f"{PATH}/count_tokens", {"messages": USER, "tools": [tool]})
    warning = response.headers["x-localllm-warning"]
    assert all(f"tools[0].{name}" in warning for name in ("strict", "input_examples", "colour"))
    assert "cache_control" not in warning


GOLDEN = b"""event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: ping
data: {"type":"ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"Warm?"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"I look."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"c1","name":"weather","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\\"city\\":"}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":" 1}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: content_block_start
data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"c2","name":"clock","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{"}}

event: content_block_stop
data: {"type":"content_block_stop","index":3}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":9,\
"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":4}}

event: message_stop
data: {"type":"message_stop"}

"""


def test_golden_events_of_blocks() -> None:
    events = MessageEvents(AnthropicHead("msg_1", "tiny", 9, 20), {"state": {"request_id": "r1"}})  # type: ignore[typeddict-item]
    progress = Progress(1, 9, 1)

    def event(*parts: Part, **end: Any) -> bytes:
        news = GenerationEvent(0, "-", (5,), parts=parts, **end)
        progress.count(news)
        return events.event(news, progress)

    assert event().startswith(b"event: message_start\n")
    written = event(Reasoning("Warm?"))
    written += event(Content("I look."), ToolCallStart(0, "c1", "weather"), ToolArguments(0, '{"city":'))
    written += event(ToolArguments(0, " 1}"), ToolCallStart(1, "c2", "clock"))
    end: dict[str, Any] = {"finish_reason": "stop", "usage": Usage(9, 4, 0), "timings": Timings()}
    written += event(ToolArguments(1, "{"), BrokenCall(1, "it was cut"), **end)
    assert written + events.end(progress) == GOLDEN
