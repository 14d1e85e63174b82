"""Routing: chooses each token's experts from the router's logits, and their weights.

    softmax over all experts, top-k                      Qwen2-MoE, and DeepSeek-V2 with groups
    the same, the k weights scaled to sum to one         Mixtral, Qwen3-MoE; equal to gpt-oss's softmax over the chosen
    sigmoid, chosen by score + bias out of the best      DeepSeek-V3 (arXiv:2412.19437, equations 15 and 16), GLM
    groups of experts, weights without the bias
    SparseMixer: the best logit, weighed by a softmax    Phi-3.5-MoE (Liu et al. 2023, arXiv:2310.00811)
    over those near it, then the best of the others,
    weighed by a softmax over the others near that one

On ties the lower expert id wins. One program per row: 128 logits are 512 bytes, so the launch is the cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
LEAST_SUM = 1e-20
"""Divisor of weights whose sum is smaller, in DeepSeek-V3's code and most others."""


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    least_sum: float = LEAST_SUM,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    tolerance: float = 0.0,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return expert ids [T, top_k] int32, best first, and weights [T, top_k] fp32. logits [T, E].

    bias [E] fp32 is added for the choice only. With num_groups > 1, E / num_groups consecutive experts form a group,
    and only the top_groups best groups take part: a group counts by its best score, or with a bias by the sum of its
    two best. With renormalize, the weights are divided by their sum, or by least_sum if that is larger. scale
    multiplies the weights. tolerance: with sparsemixer, a logit s is near the best one b if b - s is at most this share
    of the larger of b and |s|; there are no bias, no groups, and no sum then. Rows with slot_mapping [T] < 0 are
    padding: ids -1, weights 0. A row with a NaN gets valid ids, and from softmax NaN weights; other rows are not
    affected.
    """
    assert scoring in SCORINGS, scoring
    num_tokens, num_experts = logits.shape
    assert num_experts % num_groups == 0
    assert 1 <= top_k <= num_experts // num_groups * top_groups, "the chosen groups hold fewer experts than top_k"
    if not runs_triton(logits, "experts"):
        return route_reference(
            logits,
            top_k,
            scoring=scoring,
            renormalize=renormalize,
            least_sum=least_sum,
            bias=bias,
            num_groups=num_groups,
            top_groups=top_groups,
            scale=scale,
            tolerance=tolerance,
            slot_mapping=slot_mapping,
        )
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            bias,
            slot_mapping,
            ids,
            weights,
            logits.stride(0),
            scale,
            least_sum,
            tolerance,
            TOP_K=top_k,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            GROUP_SIZE=num_experts // num_groups,
            BLOCK_GROUPS=next_power_of_2(num_groups),
            BLOCK_SIZE=next_power_of_2(num_experts // num_groups),
            BLOCK_K=next_power_of_2(top_k),
            SIGMOID=scoring == "sigmoid",
            SPARSE_MIXER=scoring == "sparsemixer",
            RENORMALIZE=renormalize,
            num_warps=1,
            **early_launch(logits.device),
        )
    return ids, weights


def route_reference(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    least_sum: float = LEAST_SUM,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    tolerance: float = 0.0,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, scores in fp32."""
    wide = logits.float()
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
    # Softmax keeps the order but may round two logits to one score: choose by the logits if nothing is added.
    choice = scores + bias if bias is not None else wide
    choice = choice.nan_to_num(nan=torch.finfo(torch.float32).min)  # lowest, but above an excluded group
    if num_groups > 1:
        choice = _mask_groups(choice, num_groups, top_groups, 1 if bias is None else 2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = _mixed_sparsely(wide, ids, tolerance) if scoring == "sparsemixer" else scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(least_sum)
    weights, ids = weights * scale, ids.int()
    if slot_mapping is not None:
        padding = (slot_mapping < 0)[:, None]
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return ids, weights


def _mixed_sparsely(logits: Tensor, ids: Tensor, tolerance: float) -> Tensor:
    """Return the weights [T, k] of the experts `ids`, each among those that are near it and not chosen before it."""
    weights, left = [], logits.clone()
    for place in range(ids.shape[1]):
        best = logits.gather(1, ids[:, place, None].long())
        is_near = best - logits <= tolerance * torch.maximum(logits.abs(), best)
        weights.append(1 / (left - best).exp().masked_fill(~is_near, 0.0).sum(-1))
        left.scatter_(1, ids[:, place, None].long(), float("-inf"))
    return torch.stack(weights, 1)


def _mask_groups(choice: Tensor, num_groups: int, top_groups: int, best: int) -> Tensor:
    """Set choice [T, E] to -inf outside the top_groups groups with the largest sums of their `best` largest values."""
    grouped = choice.unflatten(1, (num_groups, -1))
    values = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(-1)
    kept = values.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    left_out = torch.ones_like(values, dtype=torch.bool).scatter_(1, kept, False)
    masked: Tensor = grouped.masked_fill(left_out[:, :, None], float("-inf"))
    return masked.flatten(1)


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E] fp32 or None
    slots_ptr,  # [T] int64 or None
    ids_ptr,  # [T, TOP_K] int32
    weights_ptr,  # [T, TOP_K] fp32
    logits_stride,
    scale,
    least_sum,
    tolerance,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    SPARSE_MIXER: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row, its experts as [groups, size]:
    takes the largest key TOP_K times, and removes it each time."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_SIZE)
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    exists = (group < NUM_GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=exists, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=exists, other=0.0)
    else:
        choice = logits
    candidates = exists
    if NUM_GROUPS > 1:
        candidates &= _best_groups(choice, exists, bias_ptr is not None, NUM_GROUPS, TOP_GROUPS, BLOCK_SIZE)[:, None]
    keys = tl.where(candidates, _ordered(choice, expert), _NONE)

    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(keys, 1), 0)
        hit = keys == best
        chosen = tl.where(place == k, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        if SPARSE_MIXER:
            top = tl.sum(tl.sum(tl.where(hit, logits, 0.0), 1), 0)
            near = (keys > _NONE) & (top - logits <= tolerance * tl.maximum(tl.abs(logits), top))
            weight = 1.0 / tl.sum(tl.sum(tl.where(near, tl.exp(logits - top), 0.0), 1), 0)
        else:
            weight = tl.sum(tl.sum(tl.where(hit, scores, 0.0), 1), 0)
        weights = tl.where(place == k, weight, weights)
        keys = tl.where(hit, _NONE, keys)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), least_sum, propagate_nan=tl.PropagateNan.ALL)
    weights = weights * scale
    if slots_ptr is not None:
        padding = tl.load(slots_ptr + row) < 0
        chosen = tl.where(padding, -1, chosen)
        weights = tl.where(padding, 0.0, weights)
    tl.store(ids_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)


_NONE = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def _ordered(values, ids):
    """Return int64 keys in the order of the values, on ties by lower id; NaN counts as -inf."""
    values = tl.where(values == values, values, -float("inf")) + 0.0  # -0.0 becomes 0.0
    bits = values.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _best_groups(
    choice, exists, TWO: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return [groups] whether a group is one of the best: by its largest value, or by the sum of its two largest."""
    group = tl.arange(0, choice.shape[0])
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    keys = tl.where(exists, _ordered(choice, tl.broadcast_to(member, choice.shape)), _NONE)
    values = tl.where(exists & (choice == choice), choice, -float("inf"))
    first = tl.max(keys, 1)
    value = tl.max(values, 1)
    if TWO:
        value += tl.max(tl.where(keys == first[:, None], -float("inf"), values), 1)
    group_keys = tl.where(group < NUM_GROUPS, _ordered(value, group), _NONE)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = group_keys == tl.max(group_keys, 0)
        kept |= best
        group_keys = tl.where(best, _NONE, group_keys)
    return kept
