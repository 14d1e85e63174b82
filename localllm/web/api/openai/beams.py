"""`use_beam_search` as vLLM's clients send it, and the fields that it does not support.

Does not know: how beams are searched for (engine/beam_search.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.engine.beam_search import check_length_penalty
from localllm.errors import UnsupportedParameter
from localllm.web.api.openai.schema import CompletionBody, GenerateBody

NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,), "prompt_logprobs": (), "min_tokens": (0,), "stop": ([],), "stop_token_ids": ([],),
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],),
}  # fmt: skip
"""Fields that a beam search does not support, and their values that have no effect."""


def length_penalty(body: GenerateBody) -> float | None:
    """Return the length penalty of the requested beam search; None: no beam search. Raises `RequestError` if a field
    does not go with a beam search.
    """
    given = body.length_penalty
    penalty = 1.0 if given is None else given
    if not body.use_beam_search:
        if penalty != 1.0:
            raise UnsupportedParameter(
                "length_penalty needs a beam search.", "", "Send use_beam_search: true.", param="length_penalty"
            )
        return None
    check_length_penalty(penalty)
    for name, neutral in NOT_WITH_BEAMS.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise _not_with_beams(name)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise _not_with_beams("echo", "logprobs of an echoed prompt")
    return penalty


def without_effect(body: GenerateBody) -> list[str]:
    """Return a warning for each field that has no effect in a beam search."""
    if not body.use_beam_search or not body.temperature:
        return []
    return ["field 'temperature' has no effect: a beam search does not sample"]


def _not_with_beams(name: str, what: str = "") -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{what or repr(name)} cannot be combined with a beam search.",
        "A beam search finds the likeliest answers, and has them only at the end.",
        f"Leave out {name} or use_beam_search.",
        param=name,
    )
