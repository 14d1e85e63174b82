"""Write this step's keys and values into their slots of the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, all_valid: bool = False
) -> None:
    """k, v [T, num_kv_heads, head_dim]; caches as paged_attention.kv_cache_shape says; slot_mapping [T] int64.

    Slot -1 writes nowhere. `all_valid` promises that there is none, which saves a look at the slots in each layer.
    """
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping, all_valid=all_valid)


def store_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, all_valid: bool = False
) -> None:
    if not all_valid:
        keep = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k.index_select(0, keep), v.index_select(0, keep), slot_mapping.index_select(0, keep)
    for new, cache in ((k, k_cache), (v, v_cache)):
        slots = cache.view(cache.shape[0], -1, cache.shape[-1])  # [kv_heads, num_blocks * block_size, head_dim]
        rows = new.transpose(0, 1)
        slots.index_copy_(1, slot_mapping, rows if rows.dtype == cache.dtype else rows.to(cache.dtype))


def has_no_skipped_slot(slot_mapping: Tensor) -> bool:
    """Whether `all_valid` may be promised for this step; on a GPU asking would wait for the device, so: no."""
    return slot_mapping.device.type == "cpu" and slot_mapping.numel() > 0 and bool(torch.min(slot_mapping) >= 0)
