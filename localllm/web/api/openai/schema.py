"""Request bodies: the honoured fields with their types, and the rules of every other field that clients of OpenAI,
vLLM and llama.cpp send. Nothing is ignored silently.

Does not know: how the rules are applied (api/fields.py), the model, prompts, sampling rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from localllm.web.api.fields import FieldRules, Refused, SamplerFields
from localllm.web.api.fields import empty as _empty
from localllm.web.api.fields import one_of as _one_of
from localllm.web.api.hints import hints_of
from localllm.web.api.reading import read

HARMLESS = frozenset({
    "user", "metadata", "safety_identifier", "moderation",                          # bookkeeping of hosted services
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",           # the prefix cache needs no hints
    "session_id",                                                                   # a hint that only saves time
    "id_slot",                                                                      # nothing to choose here
})  # fmt: skip

HINTS = hints_of("openai")

REFUSED: Mapping[str, Refused] = {
    # OpenAI
    "functions": Refused("Functions were renamed to tools in 2023: send tools.", _empty),
    "function_call": Refused("Functions were renamed to tools in 2023: send tool_choice.", _one_of("none", "auto")),
    "audio": Refused("Supported output: text."),
    "modalities": Refused("Supported output: text.", _one_of(["text"])),
    "web_search_options": Refused("This server does not search the web."),
    "best_of": Refused("Use n, which returns every choice.", _one_of(1)),
    # vLLM
    "early_stopping": Refused("A beam search always ends when no beam can beat the finished ones.", _one_of(False)),
    "chat_template": Refused("A request may not bring its own template, which would run the client's code."),
    "media_io_kwargs": Refused("Only pictures are read, always in RGB.", _empty),
    "kv_transfer_params": Refused("KV transfer between servers is not supported.", _empty),
    "vllm_xargs": Refused("Extension arguments are not supported.", _empty),
    "logits_processors": Refused("Requests may not bring code; LLM.generate takes functions.", _empty),
    "repetition_detection": Refused("Use repetition_penalty, frequency_penalty or presence_penalty."),
    "stream_interval": Refused("The tokens of each step are streamed at once.", _one_of(1)),
    "spaces_between_special_tokens": Refused("The tokenizer decides how text is decoded.", _one_of(True)),
    # llama.cpp
}

NOT_IN_CHATS: Mapping[str, Refused] = {
    "suffix": Refused("A chat has no text behind the answer: use POST /v1/completions.", _empty),
    "prompt_embeds": Refused("Embeddings replace a prompt's tokens: use POST /v1/completions."),
}

NOT_IN_COMPLETIONS = {
    name: Refused("Pictures belong to messages: use POST /v1/chat/completions.", _empty)
    for name in ("mm_processor_kwargs", "multi_modal_data")
}

RULES = FieldRules(HARMLESS, HINTS, {**REFUSED, **NOT_IN_COMPLETIONS})
CHAT_RULES = FieldRules(HARMLESS, HINTS, {**REFUSED, **NOT_IN_CHATS})


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None  # adds a chunk with the usage of the whole request
    continuous_usage_stats: bool | None = None  # usage so far in every chunk (vLLM)
    include_obfuscation: bool | None = None  # padding against traffic analysis; a local server sends none


class StructuredBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class GenerateBody(SamplerFields, kw_only=True):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None  # llama.cpp: penalties look at this many last tokens; -1: all, as in vLLM
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None  # vLLM: n is the width
    length_penalty: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    store: bool | None = None  # OpenAI: false also keeps the prompt's KV off the disk
    cache_prompt: bool | None = None  # llama.cpp: false means no reuse of the prefix cache
    request_id: str | None = None
    response_format: dict[str, Any] | None = None  # OpenAI: text, json_object, json_schema; vLLM: structural_tag
    structured_outputs: StructuredBody | None = None
    guided_json: str | dict[str, Any] | None = None  # vLLM's names until 0.12
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    grammar: str | None = None  # llama.cpp: GBNF
    json_schema: dict[str, Any] | None = None  # llama.cpp
    speculative: bool | None = None  # false: no tokens guessed ahead
    speculative_n_max: int | None = msgspec.field(name="speculative.n_max", default=None)  # llama.cpp: at most so many
    timings_per_token: bool | None = None  # llama.cpp: timings in every chunk
    return_progress: bool | None = None  # llama.cpp: prompt_progress while a prompt is read
    thinking_token_budget: int | None = None  # vLLM: tokens of reasoning; 0: none, -1: no limit
    reasoning_budget: int | None = None  # llama.cpp's name of it, and its two earlier names
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the answer may repeat."""

    type: str
    content: str | list[dict[str, Any]]


class OpenAIReasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None


class ChatBody(GenerateBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: str | None = None  # llama.cpp: none leaves reasoning in the content
    include_reasoning: bool | None = None  # vLLM: false leaves reasoning out of the answer
    reasoning_effort: str | None = None  # passed to the template, which may have such a switch
    reasoning: OpenAIReasoning | None = None  # Ollama's spelling of reasoning_effort
    mm_processor_kwargs: dict[str, Any] | None = None  # vLLM: how pictures are read


class CompletionBody(GenerateBody, kw_only=True):
    prompt: Any = None  # str, [str], [int] or [[int]]; prompts.py tells them apart
    prompt_embeds: str | list[str] | None = None  # vLLM: a tensor as written by torch.save, in base64
    suffix: str | None = None  # the text behind the gap that the answer fills
    decoder_prompt: str | list[int] | None = None  # vLLM: how an encoder-decoder's answer begins
    src_lang: str | None = None  # transformers: the language of the prompt, and of the answer
    tgt_lang: str | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """vLLM's body (`prompt` or `messages`) or llama.cpp's (`content`)."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """Return the parsed body and its warnings. Raises the `RequestError` that names the wrong field."""
    return await read(raw, kind, CHAT_RULES if issubclass(kind, ChatBody) else RULES)
