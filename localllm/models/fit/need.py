"""The memory that one conversation needs at a length: the weights, the largest step, and K and V of that many tokens.

A memory plan is larger. On a GPU its KV cache takes the rest of the budget, on a CPU it holds several requests, so it
says little about what a model needs at least.
Does not know: torch, how a plan is made (plan.py), how a need is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from localllm.config.settings import EngineConfig
from localllm.errors import LocalLLMError
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.request_cost import request_cost
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_bytes, format_count

USUAL_TOKENS = 4096  # about six pages of text


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one conversation of `tokens` tokens takes, with everything that the model needs besides."""

    tokens: int
    total_bytes: int


def needs(
    plan: Callable[[EngineConfig], MemoryPlan], config: EngineConfig, spec: ModelSpec, longest: int
) -> tuple[Need, ...]:
    """Return the need at a usual length and at the longest, or only the latter if that is no longer; empty if not even
    these fit. plan: makes the plan of a configuration. longest: tokens of context that fit.
    """
    lengths = sorted({min(USUAL_TOKENS, longest), longest})
    try:
        return tuple(_need(plan, config, spec, length) for length in lengths)
    except LocalLLMError:
        return ()


def _need(plan: Callable[[EngineConfig], MemoryPlan], config: EngineConfig, spec: ModelSpec, length: int) -> Need:
    made = plan(replace(config, max_model_len=length, max_num_seqs=1, kv_cache_memory_bytes=None))
    besides = made.activation_bytes + made.graph_bytes + made.comm_bytes
    request = request_cost(spec, made.dtype, made.kv_dtype).of(length, made.block_size)
    return Need(length, made.weights_bytes + besides + request)


def needs_in_words(found: tuple[Need, ...]) -> str:
    """Return the needs as a line: `1.1 GiB at 4,096 tokens (10.7 GiB at its longest, 40,960)`."""
    if not found:
        return ""
    first, last = found[0], found[-1]
    words = f"{format_bytes(first.total_bytes)} at {format_count(first.tokens)} tokens"
    if len(found) == 1:
        return words
    return f"{words} ({format_bytes(last.total_bytes)} at its longest, {format_count(last.tokens)})"
