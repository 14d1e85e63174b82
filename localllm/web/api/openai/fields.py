"""Rules for every request field that clients of OpenAI, vLLM and llama.cpp send: one table, nothing is ignored
silently.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.web.api.fields import FieldRules, Refused
from localllm.web.api.fields import empty as _empty
from localllm.web.api.fields import one_of as _one_of
from localllm.web.api.hints import hints_of

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
    "mm_processor_kwargs": Refused("Images and audio are not supported.", _empty),
    "media_io_kwargs": Refused("Images and audio are not supported.", _empty),
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

RULES = FieldRules(HARMLESS, HINTS, REFUSED)
CHAT_RULES = FieldRules(HARMLESS, HINTS, {**REFUSED, **NOT_IN_CHATS})
