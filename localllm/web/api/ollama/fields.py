"""Rules for every request field and option that Ollama's clients send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.web.api.fields import FieldRules, Refused, empty, one_of
from localllm.web.api.hints import hints_of

RULES = FieldRules(
    hints=hints_of("ollama"),
    refused={
        "images": Refused("A picture belongs to a message: send messages[].images.", empty),
        "template": Refused("A request may not bring its own template.", empty),
        "context": Refused("Send the conversation to /api/chat.", empty),
        "width": Refused("Supported output: text.", one_of(0)),
        "height": Refused("Supported output: text.", one_of(0)),
        "steps": Refused("Supported output: text.", one_of(0)),
    },
)
"""Rules of chat and generate."""

CHAT_RULES = replace(RULES, refused={**RULES.refused, "suffix": Refused("Use /api/generate with a suffix.", empty)})
"""Of chat."""
GENERATE_RULES = replace(
    RULES,
    refused={name: rule for name, rule in RULES.refused.items() if name != "images"}
    | {"tools": Refused("Use /api/chat to call tools.", empty)},
)
"""Of generate."""

OPTION_RULES = FieldRules(
    hints=hints_of("ollama", "options."),
    refused={
        "tfs_z": Refused("Tail-free sampling is not supported.", one_of(1, 1.0)),
    },
)  # fmt: skip
"""Rules of `options`."""

NO_RULES = FieldRules()
"""Rules of the calls about models and vectors, which have few fields and honour them all."""
