"""Writes this step's keys and values into their slots of the paged cache, in plain torch. On a GPU,
kernels/rotary_store_kv.py writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.quantize import quantize_reference, round_to


def store_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    all_valid: bool = False,
) -> None:
    """Write k and v [T, num_kv_heads, head_dim] to the slots [T] int64; v None if values are keys;
    caches and scales as in a LayerKV.

    Slot -1 is not written. `all_valid` promises that there is none, which saves a check of the slots in each layer.
    """
    if not all_valid:
        keep = (slot_mapping >= 0).nonzero().squeeze(1)
        k, slot_mapping = k.index_select(0, keep), slot_mapping.index_select(0, keep)
        v = None if v is None else v.index_select(0, keep)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if new is None:
            continue
        rows = new.transpose(0, 1)
        if scale is not None:
            rows, cache = _quantized(rows, cache, scale, slot_mapping)
        slots = cache.view(cache.shape[0], -1, cache.shape[-1])  # [kv_heads, num_blocks * block_size, head_dim]
        slots.index_copy_(1, slot_mapping, rows if rows.dtype == cache.dtype else rows.to(cache.dtype))


def _quantized(rows: Tensor, cache: Tensor, scale: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [kv_heads, T, head_dim] in the cache's type, and the cache, both viewed as bytes: torch cannot copy
    fp8 by index. Writes per-token scales."""
    if cache.dtype == torch.int8:
        values, scales = quantize_reference(rows, torch.int8)
        scale.view(scale.shape[0], -1).index_copy_(1, slot_mapping, scales.squeeze(-1))
    else:
        values = round_to(rows.float() / scale[:, None, None], cache.dtype)
    return values.view(torch.uint8), cache.view(torch.uint8)


def has_no_skipped_slot(slot_mapping: Tensor) -> bool:
    """Return whether `all_valid` may be promised for this step.
    False on a GPU, where the check would wait for the device."""
    return slot_mapping.device.type == "cpu" and slot_mapping.numel() > 0 and bool(torch.min(slot_mapping) >= 0)
