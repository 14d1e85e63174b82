"""The tensors of the cache, allocated once: K and V of every layer, and the slots of every recurrent layer's states.

engine/memory/ decides which request holds which block and which slot; the kernels define what the bytes mean. This
module only allocates exactly the planned bytes, and puts each layer's states beside its K and V.
Does not know: requests, attention, recurrences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from localllm.errors import DoesNotFit
from localllm.kernels.kv_format import KVFormat, Plane, format_of
from localllm.kernels.layer_cache import HybridCache, LayerCache, LayerKV, LayerState, state_of
from localllm.kernels.paged_attention import KVReads, kv_cache_shape
from localllm.models.encoders.source import SourcePool
from localllm.models.fit import kv_cache_bytes
from localllm.models.spec.latent import heads_at_once
from localllm.models.spec.model_spec import KVGroup, ModelSpec, kv_groups, query_heads, state_group
from localllm.runner.batch import Ints
from localllm.units import format_bytes


class KVCache:
    """Zeroed K and V per layer, each of shape `kv_cache_shape(...)`; `num_blocks`, one per KV group, include the null
    block 0. A layer that reads the K and V of another has the same `LayerKV`, one without attention None.

    Raises `DoesNotFit` if the allocation fails.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: tuple[int, ...], block_size: int, device: torch.device, kv_dtype: str
    ) -> None:
        """kv_dtype: a name of `KV_FORMATS`."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sources: SourcePool | None = None  # what an encoder-decoder reads of prompts, beside its answers
        groups = kv_groups(spec)
        try:
            kept = {
                layer: _layer(group, count, block_size, device, format_of(kv_dtype, group.window))
                for group, count in zip(groups, num_blocks, strict=True)
                for layer in group.layers
            }
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            size = kv_cache_bytes(spec, num_blocks, block_size, kv_dtype)
            raise DoesNotFit(
                "The KV cache could not be allocated.",
                f"The allocation of {format_bytes(size)} on {device} failed: {str(error).splitlines()[0]}",
                "Another program took memory meanwhile: start again, or set a smaller --kv-cache-memory-bytes.",
            ) from error
        self.reads = tuple(
            _reads(spec, group, kv_cache_shape(count, block_size, group.num_kv_heads, group.head_dim), kv_dtype)
            for group, count in zip(groups, num_blocks, strict=True)
        )
        sources = spec.kv_source or range(spec.num_layers)
        self.layers = [kept.get(sources[layer]) for layer in range(spec.num_layers)]  # None: a layer without attention
        self._kept = tuple(kept.values())
        self._groups = [[kept[layer] for layer in group.layers] for group in groups]

    def tensors_of_blocks(self) -> list[list[Tensor]]:
        """Return for each KV group its tensors [heads, blocks, ...], without fixed scales."""
        return [[tensor for layer in group for tensor in layer.tensors() if tensor.dim() > 1] for group in self._groups]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks, without the few fixed scales of an fp8 cache."""
        return sum(tensor.nbytes for layer in self._kept for tensor in layer.tensors() if tensor.dim() > 1)


def _reads(spec: ModelSpec, group: KVGroup, shape: tuple[int, int, int, int], kv_dtype: str) -> KVReads:
    heads = query_heads(spec, group.layers[0]) if group.layers else spec.num_heads
    heads = heads if spec.latent is None else heads_at_once(heads)
    k, v = format_of(kv_dtype, group.window)[1:]
    stored = (*shape[:3], k.stored_width(group.head_dim))
    return KVReads(heads, stored, _dtype(k.stored), group.window, None if v.stored == k.stored else _dtype(v.stored))


def _layer(group: KVGroup, num_blocks: int, block_size: int, device: torch.device, stored: KVFormat) -> LayerKV:
    shape = kv_cache_shape(num_blocks, block_size, group.num_kv_heads, group.head_dim)
    k, k_scale = _part(shape, device, stored.k)
    v, v_scale = (k, k_scale) if group.values_are_keys else _part(shape, device, stored.v)
    index = None
    if group.index_size:
        index = zeros((1, num_blocks, block_size, group.index_size), device, _dtype(stored.index_type))
    return LayerKV(k, v, k_scale, v_scale, index)


def _part(shape: tuple[int, int, int, int], device: torch.device, plane: Plane) -> tuple[Tensor, Tensor | None]:
    """Return K or V, and its scales."""
    values = zeros((*shape[:3], plane.stored_width(shape[3])), device, _dtype(plane.stored))
    if plane.bits == 4:
        return values, zeros((*shape[:3], 2, plane.num_groups(shape[3])), device, torch.float16)
    if values.dtype == torch.int8:
        return values, zeros(shape[:3], device, torch.float32)
    return values, torch.ones(shape[0], device=device) if values.dtype == torch.float8_e4m3fn else None


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros. On a CPU these are the system's zero pages, committed on first write,
    so an unused cache is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


class StateCache:
    """Zeroed states per recurrent layer; `num_places` includes the null place 0. A model without recurrent layers needs
    none and has no layers here. A drafter may read the features of the last token of a state (`features`).

    Raises `DoesNotFit` if the allocation fails.
    """

    def __init__(self, spec: ModelSpec, num_places: int, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the model's activations."""
        group = state_group(spec, str(dtype).removeprefix("torch."))
        self.num_places = num_places if group is not None else 0
        self.layers: dict[int, LayerState] = {}
        self.features: Tensor | None = None
        if group is None:
            return
        try:
            if group.features is not None:
                self.features = zeros((num_places, *group.features.shape), device, dtype)
            for layer, tensors in zip(group.layers, group.tensors, strict=True):
                parts = {each.name: zeros((num_places, *each.shape), device, _dtype(each.dtype)) for each in tensors}
                self.layers[layer] = LayerState(parts.get("conv"), parts.get("matrix"))
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            size = format_bytes(num_places * group.bytes_per_place)
            raise DoesNotFit(
                "The recurrent states could not be allocated.",
                f"The allocation of {size} on {device} failed: {str(error).splitlines()[0]}",
                "Another program took memory meanwhile: start again, or set a smaller --max-num-seqs.",
            ) from error

    @property
    def allocated_bytes(self) -> int:
        kept = sum(tensor.nbytes for layer in self.layers.values() for tensor in layer.tensors())
        return kept + (0 if self.features is None else self.features.nbytes)


class StateCopies:
    """Copies of the states at some places, for rows whose drafts may be wrong: a state cannot be cut back."""

    def __init__(self, layers: Sequence[LayerCache | None], places: Ints) -> None:
        """places: [N] of the states to copy."""
        states, index = filter(None, map(state_of, layers)), torch.from_numpy(places)
        self._kept = [(tensor, tensor[index]) for state in states for tensor in state.tensors()]

    def restore(self, copies: Ints, places: Ints) -> None:
        """Write some of the copies, by their indices in the constructor's places, to other places."""
        chosen, index = torch.from_numpy(copies), torch.from_numpy(places)
        for tensor, kept in self._kept:
            tensor[index] = kept[chosen]


def layer_caches(kv: Sequence[LayerKV | None], states: StateCache) -> list[LayerCache | None]:
    """Return what each layer keeps: K and V, a state, both, or nothing."""
    return [_both(own, states.layers.get(layer)) for layer, own in enumerate(kv)]


def _both(kv: LayerKV | None, state: LayerState | None) -> LayerCache | None:
    return HybridCache(kv, state) if kv is not None and state is not None else kv or state


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
