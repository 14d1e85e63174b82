"""Attention of decode rows through the native library, which reads the cache where it is.

Plain torch copies all keys and values of a step first, which takes two thirds of a step of 128 rows. Here a result
depends on its row alone, and has the bits that it has in a native step.
Does not know: prompts, which blocks a row has (paged_attention/twin.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, Pool
from localllm.kernels.cpu.native.structures import CacheType, NativeAttention
from localllm.kernels.cpu.recurrent import STATE_TYPES
from localllm.kernels.layer_cache import LayerKV, numbers_in

CACHE_TYPES = {**STATE_TYPES, torch.int8: CacheType.I8, torch.uint8: CacheType.I4}


def reads_cache(kv: LayerKV) -> bool:
    """Return whether the native library reads a cache of these types and shapes."""
    types, is_whole = {kv.k.dtype, kv.v.dtype}, kv.k.is_contiguous() and kv.v.is_contiguous()
    return types <= CACHE_TYPES.keys() and kv.head_dim == numbers_in(kv.v) and is_whole


def cache_fields(kv: LayerKV) -> dict[str, int | None]:
    """Return the fields of `NativeAttention` that describe a cache, which is kept, and heads as wide as it has them."""
    kv_heads, num_blocks, block_size, _ = kv.k.shape
    fields: dict[str, int | None] = {"num_blocks": num_blocks, "block_size": block_size, "kv_heads": kv_heads}
    for side, name, cache, scale in (("k", "key", kv.k, kv.k_scale), ("v", "value", kv.v, kv.v_scale)):
        fields |= {side: cache.data_ptr(), f"{side}_scales": None if scale is None else scale.data_ptr()}
        fields[f"{name}_type"] = CACHE_TYPES[cache.dtype]
        if cache.dtype == torch.uint8 and scale is not None:
            fields[f"{name}_group"] = kv.head_dim // scale.shape[-1]
    return {**fields, "head_dim": kv.head_dim, "value_dim": kv.head_dim}


def rows_of(block_table: Tensor, context_lens: Sequence[int]) -> Tensor:
    """Return [n, 4] int64: NativeRow of the first n rows of block_table [B, max_blocks] int32 as numbers. They are the
    address of its blocks, the position of its query, and a slot and a rotation that nothing reads."""
    assert block_table.dtype == torch.int32
    assert block_table.stride(1) == 1
    rows = torch.zeros(len(context_lens), 4, dtype=torch.int64)
    rows[:, 0] = torch.arange(len(context_lens)).mul_(block_table.stride(0) * 4).add_(block_table.data_ptr())
    rows[:, 1] = torch.tensor(context_lens) - 1
    return rows


def attend_decodes(
    library: Library | Pool,
    q: Tensor,
    kv: LayerKV,
    rows: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    distance_bias: Tensor | None,
    out: Tensor,
) -> None:
    """Write the attention of q [n, heads, dim] to out [n, heads * dim].

    rows: of `rows_of`, whose block table is kept. window: as in kernels/kv_format.py. sinks, slopes: [heads].
    distance_bias: [heads, distances]. Raises MemoryError.
    """
    count, heads, dim = q.shape
    queries, wide = q.float().reshape(count, heads * dim), out.float()  # out itself if it is fp32
    extras = [None if each is None else each.float().contiguous() for each in (sinks, slopes, distance_bias)]
    sink_scores, tilts, biases = (None if each is None else each.data_ptr() for each in extras)
    attention = NativeAttention(
        **cache_fields(kv), heads=heads, window=window or 0, scale=scale, softcap=softcap or 0.0, sinks=sink_scores,
        slopes=tilts, distance_bias=biases, distances=0 if distance_bias is None else distance_bias.shape[1],
        growth_period=1,
    )  # fmt: skip
    library.attend(attention, rows, queries, wide)
    if wide is not out:
        out.copy_(wide)
