"""Attention of this step's queries over the paged KV cache (Kwon et al. 2023, arXiv:2309.06180).

    plan = plan_attention(...)                 once per step and window: which blocks each query reads
    y = paged_attention(q, k_cache, v_cache, plan, scale=...)   once per layer

Causal; any grouping of query heads over key/value heads; sliding window; softcap; ALiBi; sinks; caches of 16 and 32
bits, float8_e4m3fn and int8; softmax in fp32. Slots past a request's context may hold anything, NaN included: they
never reach the output. A row whose context_len is 0 is padding and answered with zeros.

    twin.py      in plain torch, planned from lengths on the host; the CPU engine
    kernels.py   in Triton: one body for prompts (many queries) and decode rows (one query, keys in parts)
    device.py    plans and launches the kernels from tensors on the device alone

A decode row reads each key once for all heads of its group, so memory is its limit: 2 * head_dim * bytes for every
key and key head. A prompt's limit is the matrix units: 4 * head_dim operations for every query, key it sees and head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.launch import runs_triton
from localllm.kernels.paged_attention.device import DevicePlan, attend_on_device, plan_on_device
from localllm.kernels.paged_attention.twin import HostPlan, paged_attention_reference, plan_on_host

__all__ = ["AttentionPlan", "kv_cache_shape", "paged_attention", "paged_attention_reference", "plan_attention"]

AttentionPlan = HostPlan | DevicePlan
"""What every layer with the same window shares in one step."""


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of one layer's K (or V) cache. Heads first: gathering blocks then yields each head's keys contiguous,
    ready for a batched matmul, and a block of one head is one contiguous tile of block_size x head_dim."""
    return (num_kv_heads, num_blocks, block_size, head_dim)


def plan_attention(
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_decodes: int,
    query_lens: Sequence[int],
    context_lens_host: Sequence[int],
    num_heads: int,
    cache_shape: Sequence[int],
    cache_dtype: torch.dtype,
    window: int | None = None,
) -> AttentionPlan:
    """block_table [B, max_blocks], context_lens [B], cu_seqlens_q [B + 1] int32, as ForwardInputs has them.

    The first num_decodes requests have one query token each. Lengths on the host are read by the twin alone: kernels
    take the tensors, so that a recorded step holds for other lengths. window: tokens a query sees, itself included;
    None: all before it.
    """
    if not runs_triton(block_table):
        return plan_on_host(block_table, query_lens, context_lens_host, num_decodes, cache_shape, window)
    return plan_on_device(
        block_table, context_lens, cu_seqlens_q, num_decodes, num_heads, cache_shape, cache_dtype, window
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """q [T, num_heads, head_dim] -> [T, num_heads * head_dim] in q's dtype. K and V of the step are in the cache.

    softcap: scores become softcap * tanh(score / softcap). sinks [num_heads] fp32: a score per head that takes part in
    the softmax and has no value. alibi_slopes [num_heads] fp32: added per position that a key lies before the query,
    negated. k_scale, v_scale: what the numbers of an 8-bit cache are to be multiplied with, as LayerKV says.
    """
    if isinstance(plan, DevicePlan):
        return attend_on_device(
            q, k_cache, v_cache, plan, scale, softcap, sinks, alibi_slopes, k_scale, v_scale
        )  # fmt: skip
    return paged_attention_reference(
        q, k_cache, v_cache, plan, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
