"""What becomes of every request field that Anthropic's clients send.

Does not know: what the rules mean (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localllm.web.api.fields import FieldRules, Refused, empty

_TOOLS = "Tool calling is not part of this version."


def _of_type(*types: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and value.get("type") in types


RULES = FieldRules(
    harmless=frozenset({
        "metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id",  # of a hosted service
        "billing_policy", "fallback_credit_token", "diagnostics", "speed",
        "cache_control",  # the prefix cache needs no hints
    }),
    late={"context_management": "nothing is taken out of a conversation"},
    refused={
        "tools": Refused(_TOOLS, empty),
        "tool_choice": Refused(_TOOLS, _of_type("none", "auto")),
        "thinking": Refused("Reasoning is not separated from the answer in this version.", _of_type("disabled")),
        "container": Refused("This server runs no code."),
        "mcp_servers": Refused("This server calls no other.", empty),
        "fallbacks": Refused("The model that is named answers, or none.", empty),
        "compaction": Refused("This server does not shorten conversations.", empty),
        "thread": Refused("This server stores no conversations."),
    },
)  # fmt: skip

OUTPUT_RULES = FieldRules(
    refused={
        "format": Refused("Structured output is not part of this version."),
        "task_budget": Refused("The model is not told how much it may spend: send max_tokens."),
    }
)
"""Of `output_config`."""
