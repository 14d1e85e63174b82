"""A mixture's feed-forward part: each token through its chosen experts, down(act(gate(x)) * up(x)), weighted and added.

On a GPU four launches (align, two grouped products, combine), three for a single token, whose experts are distinct. On
a CPU one expert after another, those that have tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.launch import runs_triton
from localllm.kernels.linear import linear, pack_weight, packs
from localllm.kernels.moe.align import align, align_single
from localllm.kernels.moe.combine import combine
from localllm.kernels.moe.grouped_gemm import act_reference, block_rows, grouped_gemm

ExpertWeights = Tensor | Sequence[Tensor]
"""[E, N, K], or on a CPU one packed matrix per expert: what `pack_experts` returns."""


def pack_experts(weight: Tensor) -> ExpertWeights:
    """weight [E, N, K] -> what `experts` wants on this device; drop the original."""
    if packs(weight[0].numel(), weight.device, weight.dtype):
        return [pack_weight(matrix) for matrix in weight]
    return weight


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
) -> Tensor:
    """x [T, H]; ids and weights [T, top_k] from `route`; gate_up [E, 2 * I, H], gate first, and down [E, H, I].

    Returns [T, H] in x's dtype; zeros for a row whose ids are -1. Biases: [E, 2 * I] and [E, H].
    """
    if not runs_triton(x):
        return experts_reference(
            x, ids, weights, gate_up, down, activation, gate_up_bias=gate_up_bias, down_bias=down_bias
        )
    assert isinstance(gate_up, Tensor), "a kernel takes one tensor of all experts"
    assert isinstance(down, Tensor), "a kernel takes one tensor of all experts"
    block_m = block_rows(ids.numel(), len(gate_up), x)
    blocks = align_single(ids, block_m) if len(x) == 1 else align(ids, len(gate_up), block_m)
    hidden = grouped_gemm(x, gate_up, blocks, weights, activation, bias=gate_up_bias)
    return combine(grouped_gemm(hidden, down, blocks, weights, bias=down_bias), ids)


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
) -> Tensor:
    """Expert by expert. A token's answers are added in the order of expert ids, so neighbours do not matter."""
    flat, flat_weights = ids.flatten(), weights.flatten()
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat + 1, minlength=len(gate_up) + 1).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, rows in enumerate(order.split(counts), start=-1):
        if expert < 0 or len(rows) == 0:
            continue
        tokens = rows // ids.shape[1]
        y = linear(x[tokens], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        y = linear(act_reference(y, activation), down[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, tokens, y * flat_weights[rows, None])
    return out.to(x.dtype)
