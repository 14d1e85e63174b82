"""The tensors of recurrent states: the slots of every recurrent layer, allocated once.

engine/memory/ decides which request holds which slot; the kernels define what the numbers mean. This module only
allocates exactly the planned bytes, and puts each layer's states beside its K and V.
Does not know: requests, recurrences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localllm.errors import DoesNotFit
from localllm.kernels.layer_cache import HybridCache, LayerCache, LayerKV, LayerState, state_of
from localllm.models.spec.model_spec import ModelSpec, state_group
from localllm.runner.batch import Ints
from localllm.runner.kv_cache import zeros
from localllm.units import format_bytes


class StateCache:
    """Zeroed states per recurrent layer; `num_places` includes the null place 0. A model without recurrent layers needs
    none and has no layers here.

    Raises `DoesNotFit` if the allocation fails.
    """

    def __init__(self, spec: ModelSpec, num_places: int, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the model's activations."""
        group = state_group(spec, str(dtype).removeprefix("torch."))
        self.num_places = num_places if group is not None else 0
        self.layers: dict[int, LayerState] = {}
        if group is None:
            return
        try:
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
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer.tensors())


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
