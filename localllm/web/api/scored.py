"""Logprobs of one position as plain values, for the dialects of Ollama and llama.cpp.

Does not know: sampling, streams.
"""

from __future__ import annotations

from typing import Any

from localllm.engine.step import TokenLogprobs
from localllm.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def scored(entry: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the token at a position and then the likeliest ones, each with its text, bytes and logprob."""
    found = []
    for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
        raw = tokenizer.token_bytes(token_id)
        found.append(
            {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": max(float(logprob), FLOOR)}
        )
    return found
