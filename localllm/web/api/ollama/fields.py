"""Rules for every request field and option that Ollama's clients send.

Does not know: how the rules are applied (api/fields.py), values of honoured fields, HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.web.api.fields import FieldRules, Refused, empty, one_of

_NO_CUT = "input longer than the context is refused, never truncated"
_AT_LOAD = "set when the model is loaded"

RULES = FieldRules(
    late={"truncate": _NO_CUT, "shift": _NO_CUT},
    refused={
        "images": Refused("Supported: text.", empty),
        "logprobs": Refused("Use /v1/chat/completions for log-probabilities.", one_of(False)),
        "top_logprobs": Refused("Use /v1/chat/completions for log-probabilities.", one_of(0)),
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
GENERATE_RULES = replace(RULES, refused={**RULES.refused, "tools": Refused("Use /api/chat to call tools.", empty)})
"""Of generate."""

OPTION_RULES = FieldRules(
    late={
        "num_gpu": _AT_LOAD, "main_gpu": _AT_LOAD, "num_thread": _AT_LOAD, "num_batch": _AT_LOAD, "numa": _AT_LOAD,
        "use_mmap": _AT_LOAD, "use_mlock": _AT_LOAD, "low_vram": _AT_LOAD, "f16_kv": _AT_LOAD, "vocab_only": _AT_LOAD,
        "logits_all": _AT_LOAD, "embedding_only": _AT_LOAD, "num_keep": _NO_CUT,
    },
    refused={
        "tfs_z": Refused("Tail-free sampling is not supported.", one_of(1, 1.0)),
    },
)  # fmt: skip
"""Rules of `options`."""

NO_RULES = FieldRules()
"""Rules of the calls about models and vectors, which have few fields and honour them all."""
