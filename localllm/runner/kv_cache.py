"""The KV cache's tensors: K and V of every layer, allocated once.

engine/block_pool.py decides which request holds which block; the kernels define what the bytes mean. This module only
allocates exactly the planned bytes.
Does not know: requests, attention.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from localllm.errors import DoesNotFit
from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.fit import kv_bytes_per_token
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_bytes


class KVCache:
    """Zeroed K and V per layer, each of shape `kv_cache_shape(...)`; `num_blocks` includes the null block 0.

    Raises `DoesNotFit` if the allocation fails.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """dtype: the model's, or float8_e4m3fn or int8 with the scales that kernels/layer_kv.py describes."""
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = kv_cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            latent = spec.latent is not None
            self.layers = [_layer(shape, device, dtype, values_are_keys=latent) for _ in range(spec.num_layers)]
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            size = kv_bytes_per_token(spec, str(dtype).removeprefix("torch.")) * num_blocks * block_size
            raise DoesNotFit(
                "The KV cache could not be allocated.",
                f"The allocation of {format_bytes(size)} on {device} failed: {str(error).splitlines()[0]}",
                "Another program took memory meanwhile: start again, or set a smaller --kv-cache-memory-bytes.",
            ) from error

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks, without the few fixed scales of an fp8 cache."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors() if tensor.dim() > 1)


def _layer(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, *, values_are_keys: bool
) -> LayerKV:
    k, k_scale = _part(shape, device, dtype)
    v, v_scale = (k, k_scale) if values_are_keys else _part(shape, device, dtype)
    return LayerKV(k, v, k_scale, v_scale)


def _part(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return K or V, and its scales."""
    values = _zeros(shape, device, dtype)
    if dtype == torch.int8:
        return values, _zeros(shape[:3], device, torch.float32)
    return values, torch.ones(shape[0], device=device) if dtype == torch.float8_e4m3fn else None


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros. On a CPU these are the system's zero pages, committed on first write,
    so an unused cache is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
