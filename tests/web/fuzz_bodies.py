"""Real bodies of every operation that reads one, and a strategy that turns one part of them into something else.

Does not know: servers, answers.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
]
USER = [{"role": "user", "content": "Hi"}]
SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 1, "stop": ["x", "yz"], "n": 2,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": -3},
    "bad_words": ["a"], "min_tokens": 1, "max_tokens": 5,
}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHAT = [
    {"messages": USER, **SAMPLING},
    {"messages": USER, **STREAM, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "return_token_ids": True},
    {"messages": CONVERSATION, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 5, "stream": True},
    {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"messages": USER, "structured_outputs": {"regex": "[ab]{1,4}"}, "prompt_logprobs": 1, "max_tokens": 4},
    {"messages": [*USER, {"role": "assistant", "content": "Well"}], "continue_final_message": True, "echo": True,
     "max_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "a", "logprobs": True},
]  # fmt: skip
COMPLETIONS = [
    {"prompt": "Hello", **SAMPLING},
    {"prompt": ["Hello", "you"], **STREAM, "logprobs": 2, "echo": True, "max_tokens": 4},
    {"prompt": [5, 6, 7], "prompt_logprobs": 1, "logprobs": 1, "max_tokens": 4, "return_token_ids": True},
    {"prompt": [[5], [6, 7]], "guided_choice": ["yes", "no"], "stop_token_ids": [9], "ignore_eos": True},
    {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1, "truncate_prompt_tokens": 3},
    {"prompt": "a", "grammar": 'root ::= "a" | "b"', "allowed_token_ids": [5, 6], "return_tokens_as_token_ids": True},
]
TOKENIZE: list[Any] = [
    {"prompt": "Hello", "return_token_strs": True}, {"content": "Hello", "add_special": True},
    {"messages": CONVERSATION},
]  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Rain."}]},
    {"role": "user", "content": "And?"},
]
RESPONSES = [
    {"input": "Hi", "max_output_tokens": 4, "temperature": 0.5, "instructions": "Be short.", "stop": ["x"]},
    {"input": ITEMS, "tools": [{"type": "function", **FUNCTION}], "stream": True, "max_output_tokens": 6},
    {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "stream": True},
    {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "metadata": {"a": "b"}},
    {"input": "Hi", "reasoning": {"effort": "none"}, "previous_response_id": None, "max_output_tokens": 4},
]
ANTHROPIC_TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain."}]},
        {"type": "text", "text": "And?"},
    ]},
]  # fmt: skip
MESSAGES = [
    {"messages": USER, "max_tokens": 5, "system": "Be short.", "stop_sequences": ["x"], "temperature": 0.5},
    {"messages": BLOCKS, "max_tokens": 5, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}, "stream": True},
    {"messages": USER, "max_tokens": 40, "tools": [ANTHROPIC_TOOL],
     "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, "stream": True},
    {"messages": USER, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {"messages": USER, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
]  # fmt: skip
OPTIONS = {
    "num_predict": 5, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x"],
    "repeat_penalty": 1.1, "num_ctx": 128, "num_gpu": 1,
}  # fmt: skip
OLLAMA_CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
OLLAMA_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [OLLAMA_CALL]},
    {"role": "tool", "tool_name": "weather", "content": "Rain."},
]
MODEL = {"model": "tiny"}
NOWHERE = [{"model": "nobody/none"}, {"model": "/nowhere"}, {"model": "nobody"}]
BODIES: Mapping[tuple[str, str], Sequence[dict[str, Any]]] = {
    ("openai", "chat/completions"): CHAT,
    ("openai", "completions"): COMPLETIONS,
    ("openai", "input_tokens"): CHAT,
    ("openai", "apply-template"): CHAT,
    ("openai", "tokenize"): TOKENIZE,
    ("openai", "detokenize"): [{"tokens": [5, 6, 7]}],
    ("openai", "embeddings"): [
        {"input": "Hello", "dimensions": 4}, {"input": [[5, 6], [7]], "encoding_format": "base64"},
        {"input": ["a", "b"], "truncate_prompt_tokens": 8},
    ],
    ("openai", "rerank"): [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}],
    ("openai", "score"): [{"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 8}],
    ("openai", "pooling"): [
        {"input": ["Hello", "a"], "encoding_format": "base64"}, {"input": [[5, 6], [7]], "truncate_prompt_tokens": 8},
        {"messages": [{"role": "user", "content": "Hi"}], "use_activation": False},
    ],
    ("openai", "classify"): [{"input": ["Hello", "a"], "use_activation": False}, {"input": [5, 6]}],
    ("openai", "load_lora_adapter"): [{"lora_name": "a", "lora_path": "/nowhere", "model": "tiny"}],
    ("openai", "unload_lora_adapter"): [{"lora_name": "a"}],
    ("responses", "responses"): RESPONSES,
    ("responses", "input_tokens"): RESPONSES,
    ("anthropic", "messages"): MESSAGES,
    ("anthropic", "count_tokens"): MESSAGES,
    ("ollama", "chat"): [
        {"messages": OLLAMA_MESSAGES, "tools": [TOOL], "options": OPTIONS},
        {"messages": USER, "format": SCHEMA, "stream": False, "options": {"num_predict": 9}},
        {"messages": USER, "think": False, "keep_alive": "5m", "options": {"num_predict": 3}}, {"messages": []},
    ],
    ("ollama", "generate"): [
        {"prompt": "Hi", "options": OPTIONS}, {"prompt": "Hi", "raw": True, "stream": False, "options": OPTIONS},
        {"prompt": "Hi", "system": "Be short.", "format": "json", "options": {"num_predict": 9}}, {"prompt": ""},
    ],
    ("ollama", "embed"): [{"input": ["a", "b"], "truncate": True, "dimensions": 4}],
    ("ollama", "embeddings"): [{"prompt": "a", "options": {"num_ctx": 16}}],
    ("ollama", "show"): [MODEL, {"name": "tiny:latest", "verbose": True}, *NOWHERE],
    ("ollama", "pull"): [*NOWHERE, {"model": "nobody/none:Q4_K_M", "stream": False, "insecure": False}],
    ("ollama", "delete"): NOWHERE,
    ("ollama", "copy"): [{"source": "demo", "destination": "helper"}, {"source": "nobody", "destination": "a/b:c"}],
    ("localllm", "batches"): [
        {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ],
    ("localllm", "completion"): [{"prompt": "a", "n_predict": 2, "dry_multiplier": 0.5, "mirostat": 1}],
    ("openai", "infill"): [{"input_prefix": "a", "input_suffix": "b", "n_predict": 2}],
    ("localllm", "load"): [{**MODEL, "pin": True, "keep_alive": -1, "wait": False}, *NOWHERE],
    ("localllm", "unload"): NOWHERE,
    ("localllm", "sleep"): NOWHERE,
    ("localllm", "wake"): [MODEL, *NOWHERE],
    ("localllm", "pin"): [{**MODEL, "pinned": False}, *NOWHERE],
    ("localllm", "tokens"): [{"width": 1920, "height": 1080, "detail": "low"}, {**MODEL, "width": 1, "height": 9**9}],
    ("localllm", "downloads"): [{"model": "nobody/none", "revision": "main", "include": ["*.json"]}],
}  # fmt: skip

_TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\x00", "/", "..", "a" * 300, "${x}", "{{ x }}", "😀", "\ufffe"]
)
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0, -1, 2**31, 2**53, 2**63, -(2**63), 2**64, 1e308, 1e-308, 10**40]
)  # fmt: skip
_LEAVES = st.none() | st.booleans() | _NUMBERS | _TEXTS
ANYTHING = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4), max_leaves=8
)


def crossed(body: Mapping[str, Any], other: Mapping[str, Any], random: Random) -> dict[str, Any]:
    """The body with some fields of another: what most clients could send."""
    return {**body, **{name: value for name, value in other.items() if random.random() < 0.4}}


def mutated(body: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The body with one to three of its parts replaced, taken out, or doubled."""
    places = st.sampled_from(list(places_of(body)))
    changes = st.tuples(places, st.sampled_from(["replace", "replace", "remove", "double", "add"]), _TEXTS, ANYTHING)
    return st.lists(changes, min_size=1, max_size=3).map(lambda made: with_changes(body, made))


def places_of(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield (*way, name)
        yield from places_of(child, (*way, name))


def with_changes(body: dict[str, Any], changes: Sequence[tuple[tuple[Any, ...], str, str, Any]]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for way, how, name, value in changes:
        node: Any = body
        try:
            for step in way[:-1]:
                node = node[step]
            match how:
                case "replace":
                    node[way[-1]] = copy.deepcopy(value)  # values are shared: one put into itself would have no end
                case "remove":
                    del node[way[-1]]
                case "double" if isinstance(node, list):
                    node.append(copy.deepcopy(node[way[-1]]))
                case "add" if isinstance(node[way[-1]], dict):
                    node[way[-1]][name] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            pass  # an earlier change took it away
    return body
