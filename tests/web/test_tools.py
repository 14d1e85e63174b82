"""Tool calls and reasoning over a real socket. The model says what a grammar makes it say, so each answer is known."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import jsonschema
import openai
import pytest

from localllm.text.answers.detect import answer_format
from localllm.text.answers.whole import ToolCall
from localllm.text.chat_template import ChatTemplate
from tests.text.templates import CHATML
from tests.web.harness import CALL, CLOCK, CLOCK_CALL, PARAMETERS, THOUGHT, USER, WEATHER
from tests.web.live_server import LiveServer

Saying: TypeAlias = Callable[..., dict[str, Any]]

CHAT = "/v1/chat/completions"


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 150, **fields}


@pytest.fixture
def saying(say: Callable[[str], None]) -> Saying:
    """A request whose answer is this text."""

    def saying(text: str, **fields: Any) -> dict[str, Any]:
        say(text)
        return asked(**{"reasoning_format": "none", **fields})

    return saying


def message(server: LiveServer, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"], choice["finish_reason"]


def test_the_format_is_told_by_the_template(hermes: LiveServer) -> None:
    assert hermes.model is not None
    found = hermes.model.answers
    assert found == answer_format(ChatTemplate(CHATML))
    assert found is not None
    assert found.tools is not None
    assert found.tools.name == "hermes"


def test_calls_are_told_from_content(hermes: LiveServer, saying: Saying) -> None:
    said, reason = message(hermes, saying(f"Let me look.\n{CALL}\n{CLOCK_CALL}", tools=[WEATHER, CLOCK]))
    assert said["content"].strip() == "Let me look."
    assert [(call["type"], call["function"]) for call in said["tool_calls"]] == [
        ("function", {"name": "weather", "arguments": '{"city": "Paris"}'}),
        ("function", {"name": "clock", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in said["tool_calls"]}) == 2
    assert reason == "tool_calls"
    said, _ = message(hermes, saying(CALL, tools=[WEATHER]))
    assert said["content"] is None


def test_a_call_that_has_to_come_does_not_go_with_a_beam_search(hermes: LiveServer) -> None:
    body = {"messages": USER, "tools": [WEATHER], "tool_choice": "required", "use_beam_search": True}
    error = hermes.post(CHAT, body).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")


@pytest.mark.parametrize("fields", [{}, {"tools": [CLOCK]}, {"tools": [WEATHER, CLOCK], "tool_choice": "none"}])
def test_what_may_not_be_called_is_content(hermes: LiveServer, fields: dict[str, Any], saying: Saying) -> None:
    said, reason = message(hermes, saying(CALL, **fields))
    assert said["content"] == CALL
    assert "tool_calls" not in said
    assert reason == "stop"


def test_a_stream_gives_the_name_first_and_then_the_arguments(sdk: openai.OpenAI, saying: Saying) -> None:
    body = saying(f"Well. {CALL}{CLOCK_CALL}", tools=[WEATHER, CLOCK])
    extra = {"reasoning_format": body.pop("reasoning_format")}
    calls: dict[int, dict[str, str]] = {}
    content, reasons = "", []
    for chunk in sdk.chat.completions.create(**body, stream=True, extra_body=extra):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index not in calls
                calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments
    assert content.strip() == "Well."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == [
        ("weather", {"city": "Paris"}),
        ("clock", {}),
    ]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_ends_the_answer_where_several_may_not_be(
    hermes: LiveServer, sdk: openai.OpenAI, stream: bool, saying: Saying
) -> None:
    """The model would have gone on: what it would have said is not generated, and its blocks are free."""
    body = saying(f"Well. {CALL}{CLOCK_CALL}" + "So. " * 10, tools=[WEATHER, CLOCK], parallel_tool_calls=False, n=2)
    body |= {"max_tokens": 190, "temperature": 0}
    extra = {"reasoning_format": body.pop("reasoning_format")}
    if stream:
        with sdk.chat.completions.stream(**body, extra_body=extra, stream_options={"include_usage": True}) as events:
            answer = events.get_final_completion()
    else:
        answer = sdk.chat.completions.create(**body, extra_body=extra)
    for choice in answer.choices:
        assert choice.message.content.strip() == "Well."
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
        assert choice.finish_reason == "tool_calls"
    whole = sdk.chat.completions.create(**{**body, "parallel_tool_calls": True}, extra_body=extra)
    assert len(whole.choices[0].message.tool_calls) == 2
    assert answer.usage.completion_tokens < whole.usage.completion_tokens
    assert hermes.model is not None
    assert hermes.model.generator.num_open == 0


def test_an_answer_without_a_call_goes_on_where_several_may_not_be(hermes: LiveServer, saying: Saying) -> None:
    said, reason = message(hermes, saying("No call.", tools=[WEATHER], parallel_tool_calls=False))
    assert (said["content"], reason) == ("No call.", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_fits_its_schema(hermes: LiveServer, sdk: openai.OpenAI, choice: Any, stream: bool) -> None:
    body = asked(tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False)
    if not stream:
        said, reason = message(hermes, body)
        calls = [call["function"] for call in said["tool_calls"]]
        assert reason == "tool_calls"
    else:
        with sdk.chat.completions.stream(**body) as events:
            final = events.get_final_completion()
        calls = [call.function.model_dump() for call in final.choices[0].message.tool_calls]
    assert calls
    for call in calls:
        if call["name"] == "weather":
            jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)
        else:
            assert choice == "required"
            assert isinstance(json.loads(call["arguments"]), dict)


def test_a_conversation_with_a_tool_goes_round(sdk: openai.OpenAI, saying: Saying) -> None:
    """What comes out goes back in: the template prints the call, the result follows."""
    body = saying(CALL, tools=[WEATHER])
    extra = {"reasoning_format": body.pop("reasoning_format")}
    first = sdk.chat.completions.create(**body, extra_body=extra).choices[0].message
    [call] = first.tool_calls
    history = [*USER, first, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    answer = sdk.chat.completions.create(model="tiny", messages=history, tools=[WEATHER], max_tokens=5)
    assert answer.usage.prompt_tokens > 20


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1}\n', {"a": 1}),
        ("", None),
        ('{"a": ', None),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": 1e999}', None),
        ('{"a": "\\ud800"}', None),  # half a character: nothing that can be sent
        ('{"a":' * 100_000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_object_are_told(arguments: str, read: dict[str, Any] | None) -> None:
    assert ToolCall("c", "f", arguments).arguments_object() == read


# Tools and a format ---------------------------------------------------------------------------------------------------

ONE = {"parallel_tool_calls": False}
OK: dict[str, Any] = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}  # fmt: skip


def test_with_tools_and_a_format_the_answer_is_a_call_or_fits_the_format(hermes: LiveServer) -> None:
    """A model that says anything at all says both before long."""
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": OK}}
    kinds = set()
    for number in range(12):
        ask = [{"role": "user", "content": f"How warm is {number}?"}]
        said, reason = message(hermes, asked(messages=ask, tools=[WEATHER], response_format=format, **ONE))
        if calls := said.get("tool_calls"):
            assert (said["content"], reason) == (None, "tool_calls")
            for call in calls:
                jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
        else:
            jsonschema.validate(json.loads(said["content"]), OK)
        kinds.add(bool(calls))
    assert kinds == {False, True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "[a-z<]+"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["yes", "<no>"]}}, "structured_outputs"),
    ],
)
def test_a_text_that_may_begin_as_a_call_does_is_refused_beside_tools(
    hermes: LiveServer, fields: dict[str, Any], param: str
) -> None:
    response = hermes.post(CHAT, asked(tools=[WEATHER], **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "tool_choice none" in response.json()["error"]["message"]
    assert hermes.post(CHAT, asked(tools=[WEATHER], tool_choice="none", **fields)).status_code == 200


# Reasoning ------------------------------------------------------------------------------------------------------------


def test_reasoning_has_fields_of_its_own(hermes: LiveServer, saying: Saying) -> None:
    said, _ = message(hermes, saying(THOUGHT, reasoning_format="auto"))
    assert (said["reasoning_content"], said["reasoning"], said["content"]) == ("Warm?", "Warm?", "It is warm.")
    hidden, _ = message(hermes, saying(THOUGHT, reasoning_format="auto", include_reasoning=False))
    assert hidden["content"] == "It is warm."
    assert "reasoning" not in hidden
    inline, _ = message(hermes, saying(THOUGHT))
    assert inline["content"] == THOUGHT
    lines = hermes.post(CHAT, saying(THOUGHT, reasoning_format="auto", stream=True)).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Warm?"
    assert "".join(delta.get("content", "") for delta in deltas) == "It is warm."


def test_a_schema_holds_behind_the_reasoning(hermes: LiveServer) -> None:
    """The model made of memory says anything at all while it reasons; `</think>` is not one of its tokens."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    said, _ = message(hermes, asked(response_format=format))
    jsonschema.validate(json.loads(said["content"]), schema)
    for begun in ("<think>", "<think>\nIt may well be that it is as warm as it has been for some time, or "):
        going_on = {"messages": [*USER, {"role": "assistant", "content": begun}], "continue_final_message": True}
        thinking, reason = message(hermes, asked(response_format=format, **going_on, max_tokens=40))
        assert reason == "length"
        assert thinking["reasoning"]
        assert not thinking["content"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [CLOCK], "tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "tools": 1}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"reasoning_format": "xml"}, "reasoning_format"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:70])
def test_refusals_name_the_field(hermes: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = hermes.post(CHAT, {"messages": USER, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_model_whose_format_nobody_knows_is_told(server: LiveServer) -> None:
    """The tests' own template knows no tools at all."""
    response = server.post(CHAT, {"messages": USER, "tools": [CLOCK], "max_tokens": 5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
