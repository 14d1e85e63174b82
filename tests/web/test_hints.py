"""Hints of a request are accepted in every dialect, with a warning header where nothing follows them."""

from typing import Any

import pytest

from localllm.web.api.hints import HINTS, MODEL_HINTS, hints_of
from tests.web.live_server import LiveServer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    "anthropic": ("/v1/messages", CHAT),
    "llamacpp": ("/completion", {"prompt": "Hi", "n_predict": 1}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "stream": False}),
}
AROUND: dict[str, dict[str, Any]] = {"thinking": {"type": "adaptive"}, "options": {"num_predict": 1}}
"""Further fields of an object that holds hints."""
ASKS_FOR: dict[str, Any] = {
    "enable_thinking": True,
    "thinking": True,
    "think": True,
    "effort": "high",
    "reasoning_effort": "high",
    "context_management": {"edits": []},
    "budget_tokens": 64,
    "store": True,
} | dict.fromkeys(MODEL_HINTS["budget"]["openai"], 64)
"""The value with which a field asks for something; `low` for all others."""

FIELDS = sorted(
    {(dialect, path) for _, fields in HINTS for dialect, paths in fields.items() for path in paths}
    | {(dialect, path) for fields in MODEL_HINTS.values() for dialect, paths in fields.items() for path in paths}
)


def asking(dialect: str, path: str) -> tuple[str, dict[str, Any]]:
    """Return the URL and a body with this field."""
    url, body = REQUESTS[dialect]
    outer, _, name = path.rpartition(".") if path.partition(".")[0] != "speculative" else ("", "", path)
    value = ASKS_FOR.get(name, "low")
    if outer:
        return url, {**body, outer: {**AROUND.get(outer, {}), name: value}}
    return url, {**body, path: {"type": "enabled"} if (dialect, path) == ("anthropic", "thinking") else value}


@pytest.mark.parametrize(("dialect", "path"), [each for each in FIELDS if not each[1].startswith(("tools.", "mcp."))])
def test_a_hint_that_nothing_follows_is_accepted_with_a_warning(server: LiveServer, dialect: str, path: str) -> None:
    url, body = asking(dialect, path)
    response = server.post(url, body)
    assert response.status_code == 200, response.text
    assert f"{path!r} has no effect" in response.headers["x-localllm-warning"]


@pytest.mark.parametrize("dialect", ["openai", "responses", "anthropic"])
def test_a_neutral_value_passes_without_a_warning(server: LiveServer, dialect: str) -> None:
    url, body = REQUESTS[dialect]
    response = server.post(url, {**body, "service_tier": "auto"})
    assert (response.status_code, response.headers.get("x-localllm-warning")) == (200, None)


@pytest.mark.parametrize(
    ("url", "fields", "named"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "huge"}}, "output_config.effort"),
        ("/api/chat", {"think": "huge"}, "think"),
    ],
)
def test_an_unknown_value_of_a_hint_is_refused(server: LiveServer, url: str, fields: Any, named: str) -> None:
    body = next(body for path, body in REQUESTS.values() if path == url)
    refused = server.post(url, {**body, **fields})
    assert refused.status_code == 400
    assert named in refused.text


def test_the_table_has_each_field_of_a_dialect_once() -> None:
    paths = [(dialect, path) for _, fields in HINTS for dialect, names in fields.items() for path in names]
    assert len(paths) == len(set(paths))
    assert "num_gpu" in hints_of("ollama", "options.")
    assert not any("." in name for name in hints_of("ollama"))
