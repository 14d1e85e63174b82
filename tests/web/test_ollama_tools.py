"""Tool calls, reasoning and formats in Ollama's dialect: the real client, and a model that says a known text."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import ollama
import pytest

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.serving.answers.generation import Progress
from localllm.text.answers.detect import answer_format
from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.text.chat_template import ChatTemplate
from localllm.web.api.ollama import lines
from localllm.web.api.ollama.conversation import plain_messages, think_switches
from localllm.web.api.ollama.schema import OllamaInputMessage
from tests.web.harness import CALL, CLOCK, CLOCK_CALL, THOUGHT, USER, WEATHER
from tests.web.live_server import LiveServer

FEW: dict[str, Any] = {"num_predict": 150}
TOOLS: list[Any] = [WEATHER, CLOCK]


@pytest.fixture
def client(hermes: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=hermes.url, verify=False, timeout=20) as client:
        yield client


def calls(message: ollama.Message) -> list[Any]:
    return [(call.function.name, dict(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_and_thinking_come_whole(client: ollama.Client, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}\n{CALL}\n{CLOCK_CALL}\nSo.")
    answer = client.chat("tiny", USER, tools=TOOLS, options=FEW)
    assert (answer.message.thinking, answer.message.content) == ("Warm?", "It is warm.\n\nSo.")
    assert calls(answer.message) == [("weather", {"city": "Paris"}), ("clock", {})]
    assert answer.done_reason == "stop"


def test_a_streamed_call_has_a_line_of_its_own(client: ollama.Client, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}\n{CALL}\n{CLOCK_CALL}\nSo.")
    parts = list(client.chat("tiny", USER, tools=TOOLS, options=FEW, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Warm?"
    assert "".join(part.message.content or "" for part in parts) == "It is warm.\n\nSo."
    called = [calls(part.message) for part in parts if part.message.tool_calls]
    assert called == [[("weather", {"city": "Paris"})], [("clock", {})]]
    assert not any(part.message.content for part in parts if part.message.tool_calls)
    assert parts[-1].done_reason == "stop"


def test_generate_tells_thinking_from_the_response(client: ollama.Client, say: Callable[[str], None]) -> None:
    say(THOUGHT)
    answer = client.generate("tiny", "Is it warm?", think=True, options=FEW)
    assert (answer.thinking, answer.response) == ("Warm?", "It is warm.")
    parts = list(client.generate("tiny", "Is it warm?", options=FEW, stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Warm?"
    assert "".join(part.response for part in parts) == "It is warm."
    raw = client.generate("tiny", "Is it warm?", raw=True, options=FEW)
    assert (raw.thinking, raw.response) == (None, THOUGHT)


def test_a_conversation_with_a_tool_goes_round(client: ollama.Client, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}\n{CALL}")
    first = client.chat("tiny", USER, tools=TOOLS, options=FEW)
    say("It is warm.")
    history: list[Any] = [*USER, first.message, {"role": "tool", "tool_name": "weather", "content": "21 degrees"}]
    answer = client.chat("tiny", history, tools=TOOLS, options=FEW)
    assert answer.message.content == "It is warm."
    assert answer.prompt_eval_count > first.prompt_eval_count  # type: ignore[operator]


def test_results_find_their_calls() -> None:
    """Mistral's templates refuse an id that has not nine characters."""
    names = ["a", "b", "a"]
    asked = [
        OllamaInputMessage(
            role="assistant", tool_calls=[{"function": {"name": name, "arguments": {}}} for name in names]
        )
    ]
    results = [
        OllamaInputMessage(role="tool", content="1", tool_name="b"),
        OllamaInputMessage(role="tool", content="2"),
        OllamaInputMessage(role="tool", content="3", tool_name="a"),
        OllamaInputMessage(role="tool", content="4", tool_name="c"),
    ]
    made, *answered = plain_messages([*asked, *results])
    ids = [call["id"] for call in made["tool_calls"]]
    assert {len(id) for id in ids} == {9}
    found = [(result.get("tool_call_id"), result["name"]) for result in answered]
    assert found == [(ids[1], "b"), (ids[0], "a"), (ids[2], "a"), (None, "c")]
    own = OllamaInputMessage(role="assistant", tool_calls=[{"id": "x", "function": {"name": "a"}}])
    assert plain_messages([own, OllamaInputMessage(role="tool", tool_call_id="x")])[1]["name"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_cut_is_no_call(client: ollama.Client, say: Callable[[str], None], stream: bool) -> None:
    say('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris is a city in France"}}\n</tool_call>')
    asked: dict[str, Any] = {"tools": TOOLS, "options": {"num_predict": 40}, "stream": stream}
    answer = client.chat("tiny", USER, **asked)
    parts = list(answer) if stream else [answer]
    assert not any(part.message.tool_calls for part in parts)
    assert "".join(part.message.content or "" for part in parts).startswith('weather {"city": "Pa')
    assert parts[-1].done_reason == "length"


@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_a_format_is_kept_to(client: ollama.Client, kind: str) -> None:
    def said(format: Any) -> Any:
        if kind == "chat":
            return json.loads(client.chat("tiny", USER, format=format, options=FEW).message.content or "")
        return json.loads(client.generate("tiny", "Hi", format=format, options=FEW).response)

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    jsonschema.validate(said(schema), schema)


def test_any_json_may_be_asked_for(hermes: LiveServer) -> None:
    for body in ({"prompt": "Hi"}, {"prompt": "Hi", "raw": True}):
        answer = hermes.post("/api/generate", {**body, "format": "json", "stream": False, "options": FEW}).json()
        assert answer["response"].startswith("{")


def test_what_the_model_can_do_is_shown(client: ollama.Client) -> None:
    assert client.show("tiny").capabilities == ["completion", "tools", "thinking"]


BOTH = "{{ messages }}{{ enable_thinking }}{{ reasoning_effort }}<think>"


@pytest.mark.parametrize(
    ("source", "think", "told", "num_warnings"),
    [
        (BOTH, None, {}, 0),
        (BOTH, True, {"enable_thinking": True}, 0),
        (BOTH, False, {"enable_thinking": False}, 0),
        (BOTH, "low", {"enable_thinking": True, "reasoning_effort": "low"}, 0),
        ("{{ messages }}<think>", True, {}, 0),
        ("{{ messages }}<think>", False, {}, 1),
        ("{{ messages }}<think>", "low", {}, 1),
        ("{{ messages }}", False, {}, 0),
    ],
)
def test_the_template_hears_of_thinking_where_it_can(
    source: str, think: bool | str | None, told: dict[str, Any], num_warnings: int
) -> None:
    chat_template = ChatTemplate(source)
    model: Any = SimpleNamespace(chat_template=chat_template, answers=answer_format(chat_template))
    switches, warnings = think_switches(think, model)
    assert (switches, len(warnings)) == (told, num_warnings)


def test_without_thinking_the_prompt_says_so(client: ollama.Client) -> None:
    counts = [client.chat("tiny", USER, think=think, options={"num_predict": 1}) for think in (None, True, False)]
    by_itself, on, off = (answer.prompt_eval_count for answer in counts)
    assert off > by_itself == on  # type: ignore[operator]


HEAD = '{"model":"tiny","created_at":"2026-01-02T03:04:05.000000Z","message":{"role":"assistant",'
GOLDEN = f"""\
{HEAD}"content":"","thinking":"Warm?"}},"done":false}}
{HEAD}"content":"I look."}},"done":false}}
{HEAD}"content":"","tool_calls":[{{"function":{{"name":"weather","arguments":{{"city":1}}}}}}]}},"done":false}}
{HEAD}"content":"clock {{"}},"done":false}}
{HEAD}"content":""}},"done":true,"done_reason":"stop","total_duration":99,"load_duration":7,"prompt_eval_count":9,\
"prompt_eval_duration":250000000,"eval_count":4,"eval_duration":666666667}}
"""


def test_golden_lines_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.time, "time", lambda: 1767323045.0)
    monkeypatch.setattr(lines.RequestClock, "total_ns", lambda self: 99)
    encoder = lines.OllamaLines(lines.OllamaHead("tiny", "chat", lines.RequestClock(load_ns=7)))
    progress = Progress(1, 9, 1)

    def event(*parts: Part, **end: Any) -> bytes:
        news = GenerationEvent(0, "-", (5,), parts=parts, **end)
        progress.count(news)
        return encoder.event(news, progress)

    written = event(Reasoning("Warm?"))
    written += event(Content("I look."), ToolCallStart(0, "c1", "weather"), ToolArguments(0, '{"city":'))
    assert event(ToolArguments(0, " 1}")) == b""
    written += event(ToolCallStart(1, "c2", "clock"), ToolArguments(1, "{"))
    timings = Timings(prefill_s=0.25, decode_s=0.5)
    end: dict[str, Any] = {"finish_reason": "stop", "usage": Usage(9, 4, 0), "timings": timings}
    written += event(BrokenCall(1, "it was cut"), **end)
    assert (written + encoder.end(progress)).decode() == GOLDEN
