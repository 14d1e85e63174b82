"""The memory of one conversation at a length: the weights, the largest step, K and V of its tokens, one state.

K and V grow with the length, in each KV group; the state does not. A memory plan is larger. On a GPU its KV cache takes
the rest of the budget, on a CPU it holds several requests, so it says little about what a model needs at least.
Does not know: torch, how a plan is made (plan.py), how many requests run at once, how the numbers are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from localllm.config.settings import EngineConfig
from localllm.errors import LocalLLMError
from localllm.models.fit.activation_bytes import group_token_bytes
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec, held_blocks, kv_groups, state_bytes
from localllm.units import format_bytes, format_count


class GroupCost(NamedTuple):
    """The layers of one KV group."""

    num_layers: int
    window: int | None  # which tokens the layers see, as in kernels/kv_format.py; None: all
    token_bytes: int  # of one token position over these layers


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The memory of one request, by KV group and recurrent state."""

    groups: tuple[GroupCost, ...] = ()
    state_layers: int = 0
    state_bytes: int = 0  # of one request over these layers; 0: the model has none

    @property
    def token_bytes(self) -> int:
        """Bytes of one token position over all layers."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def state_tokens(self) -> int:
        """Token positions whose K and V take as many bytes as one state; 0: the model has no state, or no K and V."""
        return self.state_bytes // self.token_bytes if self.token_bytes else 0

    @property
    def is_uniform(self) -> bool:
        """Return whether each token takes the same memory, and a request nothing else."""
        return not self.state_bytes and all(group.window is None for group in self.groups)

    def of(self, num_tokens: int, block_size: int) -> int:
        """Return the bytes of a request of this length while it decodes, in whole blocks."""
        held = [held_blocks(num_tokens, group.window, block_size) * group.token_bytes for group in self.groups]
        return self.state_bytes + block_size * sum(held)


def request_cost(spec: ModelSpec, dtype: str, kv_dtype: str) -> RequestCost:
    """Return the cost where activations have the type `dtype`, and K and V `kv_dtype`."""
    groups = [
        GroupCost(len(group.layers), group.window, group_token_bytes(group, kv_dtype)) for group in kv_groups(spec)
    ]
    return RequestCost(tuple(groups), len(spec.recurrent_layers), state_bytes(spec, dtype))


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
