"""Speculation through the API over a tiny random model: answers stay the same, and what it did is told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.speculation import Speculation
from localllm.serving.build import build_engine
from tests.web.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "one two three one two three one two three"}]


@pytest.fixture(scope="module")
def real(tiny_llama_path: Path) -> Iterator[LiveServer]:
    """A server whose steps verify as many drafts as they can: costs measured here would decide by chance."""
    engine = EngineConfig(model=str(tiny_llama_path), max_model_len=512, kv_cache_memory_bytes=2 << 20, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "width", lambda self, decoding, ready, limit: limit // len(ready) - 1)
        with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
            yield server


def answer(server: LiveServer, body: dict[str, Any]) -> Any:
    response = server.post(CHAT, {"messages": USER, "max_tokens": 60, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


TWO = {"allowed_token_ids": [300, 301], "temperature": 0}
"""Of two tokens the answer soon repeats itself."""


@pytest.mark.parametrize(
    "asked",
    [
        TWO, {**TWO, "temperature": 1.3, "seed": 5}, {**TWO, "logprobs": True, "top_logprobs": 1},
        {**TWO, "stop": ["zzz"]}, {"regex": "(abc ){12}"}, {"n": 2, "temperature": 0.9, "seed": 1},
    ],
)  # fmt: skip
def test_the_answer_is_that_without_speculation(real: LiveServer, asked: dict[str, Any]) -> None:
    if "regex" in asked:
        asked = {"structured_outputs": asked, "temperature": 0, "max_tokens": 100}
    plain, drafted = answer(real, {**asked, "speculative": False}), answer(real, asked)
    texts = [[choice["message"]["content"] for choice in each["choices"]] for each in (plain, drafted)]
    assert texts[0] == texts[1]
    assert "draft_n" not in plain["timings"]
    assert plain["usage"]["completion_tokens"] == drafted["usage"]["completion_tokens"]
    if plain["choices"][0].get("logprobs"):
        scored = [[entry["token"] for entry in each["choices"][0]["logprobs"]["content"]] for each in (plain, drafted)]
        assert scored[0] == scored[1]
    if asked.get("allowed_token_ids") and asked["temperature"] == 0:
        timings = drafted["timings"]
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_string_ends_the_same_text_at_each_place_of_a_step(real: LiveServer, place: int) -> None:
    """S9: text, logprobs and usage, in one piece and as a stream."""
    body = {**TWO, "logprobs": True}
    whole = answer(real, {**body, "speculative": False})["choices"][0]["message"]["content"]
    stop = whole[20 + place : 24 + place]
    told = []
    for speculative in (False, True):
        asked = {"messages": USER, "max_tokens": 60, "ignore_eos": True, **body, "stop": stop}
        asked["speculative"] = speculative
        given = real.post(CHAT, asked).json()
        lines = real.post(CHAT, {**asked, "stream": True, "stream_options": {"include_usage": True}}).text.split("\n\n")
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
        text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
        choice = given["choices"][0]
        assert text == choice["message"]["content"] == whole[: whole.index(stop)]
        assert pieces[-1]["usage"]["completion_tokens"] == given["usage"]["completion_tokens"]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        scores = [piece["choices"][0].get("logprobs") for piece in pieces if piece["choices"]]
        assert [entry["token"] for score in scores if score for entry in score["content"]] == tokens
        told.append((text, choice["finish_reason"], given["usage"]["completion_tokens"], tokens))
    assert told[0] == told[1]


def test_a_prediction_is_told_in_usage(real: LiveServer) -> None:
    asked = {"temperature": 0, "max_tokens": 40}
    plain = answer(real, {**asked, "speculative": False})
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text}]):
        told = answer(real, {**asked, "prediction": {"type": "content", "content": content}})
        assert told["choices"][0]["message"]["content"] == text
        details = told["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    wrong = answer(real, {**asked, "prediction": {"type": "content", "content": "entirely another text"}})
    assert wrong["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"speculative.n_max": -1}, "speculative.n_max"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content"),
    ],
)
def test_what_is_wrong_is_refused_by_name(real: LiveServer, asked: dict[str, Any], param: str) -> None:
    response = real.post(CHAT, {"messages": USER, "max_tokens": 1, **asked})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_request_may_limit_its_drafts(real: LiveServer) -> None:
    none = answer(real, {**TWO, "speculative.n_max": 0})
    assert "draft_n" not in none["timings"]
    assert "draft_n" in answer(real, {**TWO, "speculative.n_max": 2})["timings"]


def test_metrics_have_vllms_names(real: LiveServer) -> None:
    answer(real, TWO)
    text = real.get("/metrics").text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("localllm:spec_")
    }
    assert values["localllm:spec_decode_num_drafts_total"] > 0
    assert (
        values["localllm:spec_decode_num_accepted_tokens_total"]
        <= values["localllm:spec_decode_num_draft_tokens_total"]
    )
    assert values["localllm:spec_tokens_per_step"] > 1
    assert 'localllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"' in text
