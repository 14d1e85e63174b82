"""One layer's part of the KV cache, as its readers and writers expect it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerKV(NamedTuple):
    """k and v of the shape paged_attention.kv_cache_shape; key = k * k_scale, value = v * v_scale.

    Scales are fp32. A float8_e4m3fn cache has one per head, [num_kv_heads], fixed before the first token. An int8 cache
    has one per token and head, [num_kv_heads, num_blocks, block_size], written with the token. Other caches have none.
    If attention reads one latent as key and value, v is k itself and v_scale is k_scale.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def values_are_keys(self) -> bool:
        return self.v is self.k

    def tensors(self) -> list[Tensor]:
        """Return the existing tensors, each once."""
        kept = (self.k, self.k_scale) if self.values_are_keys else self
        return [tensor for tensor in kept if tensor is not None]
