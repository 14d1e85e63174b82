"""Every request field that clients send is honoured, harmless, or refused by name: nothing is ignored in silence."""

import typing
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from localllm.text.chat_template import ChatTemplate
from localllm.web.api.openai.prompts import template_switches
from localllm.web.api.openai.schema import HARMLESS, HINTS, REFUSED, RULES, ChatBody, CompletionBody
from tests.web.live_server import LiveServer

VLLM = frozenset({
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs",
    "allowed_token_ids", "bad_words", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "documents", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "structured_outputs", "priority",
    "request_id", "session_id", "return_token_ids", "return_tokens_as_token_ids", "cache_salt", "kv_transfer_params",
    "vllm_xargs", "repetition_detection", "stream_interval", "thinking_token_budget", "include_reasoning",
    "use_beam_search", "length_penalty", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
})  # fmt: skip
LLAMA_CPP = frozenset({
    "return_progress", "timings_per_token", "cache_prompt", "id_slot", "grammar", "reasoning_format",
    "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens",
})  # fmt: skip
OLLAMA_AND_LM_STUDIO = ["reasoning", "keep_alive", "ttl"]
OPENAI_CHAT = [*typing.get_type_hints(chat_params.CompletionCreateParamsBase), "stream"]
OPENAI_COMPLETIONS = [*typing.get_type_hints(completion_params.CompletionCreateParamsBase), "stream"]
# In ux.md's list and newer than the SDK installed by the lowest requirement.
OPENAI_NEWER = ["moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"]


@pytest.mark.parametrize("name", sorted({*OPENAI_CHAT, *OPENAI_NEWER, *VLLM, *LLAMA_CPP, *OLLAMA_AND_LM_STUDIO}))
def test_every_known_chat_field_has_a_place(name: str) -> None:
    places = [name in place for place in (ChatBody.__struct_fields__, HARMLESS, HINTS, REFUSED)]
    assert sum(places) == 1


@pytest.mark.parametrize("name", sorted(OPENAI_COMPLETIONS))
def test_every_openai_completion_field_has_a_place(name: str) -> None:
    places = [name in place for place in (CompletionBody.__struct_fields__, HARMLESS, HINTS, REFUSED)]
    assert sum(places) == 1


ASKS_FOR_SOMETHING: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "best_of": 3,
    "early_stopping": True,
    "chat_template": "{{ messages }}",
    "media_io_kwargs": {"video": {}},
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"a": 1},
    "logits_processors": ["f"],
    "repetition_detection": {"max_pattern_size": 4},
    "stream_interval": 8,
    "spaces_between_special_tokens": False,
}
ASKS_FOR_NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None, "tool_choice": None, "response_format": None},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"functions": [], "function_call": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"store": False},
    {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"},
    {"prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True},
    {"structured_outputs": {}, "use_beam_search": False, "length_penalty": 1.0, "stream_interval": 1},
    {"include_reasoning": True, "reasoning_effort": "none", "reasoning_format": "none", "reasoning_budget": -1},
    {"return_progress": False, "timings_per_token": False, "cache_prompt": True, "id_slot": -1, "grammar": ""},
]


def test_every_refusal_has_an_example() -> None:
    assert ASKS_FOR_SOMETHING.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_honoured_is_refused_by_name(server: LiveServer, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, name: ASKS_FOR_SOMETHING[name]}
    response = server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported_parameter", "invalid_request_error")
    assert name in error["message"]


@pytest.mark.parametrize("fields", ASKS_FOR_NOTHING, ids=lambda fields: ",".join(fields))
def test_what_asks_for_nothing_passes_without_a_warning(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert "x-localllm-warning" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_answered_with_a_warning(server: LiveServer, stream: bool) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "tempersture": 1, "größe\r\n": 2, "keep_alive": "5m", "stream": stream}
    response = server.post("/v1/completions", body)
    warning = response.headers["x-localllm-warning"]
    assert response.status_code == 200
    assert "unknown field 'tempersture' ignored" in warning
    assert "'keep_alive' has no effect" in warning


def test_none_is_absent() -> None:
    assert RULES.check({"tools": None, "guided_json": None, "whatever": None}, []) == []


PROMPT = "the lazy dog"
HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0.6}),  # the model's generation_config
    ({"temperature": 0.1}, {"temperature": 0.1}),
    ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
    ({"top_k": 10**30}, {"top_k": 512}),
    ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
    (
        {
            "dry_multiplier": 0.8,
            "dry_base": 2,
            "dry_allowed_length": 3,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["\n"],
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
            "top_n_sigma": 1.5,
            "typical_p": 0.9,
            "dynatemp_range": 0.3,
            "dynatemp_exponent": 1.2,
        },
        {
            "dry_multiplier": 0.8,
            "dry_base": 2,
            "dry_allowed_length": 3,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ("\n",),
            "xtc_probability": 0.5,
            "xtc_threshold": 0.2,
            "top_n_sigma": 1.5,
            "typical_p": 0.9,
            "dynatemp_range": 0.3,
            "dynatemp_exponent": 1.2,
            "uses_chain": True,
        },
    ),
    ({"mirostat": 1, "mirostat_tau": 4, "mirostat_eta": 0.3}, {"mirostat": 1, "mirostat_tau": 4, "mirostat_eta": 0.3}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "repeat_last_n": -1}),
    ({"repetition_penalty": 1.2, "repeat_last_n": 64}, {"repetition_penalty": 1.2, "repeat_last_n": 64}),
    ({"logit_bias": {"5": -100}, "allowed_token_ids": [5, 6]}, {"logit_bias": {5: -100}, "allowed_token_ids": (5, 6)}),
    ({"bad_words": ["dog"]}, {"bad_words": ("dog",)}),
    ({"seed": 7, "n": 3}, {"seed": 7, "n": 3}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "y"], "stop_token_ids": [9]}, {"stop": ("x", "y"), "stop_token_ids": (9,)}),
    (
        {"include_stop_str_in_output": True, "ignore_eos": True},
        {"include_stop_str_in_output": True, "ignore_eos": True},
    ),
    ({"min_tokens": 3, "max_tokens": 5}, {"min_tokens": 3, "max_tokens": 5}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4}),
    ({"logprobs": 2}, {"logprobs": 2}),
    ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2}),
    ({"prompt_logprobs": 1}, {"prompt_logprobs": 1}),
]


@pytest.mark.parametrize(("fields", "params"), HONOURED, ids=lambda fields: ",".join(fields) or "nothing")
def test_honoured_fields_reach_the_engine(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    assert server.model is not None
    admission, admitted = server.model.admission, []
    admit = type(admission).admit

    def spy(self: Any, asked: Any) -> Any:
        admitted.append(asked)
        return admit(self, asked)

    monkeypatch.setattr(type(admission), "admit", spy)
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, **fields})
    [asked] = admitted
    assert {name: getattr(asked.params, name) for name in params} == params
    assert asked.params.top_p == params.get("top_p", 1.0)


def test_priority_and_salt_reach_the_engine(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.model is not None
    admission, admitted = server.model.admission, []
    admit = type(admission).admit
    monkeypatch.setattr(type(admission), "admit", lambda self, asked: admitted.append(asked) or admit(self, asked))
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "priority": -5, "cache_salt": "mine"})
    options = admitted[0].options
    assert (options.priority, options.cache_salt) == (-5, "mine")


@pytest.mark.parametrize(
    ("source", "given", "told", "num_warnings"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": False}, {"enable_thinking": False}, 0),
        ("{{ messages }}", {"enable_thinking": False, "thinking": False}, {}, 0),
        ("{{ messages }}", {"enable_thinking": True}, {}, 1),
        ("{{ messages }}", {"enable_thinking": 0}, {"enable_thinking": 0}, 0),
        ("{{ thinking }}", {"enable_thinking": False}, {"thinking": False}, 0),
        ("{{ thinking }}", {"enable_thinking": False, "thinking": True}, {"thinking": True}, 0),
    ],
)
def test_thinking_is_switched_off_where_there_is_a_switch(
    source: str, given: dict[str, Any], told: dict[str, Any], num_warnings: int
) -> None:
    model: Any = SimpleNamespace(chat_template=ChatTemplate(source), answers=None)
    switches, warnings = template_switches(ChatBody(messages=[], chat_template_kwargs=given), model)
    del switches["add_generation_prompt"], switches["continue_final_message"]
    assert (switches, len(warnings)) == (told, num_warnings)


@pytest.mark.parametrize(("on", "why"), [(False, None), (True, "the model does not reason")])
def test_a_model_that_cannot_think_is_not_told_to(server: LiveServer, on: bool, why: str | None) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    plain = server.post("/v1/chat/completions", asked)
    answer = server.post("/v1/chat/completions", {**asked, "chat_template_kwargs": {"enable_thinking": on}})
    assert answer.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    warning = answer.headers.get("x-localllm-warning")
    assert warning == (why and f"field 'chat_template_kwargs.enable_thinking' has no effect: {why}")
