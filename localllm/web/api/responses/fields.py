"""Rules for every request field that clients of OpenAI's responses API send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from localllm.web.api.fields import FieldRules, ListOf, Refused, one_of

NOTHING_HERE = ListOf(frozenset({
    "reasoning.encrypted_content",  # reasoning is always readable, and is returned by the client in the same form
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
}))  # fmt: skip
"""Values of `include` for data that does not exist here, so they have no effect."""

RULES = FieldRules(
    harmless=frozenset({
        "service_tier", "moderation", "access_programs",  # fields of a hosted service
        "prompt_cache_options", "prompt_cache_retention",  # the prefix cache needs no hints
        "stream_options",  # padding against traffic analysis; a local server sends none
        "image",  # images are not supported
    }),
    late={"context_management": "conversations are not edited"},
    refused={
        "background": Refused("Background answers are not supported.", one_of(False)),
        "background_options": Refused("Background answers are not supported."),
        "conversation": Refused("Conversations are not supported: send previous_response_id, or every item."),
        "include": Refused("Use /v1/chat/completions for log-probabilities; nothing else is supported.", NOTHING_HERE),
        "personality": Refused("Models have no such control."),
        "prompt": Refused("Stored prompts are not supported: send instructions and input."),
        "top_logprobs": Refused("Use /v1/chat/completions for log-probabilities.", one_of(0)),
    },
)  # fmt: skip

TEXT_RULES = FieldRules(refused={"verbosity": Refused("Models have no such control.", one_of("medium"))})
"""Of `text`."""

REASONING_RULES = FieldRules(
    late={
        "summary": "reasoning is returned in full, as the item's content",
        "generate_summary": "reasoning is returned in full, as the item's content",
        "context": "the chat template decides which earlier reasoning the model sees",
    },
    refused={"mode": Refused("Models have no such control.", one_of("standard"))},
)
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
