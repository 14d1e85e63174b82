"""Requests that ask for much with few bytes, or send much: refused before the work, and nobody else waits for them."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localllm.engine import admission
from localllm.serving.answers import conversation
from localllm.text.tokenizer import Tokenizer
from localllm.web.api import exchange, reading
from tests.web.harness import refusal
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, fake_model, settings

TEXT = "/v1/completions"


@pytest.mark.parametrize("body", [{"prompt": ["x"] * 2048, "n": 256}, {"prompt": ["x"] * 73}, {"prompt": "x", "n": 73}])
def test_more_outputs_than_the_queue_holds_are_refused_before_anything_is_made(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    made: list[object] = []
    monkeypatch.setattr(admission, "Request", lambda *args, **more: made.append(args))
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **more: made.append(args))
    error = refusal(server.post(TEXT, body | {"max_tokens": 1}), 400)
    assert "At most 72 are possible" in error["message"]  # the model's 8 at a time and 64 that wait
    assert "--max-num-queued-reqs" in error["message"]
    assert not made


def test_as_many_outputs_as_the_queue_holds_are_made(server: LiveServer) -> None:
    answer = server.post(TEXT, {"prompt": ["x"] * 8, "n": 8, "max_tokens": 1})
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 64)


LONG = "x" * (conversation.MOST_CHARS + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"content": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        (TEXT, {"prompt": LONG, "truncate_prompt_tokens": 5}),
        (TEXT, {"prompt": ["a", LONG]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenised(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert server.model is not None
    monkeypatch.setattr(server.model.tokenizer, "encode", lambda *args, **more: pytest.fail("it was tokenised"))
    answer = server.post(path, body)
    assert answer.status_code == 400
    said = "about 250000 tokens" if path.startswith("/v1/messages") else "1,000,0"
    assert said in answer.json()["error"]["message"]


def test_texts_longer_than_the_context_are_counted(server: LiveServer) -> None:
    counted = server.post("/tokenize", {"prompt": "word " * 10 * MAX_MODEL_LEN, "return_token_strs": True}).json()
    assert counted["count"] > 10 * MAX_MODEL_LEN
    assert len(counted["token_strs"]) == counted["count"]
    assert server.post("/detokenize", {"tokens": counted["tokens"]}).status_code == 200


def test_too_many_ids_are_not_decoded(server: LiveServer) -> None:
    error = refusal(server.post("/detokenize", {"tokens": [5] * (conversation.MOST_CHARS + 1)}), 400)
    assert (error["param"], "1,000,000" in error["message"]) == ("tokens", True)


@contextmanager
def threads_of(spied: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, owner: object) -> Iterator[set[str]]:
    """Names of the threads that call a method of `owner` meanwhile."""
    seen: set[str] = set()

    def spy(*args: Any, **more: Any) -> Any:
        seen.add(threading.current_thread().name)
        return spied(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(owner, spied.__name__, spy)
        yield seen


def test_long_texts_and_lists_are_worked_on_beside_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.model is not None
    tokenizer = server.model.tokenizer
    with threads_of(tokenizer.decode, monkeypatch, tokenizer) as threads:
        assert server.post("/detokenize", {"tokens": [5] * 100_000}).status_code == 200
    assert threads
    assert "server" not in threads
    with threads_of(tokenizer.token_text, monkeypatch, tokenizer) as threads:
        assert server.post("/tokenize", {"content": "a " * 5000, "return_token_strs": True}).status_code == 200
    assert threads
    assert "server" not in threads
    with threads_of(tokenizer.encode, monkeypatch, tokenizer) as threads:  # many short ones are as long as a long one
        assert server.post(TEXT, {"prompt": ["a" * 300] * 10, "max_tokens": 1}).status_code == 200
    assert threads
    assert "server" not in threads


# Bodies -------------------------------------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("unit", [b"{}", b"[]", b"1", b'""', b"[[{}]]"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", TEXT, "/v1/messages", "/api/chat", "/v1/responses", "/tokenize"]
)
def test_bodies_of_very_many_values_are_refused_before_they_are_parsed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, unit: bytes
) -> None:
    monkeypatch.setattr(exchange, "MAX_VALUES", 100_000)
    monkeypatch.setattr(exchange.msgspec.json, "decode", lambda *args, **more: pytest.fail("it was parsed"))
    raw = b'{"prompt": [' + b",".join([unit] * 100_000) + b"]}"
    answer = server.http.post(path, content=raw, headers=JSON)
    assert answer.status_code == 413
    assert "limit is 100,000" in answer.text


def test_a_long_text_with_few_values_is_no_such_body(server: LiveServer) -> None:
    assert server.post("/tokenize", {"content": "a" * 900_000}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((path, "messages") for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")),
        *(("/v1/responses", "input"), ("/v1/chat/completions", "tools"), ("/v1/rerank", "documents")),
    ],
)
def test_more_objects_than_anybody_sends_are_refused_by_name(server: LiveServer, path: str, field: str) -> None:
    body = {"messages": [], "query": "a", field: [{"role": "user", "content": ""}] * (reading.MAX_OBJECTS + 1)}
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert f"'{field}' holds 10,001 items." in answer.text


def test_large_bodies_are_read_beside_the_event_loop(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with threads_of(reading.parse_json, monkeypatch, reading) as threads:
        assert server.post("/tokenize", {"content": "a" * reading.LARGE_BODY_BYTES}).status_code == 200
    assert threads
    assert "server" not in threads


def test_the_size_of_a_body_is_a_setting(tmp_path: Path) -> None:
    large = {"content": "a", "unknown": "x " * 100_000}
    for max_body_bytes, status in ((100_000, 413), (300_000, 200)):
        asked = settings(max_body_bytes=max_body_bytes)
        with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
            answer = server.post("/tokenize", large)
            assert answer.status_code == status
            assert ("--max-body-bytes" in answer.text) == (status == 413)
            named = server.post("/v1/load_lora_adapter", {"lora_name": "x" * 400_000})
            assert "--max-body-bytes" not in refusal(named, 413)["message"]


def test_a_body_with_pictures_has_a_limit_of_its_own(tmp_path: Path) -> None:
    asked = settings(max_body_bytes=100_000, max_media_body_bytes=400_000)
    with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
        picture = {"content": "a", "unknown": "x" * 200_000}
        assert server.post("/tokenize", picture).status_code == 200
        for text in ("x " * 60_000, ["x y"] * 30_000):
            refused = server.post("/tokenize", {**picture, "text": text})
            assert "without pictures" in refusal(refused, 413)["message"]
        refused = server.post("/tokenize", {"content": "a", "unknown": "x" * 500_000})
        assert "--max-media-body-bytes" in refusal(refused, 413)["message"]
        assert "--max-body-bytes" in refusal(server.post("/v1/completions", picture), 413)["message"]


def test_garbage_is_collected_again_after_a_body(server: LiveServer) -> None:
    assert server.http.post("/tokenize", content=b"{", headers=JSON).status_code == 400
    assert gc.isenabled()
