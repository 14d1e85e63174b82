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
        "max_tool_calls",  # of tools that the server runs; this one runs none
        "stream_options",  # padding against traffic analysis; a local server sends none
        "image",  # images are not supported
    }),
    late={"context_management": "nothing is taken out of a conversation"},
    refused={
        "background": Refused("An answer is made while its client waits, or streams.", one_of(False)),
        "background_options": Refused("An answer is made while its client waits, or streams."),
        "conversation": Refused("There are no conversations here: send previous_response_id, or every item."),
        "include": Refused("Log-probabilities come with /v1/chat/completions; the rest is unknown.", NOTHING_HERE),
        "personality": Refused("The model has no such control."),
        "prompt": Refused("This server keeps no prompts: send instructions and input."),
        "top_logprobs": Refused("Log-probabilities come with /v1/chat/completions.", one_of(0)),
    },
)  # fmt: skip

TEXT_RULES = FieldRules(refused={"verbosity": Refused("The model has no such control.", one_of("medium"))})
"""Rules of `text`."""

REASONING_RULES = FieldRules(
    late={
        "summary": "reasoning comes whole, as the item's content",
        "generate_summary": "reasoning comes whole, as the item's content",
        "context": "the chat template decides which reasoning the model sees again",
    },
    refused={"mode": Refused("The model has no such control.", one_of("standard"))},
)
"""Rules of `reasoning`."""

_FINISHED = "What is kept has ended: it comes in one piece."
QUERY_RULES = FieldRules(
    harmless=frozenset({"include_obfuscation"}),
    refused={
        "stream": Refused(_FINISHED, one_of("false")),
        "starting_after": Refused(_FINISHED),
        "include": Refused("What is kept comes as it was said."),
        "include[]": Refused("What is kept comes as it was said."),
    },
)
"""Rules of the query of GET."""
