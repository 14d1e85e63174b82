"""What llama.cpp's clients hear beside the tokens: timings in every chunk, and how far a prompt has been read."""

import json
from typing import Any

import msgspec
import openai
import pytest

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.stats import RequestTimeline
from localllm.serving.answers.generation import Progress
from localllm.units import format_rate
from localllm.web.api.ollama.lines import OllamaHead, RequestClock
from localllm.web.api.ollama.shapes import OllamaMessage
from localllm.web.api.openai.answer import usage_object
from localllm.web.api.timings import timings_object
from localllm.web.pages.dashboard.request_views import finished_requests
from localllm.web.pages.playground.views import result
from tests.web.live_server import LiveServer, PacedRunner

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: list[Any] = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]


def chunks(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, {"stream": True, "max_tokens": 5, **body})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


def bodies(**fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(CHAT, {"messages": LONG, **fields}), (TEXT, {"prompt": LONG[0]["content"], **fields})]


@pytest.mark.parametrize(("path", "body"), bodies(return_progress=True, cache_prompt=False))
def test_progress_is_told_once_a_step_until_the_first_token(
    server: LiveServer, runner: PacedRunner, path: str, body: Any
) -> None:
    """A step holds 64 tokens here; to a reader that is late two steps come as one."""
    runner.step_s = 0.03
    got = chunks(server, path, {**body, "stream_options": {"include_usage": True}})
    told = [chunk["prompt_progress"] for chunk in got if "prompt_progress" in chunk]
    total = got[-1]["usage"]["prompt_tokens"]
    assert [each["total"] for each in told] == [total] * len(told)
    assert [each["processed"] for each in told] == [*range(64, total, 64), total]
    assert {each["cache"] for each in told} == {0}
    assert all(isinstance(each["time_ms"], int) and each["time_ms"] >= 0 for each in told)
    last = max(i for i, chunk in enumerate(got) if "prompt_progress" in chunk)
    said = [text_of(chunk) for chunk in got if chunk["choices"]]
    assert not any(said[: last + 1])
    assert "".join(said) == "".join(
        text_of(chunk) for chunk in chunks(server, path, {**body, "return_progress": False}) if chunk["choices"]
    )


def text_of(chunk: dict[str, Any]) -> str:
    [choice] = chunk["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def test_progress_counts_what_was_cached_and_is_told_for_one_choice(server: LiveServer) -> None:
    [(path, body), _] = bodies(return_progress=True)
    chunks(server, path, body)
    told = [c for c in chunks(server, path, {**body, "n": 2}) if "prompt_progress" in c]
    assert {c["choices"][0]["index"] for c in told} == {0}
    first = told[0]["prompt_progress"]
    assert 0 < first["cache"] <= first["processed"] == first["total"]


def test_progress_comes_while_the_prompt_is_read(client: openai.OpenAI, runner: PacedRunner) -> None:
    runner.gate.clear()
    with client.chat.completions.create(
        model="tiny",
        messages=LONG,
        stream=True,
        max_tokens=2,
        extra_body={"return_progress": True, "cache_salt": "new"},
    ) as stream:
        runner.gate.set()
        runner.step_s = 0.05
        seen = [getattr(chunk, "prompt_progress", None) for chunk in stream]
    told = [each["processed"] for each in seen if each]
    assert told == sorted(told)
    assert len(told) > 2


def test_an_echo_still_stands_before_the_text(server: LiveServer) -> None:
    body = {"prompt": LONG[0]["content"], "echo": True, "cache_prompt": False}
    plain, told = (
        "".join(text_of(chunk) for chunk in chunks(server, TEXT, {**body, "return_progress": asked}))
        for asked in (False, True)
    )
    assert told == plain
    assert told.startswith(LONG[0]["content"])


@pytest.mark.parametrize(("path", "body"), bodies(timings_per_token=True))
def test_timings_come_with_every_chunk(server: LiveServer, runner: PacedRunner, path: str, body: Any) -> None:
    """Tokens that are ready together travel together: here they come one by one."""
    runner.step_s = 0.05
    got = chunks(server, path, {**body, "max_tokens": 6, "temperature": 0})
    timings = [chunk["timings"] for chunk in got]
    counts = [each["predicted_n"] for each in timings]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 3
    prompt_n = got[-1]["timings"]["prompt_n"] + got[-1]["timings"]["cache_n"]
    assert all(each["prompt_n"] + each["cache_n"] == prompt_n for each in timings)
    assert timings[-1]["predicted_ms"] >= timings[len(timings) // 2]["predicted_ms"]


def test_progress_needs_a_stream(server: LiveServer) -> None:
    for path, body in bodies(return_progress=True):
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "return_progress")
    for path, body in bodies(timings_per_token=True, max_tokens=1):
        assert server.post(path, body).json()["timings"]["predicted_n"] == 1  # they come with it anyway


@pytest.mark.parametrize("name", ["return_progress", "timings_per_token"])
@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_wrong_types_are_named(server: LiveServer, name: str, value: Any) -> None:
    response = server.post(CHAT, {"messages": LONG, "stream": True, name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def progress_of(*choices: tuple[int, float]) -> Progress:
    """Return the progress of a request whose choices ended: the tokens of each, and the seconds of its decoding."""
    progress = Progress(len(choices), 9, len(choices))
    for index, (count, decode_s) in enumerate(choices):
        usage, timings = Usage(9, count, 0), Timings(0.0, 0.1, decode_s, 0.1)
        ids = (5,) * count
        progress.count(GenerationEvent(index, token_ids=ids, finish_reason="stop", usage=usage, timings=timings))
    return progress


@pytest.mark.parametrize(
    ("choices", "rate"),
    [
        ([(11, 0.5)], 20.0),
        ([(2, 0.5)], 2.0),
        ([(1, 0.00007)], None),
        ([(1, 0.0)], None),
        ([(10, 0.4), (11, 0.5)], 20.0),
    ],
)
def test_the_speed_of_an_answer_is_that_of_the_tokens_after_the_first(
    choices: list[tuple[int, float]], rate: float | None
) -> None:
    """The times begin with the first token. Of several choices the longest one counts alone."""
    progress = progress_of(*choices)
    timings = json.loads(msgspec.json.encode(timings_object(progress)))
    assert timings.get("predicted_per_second") == rate
    assert timings.get("predicted_per_token_ms") == (None if rate is None else 1e3 / rate)
    assert timings["predicted_n"] == sum(count for count, _ in choices)
    usage = json.loads(msgspec.json.encode(usage_object(progress.usage())))
    answer = {"choices": [{"text": "Hi", "finish_reason": "stop"}], "usage": usage, "timings": timings}
    shown = {fact.name: fact.value for fact in result("completions", answer, "").facts}
    assert shown.get("Generation speed") == (None if rate is None else format_rate(rate))


@pytest.mark.parametrize(("count", "decode_s", "rate"), [(11, 0.5, 20.0), (2, 0.5, 2.0), (1, 0.00007, None)])
def test_ollamas_counts_and_the_dashboard_give_the_same_speed(count: int, decode_s: float, rate: float | None) -> None:
    head = OllamaHead("tiny", "generate", RequestClock())
    last = json.loads(
        msgspec.json.encode(head.last(OllamaMessage("assistant", ""), "stop", progress_of((count, decode_s))))
    )
    assert last["eval_count"] == count
    assert last["eval_duration"] == (0 if rate is None else pytest.approx(count / rate * 1e9))
    ended = RequestTimeline("r", "finished", 9, 0, count, 1, 0, 1.0, 1.1, 2.0, 2.0 + decode_s, "stop")
    [row] = finished_requests([ended]).rows
    assert row.tokens_per_s == (None if rate is None else pytest.approx(rate))
