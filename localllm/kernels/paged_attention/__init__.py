"""Attention of this step's queries over the paged KV cache (Kwon et al. 2023, arXiv:2309.06180).

    plan = plan_attention(...)                 once per step and window: which blocks each query reads
    y = paged_attention(q, k_cache, v_cache, plan, scale=...)   once per layer

Causal; any grouping of query heads over key/value heads; windows; softcap; ALiBi; sinks; caches of 16 and 32
bits, float8_e4m3fn and int8; softmax in fp32. Slots past a request's context may hold any values, including NaN: they
never reach the output. A row whose context_len is 0 is padding and its output is zero.

    twin.py      in plain torch, planned from lengths on the host; used by the CPU engine, which leaves the decode rows
                 to the native library where there is one (kernels/cpu/attention.py)
    kernels.py   in Triton: one body for prompts (many queries) and decode rows (one query, keys in parts)
    newest.py    heads of a projection, which the decode kernel rotates and stores itself
    device.py    plans and launches the kernels from tensors on the device alone

A decode row reads each key once for all heads of its group, so it is limited by memory: 2 * head_dim * bytes for every
key and key head. A prompt is limited by the matrix units: 4 * head_dim operations for every query, visible key and
head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.cpu.attention import attend_decodes, reads_cache
from localllm.kernels.cpu.native.library import native
from localllm.kernels.launch import runs_triton
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention.device import (
    DevicePlan,
    KVReads,
    WorkLists,
    attend_on_device,
    plan_on_device,
    splits_decodes,
    splitting,
    takes_raw_heads,
)
from localllm.kernels.paged_attention.newest import RawHeads
from localllm.kernels.paged_attention.twin import (
    HostPlan,
    Scoring,
    attend_on_host,
    paged_attention_reference,
    plan_drafts_on_host,
    plan_on_host,
)

__all__ = [
    "AttentionPlan", "KVReads", "RawHeads", "WorkLists", "kv_cache_shape", "paged_attention",
    "paged_attention_reference", "plan_attention", "rotates_heads", "splits_decodes", "splitting",
]  # fmt: skip

AttentionPlan = HostPlan | DevicePlan
"""The plan that all layers with the same window share in one step."""


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return the shape of one layer's K (or V) cache. Heads come first: gathered blocks then contain each head's keys
    contiguously, ready for a batched matmul, and a block of one head is one contiguous tile of block_size x
    head_dim."""
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
    decode_queries: int = 1,
    positions: Tensor | None = None,
    first_key: int = 0,
    work: WorkLists | None = None,
    key_limits: Tensor | None = None,
) -> AttentionPlan:
    """Plan a step. block_table [B, max_blocks], context_lens [B], cu_seqlens_q [B + 1] int32, as in ForwardInputs.

    The first num_decodes requests have decode_queries query tokens each, at consecutive positions; if more than one,
    positions [T] int64 are given, and a query from its context's end on is padding (its output is not defined). Only
    the twin reads the lengths on the host; kernels read the tensors, so that a recorded step is valid for other
    lengths. window: which tokens a query sees, as in kernels/kv_format.py; None: all previous ones. first_key: keys
    before this position are not read. work: what `prepare_step` has filled. key_limits [T] int32: of queries of
    rows with several, the first key that each does not see, behind its own or later; None: the one behind its own.
    Not for steps with drafts.
    """
    if not runs_triton(block_table, "attention"):
        if positions is not None:
            starts = positions[: num_decodes * decode_queries : decode_queries].tolist()
            return plan_drafts_on_host(
                block_table, query_lens, context_lens_host, starts, cache_shape, window, first_key
            )  # fmt: skip
        limits = None if key_limits is None else key_limits.tolist()
        return plan_on_host(
            block_table, query_lens, context_lens_host, num_decodes, cache_shape, window, first_key, limits
        )
    return plan_on_device(
        block_table, context_lens, cu_seqlens_q, num_decodes,
        KVReads(num_heads, tuple(cache_shape), cache_dtype, window), decode_queries, positions, work,
        first_key, key_limits,
    )  # fmt: skip


def rotates_heads(plan: AttentionPlan, heads: RawHeads, kv: LayerKV) -> bool:
    """Return whether `paged_attention` takes these heads as they are, instead of queries that are rotated, with keys
    and values in the cache. Without sinks and slopes; it costs a kernel less."""
    return isinstance(plan, DevicePlan) and takes_raw_heads(plan, heads, kv)


def paged_attention(
    q: Tensor | RawHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Return [T, num_heads * head_dim] in q's dtype. q [T, num_heads, head_dim]. This step's K and V are in the cache,
    unless q is raw heads, which only a plan for which `rotates_heads` takes: then they are stored here.

    softcap: scores become softcap * tanh(score / softcap). sinks [num_heads] fp32: an additional score per head in the
    softmax, without a value. alibi_slopes [num_heads] fp32: minus the slope is added per position that a key precedes
    the query. distance_bias [num_heads, D] fp32: added to a score by that distance, the last for D - 1 and more; only
    the twin has it. k_scale, v_scale: factors of an 8-bit cache, see LayerKV.
    """
    if isinstance(plan, DevicePlan):
        assert distance_bias is None, "models/fit refuses such a model on a GPU"
        return attend_on_device(
            q, k_cache, v_cache, plan, scale, softcap, sinks, alibi_slopes, k_scale, v_scale
        )  # fmt: skip
    assert isinstance(q, Tensor), "the twin reads queries that are rotated"
    kv, scoring = (
        LayerKV(k_cache, v_cache, k_scale, v_scale),
        Scoring(scale, softcap, sinks, alibi_slopes, distance_bias),
    )
    library, decodes = native(), plan.decodes
    if library is None or decodes.native_rows is None or not reads_cache(kv):
        return attend_on_host(q, kv, plan, scoring)
    rows, count = decodes.native_rows, len(decodes.context_lens)

    def attend(out: Tensor) -> None:
        attend_decodes(library, q[:count], kv, rows, decodes.layout.window, *scoring, out[:count])

    return attend_on_host(q, kv, plan, scoring, attend)
