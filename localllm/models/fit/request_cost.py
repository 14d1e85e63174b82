"""The memory of one request: K and V in each KV group, which grow with its length, and one recurrent state, which does
not.

Does not know: how many requests run at once (memory_plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from localllm.models.fit.step import group_token_bytes
from localllm.models.spec.kv_group import held_blocks
from localllm.models.spec.kv_groups import kv_groups
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.states import state_bytes


class GroupCost(NamedTuple):
    """The layers of one KV group."""

    num_layers: int
    window: int | None  # tokens that the layers see; None: all
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
