"""Requests that ask for much with few bytes, or send much: refused before the work, and nobody else waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from localllm.engine import admission
from localllm.web.api import conversation
from tests.web.live_server import MAX_MODEL_LEN, LiveServer
from tests.web.test_errors import refusal

TEXT = "/v1/completions"


@pytest.mark.parametrize("body", [{"prompt": ["x"] * 2048, "n": 256}, {"prompt": ["x"] * 73}, {"prompt": "x", "n": 73}])
def test_more_outputs_than_the_queue_holds_are_refused_before_anything_is_made(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    made: list[object] = []
    monkeypatch.setattr(admission, "Request", lambda *args, **more: made.append(args))
    monkeypatch.setattr(conversation, "off_loop", lambda size, work: made.append(work))
    error = refusal(server.post(TEXT, body | {"max_tokens": 1}), 400)
    assert "At most 72 have room" in error["message"]  # the model's 8 at a time and 64 that wait
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
    assert "1,000,0" in answer.json()["error"]["message"]


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
