"""Rules for every request field that Anthropic's clients send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from localllm.web.api.fields import FieldRules, Refused, empty, one_of
from localllm.web.api.hints import hints_of

RULES = FieldRules(
    harmless=frozenset({
        "metadata", "inference_geo", "user_profile_id", "workspace_id",  # fields of a hosted service
        "billing_policy", "fallback_credit_token", "diagnostics",
        "cache_control",  # the prefix cache needs no hints
    }),
    hints=hints_of("anthropic"),
    refused={
        "container": Refused("This server does not run code."),
        "mcp_servers": Refused("This server does not call other servers.", empty),
        "fallbacks": Refused("There is no fallback: only the named model answers.", empty),
        "compaction": Refused("This server does not shorten conversations.", empty),
        "thread": Refused("This server stores no conversations."),
    },
)  # fmt: skip

OUTPUT_RULES = FieldRules(hints=hints_of("anthropic", "output_config."))
"""Rules of `output_config`."""

THINKING_RULES = FieldRules(hints=hints_of("anthropic", "thinking."))
"""Rules of `thinking`."""

TOOL_RULES = FieldRules(
    harmless=frozenset({"cache_control", "eager_input_streaming"}),  # arguments are streamed as they are written
    hints=hints_of("anthropic", "tools."),
    refused={
        "type": Refused("Only tools of the client are supported, not tools that run on the server.", one_of("custom")),
        "allowed_callers": Refused("This server does not run code.", one_of(["direct"])),
    },
)
"""Rules of each item of `tools`."""

CHOICE_RULES = FieldRules()
"""Rules of `tool_choice`."""
