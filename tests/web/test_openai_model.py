"""The API over a tiny random model with the real runner: what needs true probabilities."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.serving.build import build_engine
from localllm.web.api.openai import logprobs as shapes
from tests.web.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def real(tiny_llama_path: Path) -> Iterator[LiveServer]:
    engine = EngineConfig(model=str(tiny_llama_path), max_model_len=512, kv_cache_memory_bytes=2 << 20, device="cpu")
    with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
        yield server


def chunks(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def test_chat_logprobs(real: LiveServer) -> None:
    body = {
        "messages": USER,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
    }
    choice = real.post(CHAT, body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == tops[0] <= 0  # greedy takes the likeliest
    streamed = chunks(real, CHAT, body)
    pieces = [c["choices"][0]["logprobs"] for c in streamed]
    again = [entry for piece in pieces if piece for entry in piece["content"]]
    assert [entry["token"] for entry in again] == [entry["token"] for entry in content]
    # The second request starts from the prefix cache: another shape of matmul, other last digits.
    assert [entry["logprob"] for entry in again] == pytest.approx([entry["logprob"] for entry in content], abs=1e-4)


def test_logprobs_without_alternatives(real: LiveServer) -> None:
    body = {"messages": USER, "max_tokens": 2, "logprobs": True, "ignore_eos": True}
    content = real.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs(real: LiveServer, echo: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 2, "temperature": 0, "echo": echo, "ignore_eos": True}
    answer = real.post(TEXT, body).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    count = 5 + (answer["usage"]["prompt_tokens"] if echo else 0)
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in choice["text"]:
            assert choice["text"][offset:].startswith(token)
    if echo:
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for score, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[echo:]:
        assert 2 <= len(top) <= 3
        assert score in top.values()
    streamed = [c["choices"][0]["logprobs"] for c in chunks(real, TEXT, body)]
    joined = {name: [item for piece in streamed if piece for item in piece[name]] for name in logprobs}
    assert joined == logprobs


def test_tokens_as_ids(real: LiveServer) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 3,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    choice = real.post(TEXT, body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs(real: LiveServer, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 1, "return_token_ids": True}
    answer = real.post(path, {**body, **({"messages": USER} if path == CHAT else {"prompt": PROMPT})}).json()
    holder = answer if path == CHAT else answer["choices"][0]
    entries, ids = holder["prompt_logprobs"], holder["prompt_token_ids"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["rank"] >= 1
        assert any(scored["rank"] == 1 for scored in entry.values())
        assert all(math.isfinite(scored["logprob"]) for scored in entry.values())


@pytest.fixture(scope="module")
def generous(tiny_llama_path: Path) -> Iterator[LiveServer]:
    """A server that gives whole vocabularies."""
    engine = EngineConfig(model=str(tiny_llama_path), max_model_len=256, kv_cache_memory_bytes=2 << 20, device="cpu",
                          max_logprobs=-1)  # fmt: skip
    with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
        yield server


def test_a_whole_vocabulary_of_log_probabilities(generous: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every shape, with many kept as JSON and with all as objects; they sum to one."""
    said = {}
    for many in (100, 10_000):
        monkeypatch.setattr(shapes, "MANY", many)
        text = {"prompt": PROMPT, "max_tokens": 2, "logprobs": -1, "prompt_logprobs": -1, "temperature": 0}
        choice = generous.post(TEXT, {**text, "return_tokens_as_token_ids": True}).json()["choices"][0]
        chat = {"messages": USER, "max_tokens": 2, "logprobs": True, "top_logprobs": -1, "ignore_eos": True, "seed": 1}
        told = generous.post(CHAT, chat).json()["choices"][0]["logprobs"]["content"]
        said[many] = (choice["logprobs"], choice["prompt_logprobs"])
        for top in choice["logprobs"]["top_logprobs"]:
            assert len(top) == 512
            assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-4)
        for entry in told:
            assert len(entry["top_logprobs"]) == 512
            assert entry["logprob"] in [each["logprob"] for each in entry["top_logprobs"]]
        for position in choice["prompt_logprobs"][1:]:
            assert sorted(each["rank"] for each in position.values()) == list(range(1, 513))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks(generous, CHAT, chat)]
    assert [len(entry["top_logprobs"]) for piece in pieces if piece for entry in piece["content"]] == [512] * 2
    assert said[100] == said[10_000]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [(TEXT, "logprobs", {}), (TEXT, "prompt_logprobs", {}), (CHAT, "top_logprobs", {"logprobs": True})],
)
@pytest.mark.parametrize("asked", [-1, 21])
def test_more_logprobs_than_the_server_gives_are_refused_with_numbers(
    real: LiveServer, path: str, field: str, more: dict[str, Any], asked: int
) -> None:
    prompt = {"messages": USER} if path == CHAT else {"prompt": PROMPT}
    response = real.post(path, {**prompt, **more, field: asked, "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "At most 20" in error["message"]
    assert f"--max-logprobs {asked}" in error["message"]


def test_same_seed_same_text_and_another_seed_another(real: LiveServer) -> None:
    def text(**fields: Any) -> str:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1.5, "ignore_eos": True, **fields}
        return str(real.post(TEXT, body).json()["choices"][0]["text"])

    assert text(seed=3) == text(seed=3)
    assert text(seed=3) != text(seed=4)
    assert text() != text()


def test_choices_of_one_seed_differ_and_repeat(real: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.5, "n": 3, "seed": 11, "ignore_eos": True}
    first, second = ([c["text"] for c in real.post(TEXT, body).json()["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_the_models_own_defaults_are_used(real: LiveServer) -> None:
    """generation_config.json says temperature 0.7 and top_p 0.9; an explicit value wins."""
    assert real.model is not None
    assert real.model.sampling_defaults == {"temperature": 0.7, "top_p": 0.9}
    greedy = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    texts = {real.post(TEXT, greedy).json()["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1


def test_token_limits_are_honoured(real: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "allowed_token_ids": [40, 41], "return_token_ids": True}
    assert set(real.post(TEXT, body).json()["choices"][0]["token_ids"]) <= {40, 41}
    banned = {"prompt": PROMPT, "max_tokens": 8, "logit_bias": {"40": 100}, "return_token_ids": True, "temperature": 0}
    assert real.post(TEXT, banned).json()["choices"][0]["token_ids"] == [40] * 8


@pytest.mark.parametrize("stream", [False, True])
def test_eos_stops_and_does_not_show(real: LiveServer, stream: bool) -> None:
    body = {"messages": USER, "max_tokens": 9, "logit_bias": {"2": 100}, "min_tokens": 3, "temperature": 0}
    if stream:
        choices = [c["choices"][0] for c in chunks(real, CHAT, body)]
        text, last = "".join(c["delta"].get("content", "") for c in choices), choices[-1]
    else:
        last = real.post(CHAT, body).json()["choices"][0]
        text = last["message"]["content"]
    assert last["finish_reason"] == "stop"
    assert "<|im_end|>" not in text


# What evaluation harnesses ask ----------------------------------------------------------------------------------------


def test_texts_are_scored_as_evaluation_harnesses_ask(real: LiveServer) -> None:
    """Lists of token ids of different lengths, echoed with logprobs: the greedy token is the likeliest of its place."""
    ids = [real.post("/tokenize", {"prompt": text}).json()["tokens"] for text in (PROMPT, "Paris is", "A")]
    assert len({len(each) for each in ids}) == 3
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = real.post(TEXT, {"prompt": ids, **body}).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for each, choice in zip(ids, choices, strict=True):
        scored = choice["logprobs"]
        assert [len(listed) for listed in scored.values()] == [len(each) + 1] * 4
        assert (scored["token_logprobs"][0], scored["top_logprobs"][0]) == (None, None)
        for score, top in zip(scored["token_logprobs"][1:], scored["top_logprobs"][1:], strict=True):
            assert score <= max(top.values())
        assert scored["token_logprobs"][-1] == max(scored["top_logprobs"][-1].values())
        alone = real.post(TEXT, {"prompt": each, **body}).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert alone[1:] == pytest.approx(scored["token_logprobs"][1:], abs=1e-4)


def test_an_echo_alone_has_the_prompt_and_nothing_after_it(real: LiveServer) -> None:
    body = {"prompt": [PROMPT, "Paris"], "echo": True, "logprobs": 2, "max_tokens": 0, "return_token_ids": True}
    answer = real.post(TEXT, body).json()
    assert answer["usage"]["completion_tokens"] == 0
    longer = real.post(TEXT, {**body, "max_tokens": 1}).json()
    for choice, more in zip(answer["choices"], longer["choices"], strict=True):
        assert choice["text"] == body["prompt"][choice["index"]]
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
        assert choice["logprobs"]["tokens"] == more["logprobs"]["tokens"][:-1]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0}, {"max_tokens": 0, "echo": True, "stream": True}, {"max_tokens": -1, "echo": True}]
)
def test_no_tokens_at_all_are_refused(real: LiveServer, fields: dict[str, Any]) -> None:
    response = real.post(TEXT, {"prompt": PROMPT, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_tokenizer_info_lets_a_client_do_without_a_tokenizer(real: LiveServer) -> None:
    info = real.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<|im_start|>", "<|im_end|>", 512)
    assert "{%" in info["chat_template"]
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert real.post("/tokenize", asked).json()["tokens"] == [2]
    assert real.get("/tokenizer_info", params={"model": "nobody-has-this"}).status_code == 404
