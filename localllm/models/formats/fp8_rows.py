"""Rows of FP8 matrices: stacked, and chosen from matrices in which each 128 x 128 weights share a scale.

Rows that start inside a block become a matrix of their own up to the next block, since a scale covers a block from its
first row on.
Does not know: checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.linear import StackedWeight
from localllm.kernels.quantized_weight import SCALE_BLOCK
from localllm.models.formats.linear_format import StoredPart

MOST_RUNS = 8
"""Ranges of rows that an order may consist of. Each becomes one or two products of its own."""


def stacked_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight | StackedWeight:
    """Stack all rows into one matrix, or several if scale blocks would cross from one weight into the next."""
    if not weights[0].in_blocks:
        return _joined(weights)
    groups = joinable([weight.shape[0] for weight in weights])
    ends = [*accumulate(len(group) for group in groups)]
    each = [_joined(weights[end - len(group) : end]) for group, end in zip(groups, ends, strict=True)]
    return each[0] if len(each) == 1 else StackedWeight(each)


def _joined(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    first = weights[0]
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(first.values.dtype)
    static = [weight.activation_scale for weight in weights if weight.activation_scale is not None]
    return Fp8Weight(
        values,
        torch.cat([weight.scales for weight in weights]),
        first.activations,
        # One layer has one input; if its parts were calibrated separately, the widest range holds for all.
        torch.stack(static).amax(dim=0) if static else None,
    )


def joinable(heights: Sequence[int]) -> list[list[int]]:
    """Group the heights of adjacent matrices so that no scale block crosses from one into the next of its group."""
    groups: list[list[int]] = []
    for height in heights:
        if groups and groups[-1][-1] % SCALE_BLOCK == 0:
            groups[-1].append(height)
        else:
            groups.append([height])
    return groups


def take_block_rows(weight: Fp8Weight, order: Tensor, stem: str) -> Fp8Weight | StackedWeight:
    """Choose rows of a matrix with block scales: row i of the result is row order[i].

    Raises `UnsupportedModel` if they are not a few ranges.
    """
    return stacked_fp8([_rows(weight, piece) for piece in _pieces(order, stem)])


def _rows(weight: Fp8Weight, rows: range) -> Fp8Weight:
    """Return a copy of rows that start with a block or lie in one."""
    blocks = slice(rows.start // SCALE_BLOCK, -(-rows.stop // SCALE_BLOCK))
    return replace(weight, values=weight.values[rows.start : rows.stop].clone(), scales=weight.scales[blocks].clone())


def piece_heights(part: StoredPart, rows: int) -> list[int]:
    """Return the rows of each matrix that `take_block_rows` makes of a part before it joins them."""
    return [rows] if part.order is None else [len(piece) for piece in _pieces(part.order, part.stem)]


def _pieces(order: Tensor, stem: str) -> list[range]:
    """Return the ranges that make up `order`, each of which starts with a block or lies in one; at least one."""
    order = order.cpu()
    edges = [0, *((order.diff() != 1).nonzero().flatten() + 1).tolist(), len(order)]
    if len(edges) > MOST_RUNS + 1:
        raise UnsupportedModel(
            f"The rows of {stem} would have to be reordered.",
            f"They cannot be, because blocks of {SCALE_BLOCK} rows share a scale.",
            "Use another quantisation of the same model.",
        )
    runs = [range(int(order[a]), int(order[b - 1]) + 1) for a, b in pairwise(edges) if b > a]
    return [piece for run in runs for piece in _split_at_block(run) if piece] or [range(0)]


def _split_at_block(rows: range) -> tuple[range, range]:
    """Return the rows before the first block that starts in them, and the others."""
    first = min(rows.stop, -(-rows.start // SCALE_BLOCK) * SCALE_BLOCK)
    return range(rows.start, first), range(first, rows.stop)
