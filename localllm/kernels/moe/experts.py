"""A mixture's feed-forward part: the weighted sum of down(act(gate(x)) * up(x)) over each token's chosen experts.

On a GPU this takes four launches (align, two grouped products, combine), three for a single token, whose experts are
distinct. On a CPU the experts that have tokens run one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.launch import runs_triton
from localllm.kernels.moe.align import Alignment, align, align_single, combine
from localllm.kernels.moe.grouped_gemm import act_reference, block_rows, grouped_gemm, scaled_block_rows
from localllm.kernels.moe.planar_gemm import planar_block_rows, planar_gemm
from localllm.kernels.moe.weights import ExpertWeights, PlanarExperts, ScaledExperts, expert_linear


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """x [T, H]; ids and weights [T, top_k] from `route`; gate_up [E, 2 * I, H], gate first, and down [E, H, I].

    Returns [T, H] in x's dtype; an id of -1 adds nothing. Biases: [E, 2 * I] and [E, H]. padding: inputs of `down`
    before and after the I of gate_up; they are zeros.
    """
    if not runs_triton(x, "experts"):
        return experts_reference(
            x,
            ids,
            weights,
            gate_up,
            down,
            activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            padding=padding,
        )
    block_m = _block_rows(x, ids, gate_up, down, len(gate_up))
    blocks = align_single(ids, block_m) if len(x) == 1 else align(ids, len(gate_up), block_m)
    hidden = _padded(_product(x, gate_up, blocks, weights, activation, gate_up_bias), padding)
    return combine(_product(hidden, down, blocks, weights, None, down_bias), ids)


class ArrivingExperts:
    """The sum of `experts` while the experts arrive some at a time. Its bits do not depend on how many those are: each
    product is the same, and a token's are added up at the end, or in the order of the experts on a CPU."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, activation: str) -> None:
        """x, ids, weights: as of `experts`. num_experts: of the layer."""
        self._x, self._ids, self._weights, self._activation = x, ids, weights, activation
        self._num_experts = num_experts
        self._out: Tensor | None = None  # of each choice [T * top_k, H] in x's type; in plain torch of each token, fp32

    def add(
        self, first: int, gate_up: ExpertWeights, down: ExpertWeights, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Multiply with the experts from `first` on."""
        x, ids, weights, count = self._x, self._ids, self._weights, len(gate_up)
        own = torch.where((ids >= first) & (ids < first + count), ids - first, -1)
        if not runs_triton(x, "experts"):
            if self._out is None:
                self._out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            act = partial(act_reference, activation=self._activation)
            _add_experts(self._out, x, own, weights, gate_up, down, act, gate_up_bias, down_bias)
            return
        blocks = align(own, count, _block_rows(x, ids, gate_up, down, self._num_experts))
        hidden = _product(x, gate_up, blocks, weights, self._activation, gate_up_bias)
        if self._out is None:
            self._out = torch.empty((ids.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
        _product(hidden, down, blocks, weights, None, down_bias, self._out)

    def sum(self) -> Tensor:
        """Return [T, H] in x's type, once all experts have been added."""
        assert self._out is not None, "a layer without experts"
        return combine(self._out, self._ids) if runs_triton(self._x, "experts") else self._out.to(self._x.dtype)


def experts_by_code(
    x: Tensor, ids: Tensor, weights: Tensor, first: ExpertWeights, down: ExpertWeights,
    act: Callable[[Tensor], Tensor], *, first_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what `experts` returns with an activation that is any code. act maps rows of first's outputs [n, N] to
    inputs of down [n, I]. ids [T, top_k] of any integer type, none of them -1. On a GPU nothing is fused: the rows of
    both products are copied into the order of the experts.
    """
    weights = weights.float().contiguous()
    if not runs_triton(x, "experts"):
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        _add_experts(out, x, ids, weights, first, down, act, first_bias, down_bias)
        return out.to(x.dtype)
    ids = ids.to(torch.int32)
    blocks = align(ids, len(first), _block_rows(x, ids, first, down, len(first)))
    assert blocks.rows is not None, "`align` returns rows"
    pairs = blocks.rows.long().clamp_min(0)  # a row of padding is any row: its product is not written
    outputs = _product(x[pairs // ids.shape[1]], first, blocks, torch.ones_like(weights), None, first_bias)
    return combine(_product(act(outputs)[pairs], down, blocks, weights, None, down_bias), ids)


def _block_rows(x: Tensor, ids: Tensor, gate_up: ExpertWeights, down: ExpertWeights, num_experts: int) -> int:
    """Return the rows of a block that both products support."""
    limits = [planar_block_rows(weight) for weight in (gate_up, down) if isinstance(weight, PlanarExperts)]
    limits += [scaled_block_rows(weight) for weight in (gate_up, down) if isinstance(weight, ScaledExperts)]
    return min([block_rows(ids.numel(), num_experts, x), *limits])


def _product(
    x: Tensor,
    weight: ExpertWeights,
    blocks: Alignment,
    weights: Tensor,
    activation: str | None,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    if isinstance(weight, PlanarExperts):
        return planar_gemm(x, weight, blocks, weights, activation, bias=bias, out=out)
    assert isinstance(weight, Tensor | ScaledExperts), "a kernel takes all experts at once"
    return grouped_gemm(x, weight, blocks, weights, activation, bias=bias, out=out)


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """The definition, expert by expert.
    A token's outputs are added in the order of expert ids, independent of other tokens."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    act = partial(act_reference, activation=activation)
    _add_experts(out, x, ids, weights, gate_up, down, act, gate_up_bias, down_bias, padding)
    return out.to(x.dtype)


def _add_experts(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeights, down: ExpertWeights,
    act: Callable[[Tensor], Tensor], gate_up_bias: Tensor | None, down_bias: Tensor | None,
    padding: tuple[int, int] = (0, 0),
) -> None:  # fmt: skip
    """Add the experts' outputs to out [T, H] fp32, expert by expert."""
    flat, flat_weights = ids.flatten(), weights.flatten()
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat + 1, minlength=len(gate_up) + 1).tolist()
    for expert, rows in enumerate(order.split(counts), start=-1):
        if expert < 0 or len(rows) == 0:
            continue
        tokens = rows // ids.shape[1]
        y = expert_linear(x[tokens], gate_up, expert, gate_up_bias)
        y = expert_linear(_padded(act(y), padding), down, expert, down_bias)
        out.index_add_(0, tokens, y * flat_weights[rows, None])


def _padded(hidden: Tensor, padding: tuple[int, int]) -> Tensor:
    return F.pad(hidden, padding) if any(padding) else hidden
