"""A mixture's feed-forward part: the weighted sum of down(act(gate(x)) * up(x)) over each token's chosen experts.

On a GPU this takes four launches (align, two grouped products, combine), three for a single token, whose experts are
distinct. On a CPU the experts that have tokens run one after another.
"""

from __future__ import annotations

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
    limits = [planar_block_rows(weight) for weight in (gate_up, down) if isinstance(weight, PlanarExperts)]
    limits += [scaled_block_rows(weight) for weight in (gate_up, down) if isinstance(weight, ScaledExperts)]
    block_m = min([block_rows(ids.numel(), len(gate_up), x), *limits])
    blocks = align_single(ids, block_m) if len(x) == 1 else align(ids, len(gate_up), block_m)
    hidden = _padded(_product(x, gate_up, blocks, weights, activation, gate_up_bias), padding)
    return combine(_product(hidden, down, blocks, weights, None, down_bias), ids)


def _product(
    x: Tensor,
    weight: ExpertWeights,
    blocks: Alignment,
    weights: Tensor,
    activation: str | None,
    bias: Tensor | None,
) -> Tensor:
    if isinstance(weight, PlanarExperts):
        return planar_gemm(x, weight, blocks, weights, activation, bias=bias)
    assert isinstance(weight, Tensor | ScaledExperts), "a kernel takes all experts at once"
    return grouped_gemm(x, weight, blocks, weights, activation, bias=bias)


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
    flat, flat_weights = ids.flatten(), weights.flatten()
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat + 1, minlength=len(gate_up) + 1).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, rows in enumerate(order.split(counts), start=-1):
        if expert < 0 or len(rows) == 0:
            continue
        tokens = rows // ids.shape[1]
        y = expert_linear(x[tokens], gate_up, expert, gate_up_bias)
        y = expert_linear(_padded(act_reference(y, activation), padding), down, expert, down_bias)
        out.index_add_(0, tokens, y * flat_weights[rows, None])
    return out.to(x.dtype)


def _padded(hidden: Tensor, padding: tuple[int, int]) -> Tensor:
    return F.pad(hidden, padding) if any(padding) else hidden
