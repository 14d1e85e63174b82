"""Rules for every request field that clients of OpenAI, vLLM and llama.cpp send: one table, nothing is ignored
silently.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.web.api.fields import FieldRules, Refused
from localllm.web.api.fields import empty as _empty
from localllm.web.api.fields import one_of as _one_of

HARMLESS = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "moderation",          # bookkeeping of hosted services
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",           # the prefix cache needs no hints
    "prediction", "session_id",                                                     # hints that only save time
    "id_slot",                                                                      # nothing to choose here
})  # fmt: skip

LATE: Mapping[str, str] = {
    "keep_alive": "the server's --keep-alive decides",
    "ttl": "the server's --keep-alive decides",
    "guided_decoding_backend": "llguidance compiles every grammar",
}

REFUSED: Mapping[str, Refused] = {
    # OpenAI
    "functions": Refused("Functions have been called tools since 2023: send tools.", _empty),
    "function_call": Refused("Functions have been called tools since 2023: send tool_choice.", _one_of("none", "auto")),
    "audio": Refused("Only text comes out of this server."),
    "modalities": Refused("Only text comes out of this server.", _one_of(["text"])),
    "web_search_options": Refused("This server searches nothing."),
    "store": Refused("This server stores no completions.", _one_of(False)),
    "verbosity": Refused("The model has no such control.", _one_of("medium")),
    "suffix": Refused("Filling in the middle is not part of this version.", _empty),
    "best_of": Refused("Use n, which returns every choice.", _one_of(1)),
    # vLLM
    "early_stopping": Refused("A beam search ends when no beam can become better than those it has.", _one_of(False)),
    "chat_template": Refused("A request may not bring its own template; it would run code of the client's choice."),
    "mm_processor_kwargs": Refused("Images and audio are not part of this version.", _empty),
    "media_io_kwargs": Refused("Images and audio are not part of this version.", _empty),
    "kv_transfer_params": Refused("KV transfer between servers is not part of this version.", _empty),
    "vllm_xargs": Refused("There are no extension arguments here.", _empty),
    "logits_processors": Refused("Requests may not bring code.", _empty),
    "repetition_detection": Refused("Use repetition_penalty, frequency_penalty or presence_penalty."),
    "stream_interval": Refused("Every step is streamed at once.", _one_of(1)),
    "spaces_between_special_tokens": Refused("Text is decoded as the tokenizer says.", _one_of(True)),
    # llama.cpp
}

NOT_IN_CHATS: Mapping[str, Refused] = {
    "prompt_embeds": Refused("Embeddings stand in place of a prompt's tokens: POST /v1/completions."),
}

RULES = FieldRules(HARMLESS, LATE, REFUSED)
CHAT_RULES = FieldRules(HARMLESS, LATE, {**REFUSED, **NOT_IN_CHATS})
