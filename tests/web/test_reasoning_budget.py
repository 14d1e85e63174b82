"""The bound of reasoning over a real socket, by every name that a dialect has for it."""

import json
from typing import Any

import anthropic
import pytest

from localllm.text.structured import StructuredOutputsParams
from tests.web.live_server import LiveServer

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER: list[Any] = [{"role": "user", "content": "How warm is it?"}]
OPENED = {
    "messages": [*USER, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
    "max_tokens": 40,
    "return_token_ids": True,
}
NAMES = ("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")


@pytest.fixture
def thinks(hermes: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """The model thinks in letters, at length, and then says one thing."""
    assert hermes.model is not None
    asked = StructuredOutputsParams(regex=r"<think>[a-z ]{1,400}</think>It is warm\.")
    monkeypatch.setitem(hermes.model.sampling_defaults, "structured_outputs", asked)  # type: ignore[arg-type]
    return hermes


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_reasoning_ends_at_its_budget(hermes: LiveServer, name: str, budget: int) -> None:
    """The prompt has opened it; `</think>` is several tokens, and the answer goes on behind them."""
    response = hermes.post(CHAT, {**OPENED, name: budget})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    end = tokens_of(hermes, "</think>")
    assert choice["token_ids"][budget : budget + len(end)] == end
    assert len(choice["token_ids"]) == 40
    thought = choice["message"].get("reasoning", "")
    assert thought == hermes.model.tokenizer.decode(choice["token_ids"][:budget]).strip()  # type: ignore[union-attr]
    assert choice["message"]["content"]


def test_choices_streams_stop_strings_and_completions(hermes: LiveServer) -> None:
    end = tokens_of(hermes, "</think>")
    several = hermes.post(CHAT, {**OPENED, "thinking_token_budget": 6, "n": 3, "seed": 1}).json()["choices"]
    assert all(choice["token_ids"][6 : 6 + len(end)] == end for choice in several)
    assert len({choice["message"]["content"] for choice in several}) == 1  # the model made of memory draws nothing
    lines = hermes.post(CHAT, {**OPENED, "reasoning_budget": 6, "stream": True}).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == several[0]["message"]["reasoning"]
    stopped = hermes.post(CHAT, {**OPENED, "reasoning_budget": 6, "stop": ["</think>"]}).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "</think>")
    body = {"prompt": "Hi <think>", "max_tokens": 30, "return_token_ids": True, "thinking_token_budget": 4}
    [choice] = hermes.post(TEXT, body).json()["choices"]
    assert choice["token_ids"][4 : 4 + len(end)] == end


@pytest.mark.parametrize("budget", [None, -1, 300])
def test_what_is_not_reached_changes_nothing(hermes: LiveServer, budget: int | None) -> None:
    plain = hermes.post(CHAT, OPENED).json()["choices"][0]["token_ids"]
    assert hermes.post(CHAT, {**OPENED, "reasoning_budget": budget}).json()["choices"][0]["token_ids"] == plain


def test_anthropics_budget(thinks: LiveServer) -> None:
    with anthropic.Anthropic(base_url=thinks.url, api_key="none", max_retries=0, timeout=20) as claude:
        answer = claude.messages.create(
            model="tiny", max_tokens=200, messages=USER, thinking={"type": "enabled", "budget_tokens": 5}
        )
    thought, text = answer.content
    assert 1 <= len(tokens_of(thinks, thought.thinking)) <= 6
    assert text.text == "It is warm."
    body = {
        "model": "tiny",
        "max_tokens": 20,
        "messages": USER,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
    }
    assert "max_tokens is reached first" in thinks.post(MESSAGES, body).headers["x-localllm-warning"]
    wrong = thinks.post(MESSAGES, {**body, "thinking": {"type": "enabled", "budget_tokens": -2}})
    assert wrong.status_code == 400
    assert "thinking.budget_tokens" in wrong.json()["error"]["message"]


def test_responses_take_vllms_name(thinks: LiveServer) -> None:
    answer = thinks.post(RESPONSES, {"model": "tiny", "input": "Hi", "thinking_token_budget": 5}).json()
    thought, message = answer["output"]
    assert 1 <= len(tokens_of(thinks, thought["content"][0]["text"])) <= 6
    assert message["content"][0]["text"] == "It is warm."


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in NAMES for value in (-2, "5", 1.5, True, [5])),
    ({"thinking_token_budget": 5, "reasoning_budget": 6}, "reasoning_budget"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_refusals_name_the_field(hermes: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = hermes.post(CHAT, {"messages": USER, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_does_not_reason_is_told_unless_none_is_asked(server: LiveServer, name: str) -> None:
    body = {"messages": USER, "max_tokens": 2}
    assert server.post(CHAT, {**body, name: 0}).status_code == 200
    told = server.post(CHAT, {**body, name: 9})
    assert told.headers["x-localllm-warning"] == f"field {name!r} has no effect: the model does not reason"


def tokens_of(server: LiveServer, text: str) -> list[int]:
    assert server.model is not None
    return server.model.tokenizer.encode(text, add_special_tokens=False)
