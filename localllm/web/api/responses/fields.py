"""Rules for every request field that clients of OpenAI's responses API send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from localllm.web.api.fields import FieldRules, ListOf, Refused, one_of
from localllm.web.api.hints import hints_of

NOTHING_HERE = ListOf(frozenset({
    "reasoning.encrypted_content",  # reasoning is always readable, and is returned by the client in the same form
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
}))  # fmt: skip
"""Values of `include` for data that does not exist here, so they have no effect."""

RULES = FieldRules(
    harmless=frozenset({
        "moderation", "access_programs",  # fields of a hosted service
        "prompt_cache_options", "prompt_cache_retention",  # the prefix cache needs no hints
        "stream_options",  # padding against traffic analysis; a local server sends none
        "image",  # images are not supported
    }),
    hints=hints_of("responses"),
    refused={
        "background": Refused("Background answers are not supported.", one_of(False)),
        "background_options": Refused("Background answers are not supported."),
        "conversation": Refused("Conversations are not supported: send previous_response_id, or every item."),
        "include": Refused("Use /v1/chat/completions for log-probabilities; nothing else is supported.", NOTHING_HERE),
        "prompt": Refused("Stored prompts are not supported: send instructions and input."),
        "top_logprobs": Refused("Use /v1/chat/completions for log-probabilities.", one_of(0)),
    },
)  # fmt: skip

TEXT_RULES = FieldRules(hints=hints_of("responses", "text."))
"""Of `text`."""

REASONING_RULES = FieldRules(hints=hints_of("responses", "reasoning."))
"""Rules of `reasoning`."""

_FINISHED = "Stored responses are complete, so they are not streamed."
QUERY_RULES = FieldRules(
    harmless=frozenset({"include_obfuscation"}),
    refused={
        "stream": Refused(_FINISHED, one_of("false")),
        "starting_after": Refused(_FINISHED),
        "include": Refused("Stored items are returned unchanged."),
        "include[]": Refused("Stored items are returned unchanged."),
    },
)
"""Rules of the query of GET."""
