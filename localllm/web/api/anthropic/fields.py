"""Rules for every request field that Anthropic's clients send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from localllm.web.api.fields import FieldRules, Refused, empty, one_of

RULES = FieldRules(
    harmless=frozenset({
        "metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id",  # fields of a hosted service
        "billing_policy", "fallback_credit_token", "diagnostics", "speed",
        "cache_control",  # the prefix cache needs no hints
    }),
    late={"context_management": "nothing is taken out of a conversation"},
    refused={
        "container": Refused("This server runs no code."),
        "mcp_servers": Refused("This server calls no other.", empty),
        "fallbacks": Refused("The model that is named answers, or none.", empty),
        "compaction": Refused("This server does not shorten conversations.", empty),
        "thread": Refused("This server stores no conversations."),
    },
)  # fmt: skip

OUTPUT_RULES = FieldRules(
    refused={
        "task_budget": Refused("The model is not told how much it may spend: send max_tokens."),
    }
)
"""Rules of `output_config`."""

THINKING_RULES = FieldRules(
    late={
        "display": "reasoning is shown as the model writes it",
    }
)
"""Rules of `thinking`."""

TOOL_RULES = FieldRules(
    harmless=frozenset({"cache_control", "eager_input_streaming"}),  # arguments are streamed as they are written
    late={
        "strict": "tool_choice any or tool makes arguments fit their schema",
        "defer_loading": "every tool is told of at once",
        "input_examples": "chat templates show none",
    },
    refused={
        "type": Refused("This server has no tools of its own: only the client's can be called.", one_of("custom")),
        "allowed_callers": Refused("This server runs no code.", one_of(["direct"])),
    },
)
"""Rules of each item of `tools`."""

CHOICE_RULES = FieldRules()
"""Rules of `tool_choice`."""
