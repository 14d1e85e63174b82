"""OpenAI's responses: the real client against a real socket, golden events, what is kept, and bad input in every field.

The model says what a grammar makes it say, so each answer is known.
"""

import itertools
import json
import runpy
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from openai.types.responses import input_token_count_params, response_create_params

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.params import SamplingParams
from localllm.errors import StepFailed
from localllm.serving.answers.generation import Progress
from localllm.text.answers.parts import BrokenCall, Content, Reasoning, ToolArguments, ToolCallStart
from localllm.text.messages import TemplateTraits, plain_messages
from localllm.web.api.responses.answer import ResponseEvents, ResponseHead
from localllm.web.api.responses.items import messages_of, read_items
from localllm.web.api.responses.output import OutputItems
from localllm.web.api.responses.schema import RULES, ResponsesBody
from localllm.web.api.responses.stored import PreviousResponseNotFound, ResponseNotFound, ResponseStore
from tests.web.harness import open_request
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, wait_until

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tiny", "input": "How warm is it in Paris?", "max_output_tokens": 200}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CLOCK: Any = {"type": "function", "name": "clock"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nWarm?\n</think>\n\n"


# Answers ------------------------------------------------------------------------------------------------------------


def test_items_come_in_the_order_in_which_they_were_said(sdk: openai.OpenAI, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}Let me look.\n{CALL}\nThere.")
    answer = sdk.responses.create(**ASKED, tools=[WEATHER], metadata={"a": "b"}, instructions="Be kind.", user="u")
    reasoning, message, call, last = answer.output
    assert reasoning.type == "reasoning"
    assert [part.model_dump() for part in reasoning.content or []] == [{"type": "reasoning_text", "text": "Warm?"}]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Paris"}, "completed")
    assert (message.type, last.type, answer.output_text) == ("message", "message", "Let me look.\n\nThere.")
    assert (answer.status, answer.object, answer.error, answer.incomplete_details) == (
        "completed",
        "response",
        None,
        None,
    )
    assert (answer.instructions, answer.metadata, answer.user) == ("Be kind.", {"a": "b"}, "u")
    assert (answer.tool_choice, answer.tools[0].type, answer.temperature) == ("auto", "function", 0.6)
    usage = answer.usage
    assert usage is not None
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = sdk.responses.create(**ASKED, tools=[WEATHER], instructions="Be kind.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_says_the_same_as_the_whole_answer(sdk: openai.OpenAI, say: Callable[[str], None]) -> None:
    say(f"{THOUGHT}Let me look.\n{CALL}")
    kinds, numbers, texts = [], [], dict[str, str]()
    with sdk.responses.stream(**ASKED, tools=[WEATHER]) as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                texts[event.type] = texts.get(event.type, "") + event.delta  # type: ignore[union-attr,operator]
        final = stream.get_final_response()
    assert numbers == list(range(len(kinds)))
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert list(texts.values()) == ["Warm?", "Let me look.\n", '{"city": "Paris"}']
    kept = sdk.responses.retrieve(final.id)
    whole = sdk.responses.create(**ASKED, tools=[WEATHER])
    shapes = [[item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in each.output]
              for each in (kept, whole)]  # fmt: skip
    assert shapes[0] == shapes[1]
    assert kept.output_text == final.output_text == "Let me look.\n"


def test_a_limit_makes_an_answer_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    [message] = answer.output
    assert message.status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize("limit", [{}, {"max_output_tokens": 10**30}])
def test_without_a_limit_an_answer_may_fill_the_context(client: openai.OpenAI, limit: dict[str, Any]) -> None:
    *_, last = client.responses.create(model="tiny", input="Hello", stream=True, **limit)
    assert last.type == "response.incomplete"
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == MAX_MODEL_LEN


class Weather(pydantic.BaseModel):
    city: typing.Literal["Paris", "Seoul"]
    warm: bool


def test_a_parsed_answer_fits_its_model(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.parse(**ASKED, temperature=0, text_format=Weather)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Weather)
    with sdk.responses.stream(**ASKED, temperature=0, text_format=Weather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    plain = sdk.responses.create(**ASKED, text={"format": {"type": "json_object"}}, extra_body={"stop": "}"})
    assert plain.output_text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
    ids=str,
)
def test_a_forced_call_comes(sdk: openai.OpenAI, choice: Any) -> None:
    answer = sdk.responses.create(
        **ASKED, temperature=0, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False
    )
    call = answer.output[-1]
    assert call.type == "function_call"
    assert isinstance(json.loads(call.arguments), dict)
    assert call.name == "weather" or choice == "required"


def test_a_conversation_with_a_tool_goes_round(
    hermes: LiveServer, sdk: openai.OpenAI, say: Callable[[str], None]
) -> None:
    """By previous_response_id or by sending all of it: the prompt is the same."""
    say(f"{THOUGHT}Let me look.\n{CALL}")
    first = sdk.responses.create(**ASKED, tools=[WEATHER])
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    say("It is warm.")
    second = sdk.responses.create(model="tiny", previous_response_id=first.id, input=[result], tools=[WEATHER])
    assert (second.output_text, second.previous_response_id) == ("It is warm.", first.id)
    question: Any = {"role": "user", "content": ASKED["input"]}
    by_hand = [question, *(item.model_dump(exclude_none=True) for item in first.output), result]
    count = sdk.responses.input_tokens.count(model="tiny", input=by_hand, tools=[WEATHER])
    assert second.usage is not None
    assert (count.input_tokens, count.object) == (second.usage.input_tokens, "response.input_tokens")
    chat = {
        "model": "tiny",
        "tools": [{"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}],
        "messages": [
            question,
            {
                "role": "assistant", "content": "Let me look.\n", "reasoning_content": "Warm?",
                "tool_calls": [{"id": call.call_id, "type": "function",
                                "function": {"name": "weather", "arguments": call.arguments}}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "21 degrees"},
        ],
    }  # fmt: skip
    counted = hermes.post("/v1/chat/completions/input_tokens", chat).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": count.input_tokens}
    third = sdk.responses.create(model="tiny", previous_response_id=second.id, input="Thanks", tools=[WEATHER])
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    by_reference: Any = [question, *({"type": "item_reference", "id": item.id} for item in first.output), result]
    referred = sdk.responses.input_tokens.count(model="tiny", input=by_reference, tools=[WEATHER])
    assert referred.input_tokens == count.input_tokens


def test_nothing_goes_on_from_a_call_that_was_cut(sdk: openai.OpenAI, say: Callable[[str], None]) -> None:
    say(CALL.replace("Paris", "P" * 60))
    cut = sdk.responses.create(**ASKED | {"max_output_tokens": 60}, tools=[WEATHER])
    [call] = cut.output
    assert call.type == "function_call"
    assert (call.status, cut.status) == ("incomplete", "incomplete")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    with pytest.raises(openai.BadRequestError, match="is incomplete"):
        sdk.responses.create(model="tiny", previous_response_id=cut.id, input=[result], tools=[WEATHER])


def test_items_become_the_messages_that_templates_read() -> None:
    items = read_items(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Twice."}], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Seoul"}'},
            {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
            {"type": "function_call_output", "call_id": "c2", "output": "noon"},
            {"role": "assistant", "content": "Sunny."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        ],
        lambda id: None,
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Seoul"}}},
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ]
    assert plain_messages([*messages_of(items)], TemplateTraits()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Ask.\nTwice.", "reasoning": "Ask.\nTwice.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "noon"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "No more."},
    ]  # fmt: skip


# Events -------------------------------------------------------------------------------------------------------------

REST = (
    '"model":"tiny","output":%s,"parallel_tool_calls":true,"reasoning":{"effort":null,"summary":null},'
    '"service_tier":"default","store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto",'
    '"tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","metadata":{},"usage":%s,"instructions":null,'
    '"max_output_tokens":null,"max_tool_calls":null,"previous_response_id":null,"prompt_cache_key":null,"safety_identifier":null,"user":null}'
)
HEAD = '{"id":"resp_1","object":"response","created_at":7,"completed_at":%s,"status":"%s","background":false,"error":%s'
STARTED = HEAD % ("null", "in_progress", "null") + ',"incomplete_details":null,' + REST % ("[]", "null")
R_ITEM = '{"id":"rs_1","type":"reasoning","status":%s,"summary":[],"content":%s}'
M_ITEM = '{"id":"msg_2","type":"message","status":%s,"role":"assistant","content":%s}'
C_ITEM = '{"id":"fc_3","type":"function_call","status":%s,"call_id":"c","name":"f","arguments":%s}'
R_PART = '{"type":"reasoning_text","text":"%s"}'
M_PART = '{"type":"output_text","text":"%s","annotations":[],"logprobs":[]}'
R_DONE = R_ITEM % ('"completed"', f"[{R_PART % 'Hm'}]")
M_DONE = M_ITEM % ('"completed"', f"[{M_PART % 'Hi!'}]")
C_DONE = C_ITEM % ('"incomplete"', '"{a"')
USAGE = (
    '{"input_tokens":9,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},"output_tokens":6,'
    '"output_tokens_details":{"reasoning_tokens":2},"total_tokens":15}'
)
TIMINGS = (
    ',"timings":{"cache_n":4,"prompt_n":5,"prompt_ms":0.0,"prompt_per_token_ms":0.0,"prompt_per_second":0.0,'
    '"predicted_n":6,"predicted_ms":0.0,"queue_ms":0.0,"ttft_ms":0.0}'
)
GOLDEN = [
    ("response.created", f'"response":{STARTED}'),
    ("response.in_progress", f'"response":{STARTED}'),
    ("response.output_item.added", '"output_index":0,"item":' + R_ITEM % ('"in_progress"', "[]")),
    ("response.content_part.added", f'"item_id":"rs_1","output_index":0,"content_index":0,"part":{R_PART % ""}'),
    ("response.reasoning_text.delta", '"item_id":"rs_1","output_index":0,"content_index":0,"delta":"Hm"'),
    ("response.reasoning_text.done", '"item_id":"rs_1","output_index":0,"content_index":0,"text":"Hm"'),
    ("response.content_part.done", f'"item_id":"rs_1","output_index":0,"content_index":0,"part":{R_PART % "Hm"}'),
    ("response.output_item.done", f'"output_index":0,"item":{R_DONE}'),
    ("response.output_item.added", '"output_index":1,"item":' + M_ITEM % ('"in_progress"', "[]")),
    ("response.content_part.added", f'"item_id":"msg_2","output_index":1,"content_index":0,"part":{M_PART % ""}'),
    ("response.output_text.delta", '"item_id":"msg_2","output_index":1,"content_index":0,"logprobs":[],"delta":"Hi"'),
    ("response.output_text.delta", '"item_id":"msg_2","output_index":1,"content_index":0,"logprobs":[],"delta":"!"'),
    ("response.output_text.done", '"item_id":"msg_2","output_index":1,"content_index":0,"text":"Hi!","logprobs":[]'),
    ("response.content_part.done", f'"item_id":"msg_2","output_index":1,"content_index":0,"part":{M_PART % "Hi!"}'),
    ("response.output_item.done", f'"output_index":1,"item":{M_DONE}'),
    ("response.output_item.added", '"output_index":2,"item":' + C_ITEM % ('"in_progress"', '""')),
    ("response.function_call_arguments.delta", '"item_id":"fc_3","output_index":2,"delta":"{a"'),
    ("response.function_call_arguments.done", '"item_id":"fc_3","output_index":2,"arguments":"{a"'),
    ("response.output_item.done", f'"output_index":2,"item":{C_DONE}'),
    (
        "response.completed",
        f'"response":{HEAD % (8, "completed", "null")},"incomplete_details":null,'
        + REST % (f"[{R_DONE},{M_DONE},{C_DONE}]", USAGE + TIMINGS),
    ),
]


def events() -> tuple[ResponseEvents, list[Any]]:
    """With ids that are counted, and where responses are kept."""
    numbers, kept = itertools.count(1), list[Any]()
    head = ResponseHead("resp_1", 7, "tiny", ResponsesBody(input="Hi"), SamplingParams())
    return ResponseEvents(head, kept.append, OutputItems(lambda prefix: f"{prefix}_{next(numbers)}")), kept


def test_golden_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 8.9)
    written, kept = b"", list[Any]()
    encoder, kept = events()
    progress = Progress(1, 9, 1)
    news = [
        GenerationEvent(0, "", (5,), parts=()),
        GenerationEvent(0, "Hm", (5,), parts=(Reasoning("Hm"),)),
        GenerationEvent(0, "Hi", (6,), parts=(Content("Hi"),)),
        GenerationEvent(0, "!", (6,), parts=(Content("!"), ToolCallStart(0, "c", "f"))),
        GenerationEvent(
            0, "{a", (7,), parts=(ToolArguments(0, "{a"), BrokenCall(0, "it ended")), finish_reason="stop",
            usage=Usage(9, 6, 4), timings=Timings(),
        ),
    ]  # fmt: skip
    for event in news:
        progress.count(event)
        written += encoder.event(event, progress)
    written += encoder.end(progress)
    lines = "".join(
        f'event: {kind}\ndata: {{"type":"{kind}",{data},"sequence_number":{number}}}\n\n'
        for number, (kind, data) in enumerate(GOLDEN)
    )
    assert written.decode() == lines
    assert [response.id for response in kept] == ["resp_1"]


def test_an_early_error_is_a_response_that_failed() -> None:
    encoder, kept = events()
    *_, data = encoder.error(StepFailed("It failed.")).decode().strip().split("\n")
    response = json.loads(data.removeprefix("data: "))["response"]
    assert (response["status"], response["output"]) == ("failed", [])
    assert response["error"] == {"code": "server_error", "message": "It failed."}
    assert not kept


def test_a_call_that_turns_out_broken_late_is_incomplete() -> None:
    output = OutputItems()
    for part in (
        ToolCallStart(0, "a", "f"),
        ToolArguments(0, "{"),
        Content("Hi"),
        BrokenCall(0, ""),
        BrokenCall(None, ""),
    ):
        output.say(part)
    output.close()
    assert [item["status"] for item in output.items] == ["incomplete", "completed"]


def test_an_error_in_mid_stream_is_the_last_event(
    client: openai.OpenAI, server: LiveServer, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    stream = client.responses.create(model="tiny", input="Hello", max_output_tokens=400, stream=True)
    next(stream)
    runner.failing = True
    *rest, last = stream
    assert [event.sequence_number for event in (*rest, last)] == list(range(1, len(rest) + 2))
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert server.get(f"{PATH}/{last.response.id}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_answer(server: LiveServer, runner: PacedRunner, stream: bool) -> None:
    runner.step_s = 0.02
    aborted = server.stats().finished.get("abort", 0)
    sock = open_request(server, {"input": "Hello", "max_output_tokens": 450, "stream": stream}, PATH)
    wait_until(server.is_decoding)
    sock.close()
    assert server.wait_idle().finished["abort"] == aborted + 1


# What is kept -------------------------------------------------------------------------------------------------------


def test_what_is_kept_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    made = client.responses.create(model="tiny", input=question, max_output_tokens=3)
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    pages = client.responses.input_items.list(made.id, limit=2)
    assert pages.has_next_page()
    texts = [item.content[0].text for item in pages]  # type: ignore[union-attr]
    assert texts == ["three", "two", "one"]
    assert [item.id for item in client.responses.input_items.list(made.id, order="asc")] == [
        item.id for item in reversed([*pages])
    ]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for missing in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=r"1,000 .* 64.0 MiB .* in memory only"):
            missing(made.id)


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Hi", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="tiny", input="Hi", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert made.output[0].id
    with pytest.raises(openai.BadRequestError, match="There is no item"):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": made.output[0].id}])


class ShortResponse(msgspec.Struct):
    id: str
    output: list[dict[str, str]]


def response(id: str, text: str) -> Any:
    return ShortResponse(id, [{"id": f"msg_{id}", "text": text}])


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(5):
        store.put(
            "me",
            response(f"r{number}", "x"),
            store.context("me", f"r{number - 1}" if number else None),
            [{"id": "same"}],
        )
    assert len(store) == 3
    with pytest.raises(ResponseNotFound):
        store.get("me", "r1")
    assert store.item("me", "msg_r1") is None
    assert store.item("me", "msg_r2") == {"id": "msg_r2", "text": "x"}
    assert store.item("me", "same") is None  # a client chose that id: another could know it
    assert len(store.context("me", "r4")) == 10  # all five rounds, though two are forgotten
    assert store.get("me", "r4").input == [{"id": "same"}]
    store.put("me", response("large", "x" * 4_900), (), [])
    assert store.num_bytes <= store.max_bytes
    with pytest.raises(PreviousResponseNotFound):
        store.context("me", "r3")
    store.put("me", response("too-large", "x" * 5_000), (), [])
    with pytest.raises(ResponseNotFound):
        store.get("me", "too-large")
    store.delete("me", "large")
    for id in ("r4", "large"):
        with pytest.raises(ResponseNotFound):
            store.delete("me", id)
    assert (len(store), store.num_bytes, store._items) == (0, 0, {})


def test_what_is_kept_is_there_for_its_owner_alone() -> None:
    store = ResponseStore()
    store.put("alice", response("r1", "secret"), (), [{"id": "in"}])
    for owner in ("bob", ""):
        with pytest.raises(ResponseNotFound):
            store.get(owner, "r1")
        with pytest.raises(ResponseNotFound):
            store.delete(owner, "r1")
        with pytest.raises(PreviousResponseNotFound):
            store.context(owner, "r1")
        assert store.item(owner, "msg_r1") is None
    assert store.get("alice", "r1").input == [{"id": "in"}]
    assert store.item("alice", "msg_r1") == {"id": "msg_r1", "text": "secret"}
    assert len(store.context("alice", "r1")) == 2


# Refusals -----------------------------------------------------------------------------------------------------------

SDK_FIELDS = {
    *typing.get_type_hints(response_create_params.ResponseCreateParamsBase),
    *typing.get_type_hints(input_token_count_params.InputTokenCountParams),
    "stream",
}


def test_every_field_of_the_client_has_one_place() -> None:
    """A newer client may have a few more: those are answered with a warning until somebody has looked at them."""
    places = (ResponsesBody.__struct_fields__, RULES.harmless, RULES.hints, RULES.refused)
    found = {name: sum(name in place for place in places) for name in SDK_FIELDS}
    assert max(found.values()) == 1
    assert sum(count == 0 for count in found.values()) <= 3


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def part(role: str = "user", **fields: Any) -> dict[str, Any]:
    return item(role=role, content=[fields])


def of_text(**format: Any) -> dict[str, Any]:
    return {"text": {"format": format}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["Hi"]}, "input[0]"),
    (item(), "input[0]"),
    (item(type="computer_call"), "input[0]"),
    (item(type=["message"]), "input[0]"),
    (item(type="item_reference", id="msg_x"), "input[0].id"),
    (item(id="msg_x"), "input[0].id"),
    (item(role="wizard", content="Hi"), "input[0].role"),
    (item(role=["user"], content="Hi"), "input[0].role"),
    (item(role="user"), "input[0].content"),
    (item(role="user", content=[3]), "input[0].content[0]"),
    (part(type="input_image", image_url="x"), "input[0].content[0]"),
    (part(type=[]), "input[0].content[0]"),
    (part(type="input_text", text=3), "input[0].content[0].text"),
    (part("assistant", type="refusal"), "input[0].content[0].refusal"),
    (item(type="function_call", call_id="c", name="f", arguments={}), "input[0].arguments"),
    (item(type="function_call", call_id="c", name="f", arguments="{"), "input[0].arguments"),
    (item(type="function_call", call_id="c", name="f", arguments="[" * 100_000), "input[0].arguments"),
    (item(type="function_call", call_id="c", arguments="{}"), "input[0].name"),
    (item(type="function_call", name="f", arguments="{}"), "input[0].call_id"),
    (item(type="function_call_output", output="x"), "input[0].call_id"),
    (item(type="function_call_output", call_id="c", output="x"), "input"),
    (item(type="function_call_output", call_id="c", output=3), "input[0].output"),
    (item(type="function_call_output", call_id="c", output=[{"type": "input_file"}]), "input[0].output[0]"),
    (item(type="reasoning", content="x"), "input[0].content"),
    (item(type="reasoning", summary=[{"type": "reasoning_text", "text": "x"}]), "input[0].summary[0]"),
    (item(type="reasoning", content=[{"type": "reasoning_text"}]), "input[0].content[0].text"),
    ({"instructions": 3}, "instructions"),
    ({"previous_response_id": 3}, "previous_response_id"),
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "robot"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://x"}]}, "tools[0].server_url"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "f", "description": 1}]}, "tools[0].description"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": [CLOCK], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"text": "json"}, "text"),
    ({"text": {"format": "json"}}, "text.format"),
    (of_text(), "text.format.type"),
    (of_text(type="grammar"), "text.format.type"),
    (of_text(type="json_schema", name="x"), "text.format.schema"),
    (of_text(type="json_schema", name="x", schema=True), "text.format.schema"),
    (of_text(type="json_schema", name="x", schema={"type": "frob"}), "text.format"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -(10**30)}, "max_output_tokens"),
    ({"max_output_tokens": "ten"}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"store": "yes"}, "store"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"user": 3}, "user"),
    ({"prompt_cache_key": 3}, "prompt_cache_key"),
    ({"safety_identifier": 3}, "safety_identifier"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "oldest"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": [[]]}, "include"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda value: str(value)[:70])
def test_bad_fields_are_named(hermes: LiveServer, fields: dict[str, Any], named: str) -> None:
    refused = hermes.post(PATH, {**ASKED, **fields})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"], error["type"]) == (named, "invalid_request_error")


def test_what_asks_for_nothing_passes_without_a_warning(hermes: LiveServer) -> None:
    nothing = {
        "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"], "top_logprobs": 0,
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "tools": [],
        "stream_options": {"include_obfuscation": False}, "text": {"verbosity": "medium"}, "tool_choice": "auto",
        "reasoning": {"effort": "none"}, "conversation": None, "prompt": None,
    }  # fmt: skip
    answer = hermes.post(PATH, {**ASKED, **nothing, "max_output_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert "x-localllm-warning" not in answer.headers


def test_what_has_no_effect_is_said(hermes: LiveServer) -> None:
    fields = {"reasoning": {"summary": "auto"}, "tempersture": 1, "context_management": [{}], "max_output_tokens": 3}
    for more in ({}, {"stream": True}):
        warning = hermes.post(PATH, {**ASKED, **fields, **more}).headers["x-localllm-warning"]
        assert all(name in warning for name in ("reasoning.summary", "tempersture", "context_management"))


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("?limit=0", "limit"), ("?limit=101", "limit"), ("?limit=x", "limit"), ("?order=up", "order"),
        ("?after=msg_x", "after"), ("?include[]=message.output_text.logprobs", "include[]"),
    ],
)  # fmt: skip
def test_bad_queries_are_named(hermes: LiveServer, query: str, named: str) -> None:
    id = hermes.post(PATH, {**ASKED, "max_output_tokens": 1}).json()["id"]
    refused = hermes.get(f"{PATH}/{id}/input_items{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, named)
    streamed = hermes.get(f"{PATH}/{id}?stream=true&starting_after=3")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    assert hermes.get(f"{PATH}/{id}?stream=false").status_code == 200


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"input": 1e999}', b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens", "/v1/chat/completions/input_tokens"])
def test_malformed_json(hermes: LiveServer, path: str, raw: bytes) -> None:
    refused = hermes.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_errors_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Served: tiny"):
        client.responses.create(model="gpt", input="Hi")
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.responses.create(model="tiny", input="word " * 2000, stream=True)
    assert client.responses.input_tokens.count(model="tiny", input="word " * 2000).input_tokens > MAX_MODEL_LEN


def test_the_example_in_the_guide_runs(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_URL", f"{server.url}/v1")
    runpy.run_path("docs/examples/responses_client.py")
    assert len(capsys.readouterr().out) > 20
