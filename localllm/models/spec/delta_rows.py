"""Positions of the rows of a gated delta net in Qwen3-Next: two matrices whose rows are grouped by key head.

Does not know: checkpoints, other families.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from localllm.models.spec.family import FusedRecurrent
from localllm.models.spec.recurrent import RecurrentSpec


def _rows_of_inputs(sizes: RecurrentSpec) -> list[int]:
    """Return the stored positions of q, k, v and z: a key head's own rows, then those of its value heads."""
    values = sizes.inner_size // sizes.num_groups
    return _ungrouped(sizes.num_groups, (sizes.state_size, sizes.state_size, values, values))


def _rows_of_rates(sizes: RecurrentSpec) -> list[int]:
    """Return the stored positions of b and a: per key head, b of its value heads, then a."""
    value_heads = sizes.num_heads // sizes.num_groups
    return _ungrouped(sizes.num_groups, (value_heads, value_heads))


def _ungrouped(groups: int, widths: Sequence[int]) -> list[int]:
    """Return the stored positions of all groups' first parts, then of their second parts, and so on."""
    starts, stride = [0, *accumulate(widths)], sum(widths)
    return [
        group * stride + start + row
        for start, width in zip(starts, widths, strict=False)
        for group in range(groups)
        for row in range(width)
    ]


INPUTS = FusedRecurrent("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), _rows_of_inputs)
RATES = FusedRecurrent("in_proj_ba", ("in_proj_b", "in_proj_a"), _rows_of_rates)
