"""The real openai client against a real socket: chat and text completions, whole and streamed."""

import json
from typing import Any

import openai
import pytest

from tests.fake_runner import expected_output
from tests.tiny import VOCAB_SIZE
from tests.web.live_server import MAX_MODEL_LEN, LiveServer

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, 世界 🙂"}]


def events(response_text: str) -> list[Any]:
    """The data of every server-sent event, the final [DONE] checked and dropped."""
    lines = [line for line in response_text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed_text(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[str, list[Any]]:
    chunks = events(server.post(path, {**body, "stream": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path.endswith("chat/completions"):
        return "".join(choice["delta"].get("content") or "" for choice in choices), chunks
    return "".join(choice["text"] for choice in choices), chunks


def test_chat_answers_with_usage_and_timings(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=7)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "length", None)
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.usage.prompt_tokens_details is not None
    timings = answer.model_extra["timings"]  # type: ignore[index]
    assert timings["predicted_n"] == 7
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens


def test_a_repeated_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "the quick brown fox " * 12
    first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    fresh = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body={"cache_prompt": False})
    assert fresh.usage is not None
    assert fresh.usage.prompt_tokens_details is not None
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60
    assert "timings" in (chunks[-1].model_extra or {})
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_stream_shape_without_usage(server: LiveServer, path: str) -> None:
    response = server.post(path, {"messages": MESSAGES, "max_tokens": 3, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"]["predicted_n"] == 3
    assert not any("usage" in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_continuous_usage_counts_up(server: LiveServer) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 20,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    _, chunks = streamed_text(server, "/v1/chat/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 20


def test_unicode_is_never_cut(server: LiveServer) -> None:
    """Random bytes as output: half characters become U+FFFD once, whole ones arrive whole, stream or not."""
    body = {"prompt": "안녕하세요 🙂🚀 你好", "max_tokens": 200, "temperature": 0, "return_token_ids": True}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    text, chunks = streamed_text(server, "/v1/completions", body)
    assert text == whole["text"]
    streamed_ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert streamed_ids == whole["token_ids"]


def test_tokens_are_those_of_the_engine(server: LiveServer) -> None:
    prompt = [5, 6, 7, 300, 8]
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["token_ids"] == expected_output(prompt, 9, VOCAB_SIZE)
    assert choice["prompt_token_ids"] == prompt


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("one", 1), (["one", "two", "three"], 3), ([9, 8, 7], 1), ([[9, 8, 7], [3, 4]], 2)],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_every_shape_of_prompt(server: LiveServer, prompt: Any, choices: int, n: int, stream: bool) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 5, "stream": stream, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]
    response = server.post("/v1/completions", body)
    if stream:
        chunks = events(response.text)
        finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        usage = chunks[-1]["usage"]
    else:
        finished = [choice["index"] for choice in response.json()["choices"]]
        usage = response.json()["usage"]
    assert sorted(finished) == list(range(n * choices))
    assert usage["completion_tokens"] == 5 * n * choices


def test_timings_stand_once_in_the_last_chunk(server: LiveServer) -> None:
    """Also when all choices end in the same step."""
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 4, "stream": True}
    timed = ["timings" in chunk for chunk in events(server.post("/v1/completions", body).text)]
    assert timed == [False] * (len(timed) - 1) + [True]


def test_max_tokens_defaults(server: LiveServer) -> None:
    """OpenAI's 16 for completions; the rest of the context for chat."""
    completion = server.post("/v1/completions", {"prompt": "Hi"}).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES}).json()
    assert chat["usage"]["total_tokens"] == MAX_MODEL_LEN
    limited = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 4}).json()
    assert limited["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer_and_do_not_show(server: LiveServer, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "Tell me", "max_tokens": 100, "temperature": 0}
    full = server.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = full[40:43]
    body["stop"] = ["never to be found", stop]
    if stream:
        text, chunks = streamed_text(server, "/v1/completions", body)
        last = chunks[-1]["choices"][0]
    else:
        last = server.post("/v1/completions", body).json()["choices"][0]
        text = last["text"]
    assert text == full[: full.index(stop)]
    whole, (*_, usage_chunk) = (
        server.post("/v1/completions", body).json(),
        streamed_text(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})[1],
    )
    assert usage_chunk["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] < 100
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_echo_repeats_the_prompt(server: LiveServer) -> None:
    body = {"prompt": "Once upon", "max_tokens": 4, "echo": True, "temperature": 0}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert whole.startswith("Once upon")
    assert streamed_text(server, "/v1/completions", body)[0] == whole
    ids = server.post("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    assert server.post("/v1/completions", {**body, "prompt": ids}).json()["choices"][0]["text"] == whole


def test_chat_echo_repeats_the_message_that_is_continued(server: LiveServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 4, "temperature": 0}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert whole.startswith("It is")
    assert streamed_text(server, "/v1/chat/completions", body)[0] == whole


def test_truncation_happens_only_when_asked_for(server: LiveServer) -> None:
    body = {"prompt": "word " * 100, "max_tokens": 1, "truncate_prompt_tokens": 10}
    assert server.post("/v1/completions", body).json()["usage"]["prompt_tokens"] == 10


def test_content_parts_and_the_developer_role_are_understood(server: LiveServer) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    counts = [server.post("/tokenize", {"messages": messages}).json()["tokens"] for messages in (plain, parts)]
    assert counts[0] == counts[1]


def test_long_prompts_are_tokenised_like_short_ones(server: LiveServer) -> None:
    """The worker thread is the same tokenizer."""
    long = "The quick brown fox. " * 200
    answer = server.post("/tokenize", {"prompt": long}).json()
    assert answer["count"] > 100
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": long, "content": long}


def test_tokenize_spellings(server: LiveServer) -> None:
    vllm = server.post("/tokenize", {"prompt": "Hello", "return_token_strs": True}).json()
    assert vllm["count"] == len(vllm["tokens"]) == len(vllm["token_strs"])
    assert vllm["max_model_len"] == MAX_MODEL_LEN
    assert server.post("/tokenize", {"content": "Hello"}).json()["tokens"] == vllm["tokens"]


def test_request_id_names_the_response(server: LiveServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "request_id": "mine-1"}
    assert [server.post("/v1/completions", body).json()["id"] for _ in range(2)] == ["cmpl-mine-1"] * 2


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert (model.model_extra or {})["max_model_len"] == MAX_MODEL_LEN
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_model_is_found_under_its_full_name(server: LiveServer) -> None:
    assert server.get("/v1/models/org/tiny").json()["id"] == "tiny"
    assert (
        server.post("/v1/completions", {"model": "org/tiny", "prompt": "x", "max_tokens": 1}).json()["model"] == "tiny"
    )
