"""One layer's part of the KV cache, and the states that it keeps between steps.

A recurrent layer keeps a state of fixed size per request where attention keeps keys and values per token. States are in
numbered places of tensors that all requests share. Place 0 is never read nor written. Each row of a step names the
places that it reads and writes.
Does not know: requests, who owns a block or a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class LayerKV(NamedTuple):
    """k and v of the shape paged_attention.kv_cache_shape; key = k * k_scale, value = v * v_scale.

    A float8_e4m3fn cache has an fp32 scale per head, [num_kv_heads], fixed before the first token. int8 has one per
    token and head, [num_kv_heads, num_blocks, block_size], written with the token. 4 bits are uint8, half as wide, with
    scales and zero points [num_kv_heads, num_blocks, block_size, 2, groups] fp16; such keys are rotated (kv_format.py).
    Other caches have none. If attention reads one latent as key and value, v is k itself and v_scale is k_scale. Layers
    with an indexer keep its keys, [1, num_blocks, block_size, D], in 16 bits or more.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    index_keys: Tensor | None = None

    @property
    def values_are_keys(self) -> bool:
        return self.v is self.k

    @property
    def head_dim(self) -> int:
        return numbers_in(self.k)

    @property
    def rotates_keys(self) -> bool:
        """Return whether keys and queries are rotated (`hadamard` of rotary_store_kv.py)."""
        return self.k.dtype == torch.uint8

    def tensors(self) -> list[Tensor]:
        """Return the existing tensors, each once."""
        kept = (self.k, self.k_scale, self.index_keys) if self.values_are_keys else self
        return [tensor for tensor in kept if tensor is not None]


def numbers_in(cache: Tensor) -> int:
    """Return the numbers of a head in K or V: twice as many as bytes if these have 4 bits."""
    return cache.shape[-1] * (2 if cache.dtype == torch.uint8 else 1)


class LayerState(NamedTuple):
    """The states of one recurrent layer; None for a tensor that its kind does not have.

    Both are contiguous: kernels address a place by its number.
    """

    conv: Tensor | None
    """[places, channels, K - 1] in the model's type: the last inputs of a causal convolution of K taps, oldest
    first."""
    matrix: Tensor | None
    """[places, heads, rows, columns] fp32: dk x dv for the gated delta rule, head size x state size for Mamba-2."""

    def tensors(self) -> list[Tensor]:
        """Return the existing tensors."""
        return [tensor for tensor in self if tensor is not None]


class HybridCache(NamedTuple):
    """Keys, values and states of a layer that has attention and a recurrent part side by side."""

    kv: LayerKV
    state: LayerState


LayerCache = LayerKV | LayerState | HybridCache


def kv_of(cache: LayerCache | None) -> LayerKV | None:
    """Return the keys and values of a layer; None if it has none."""
    kept = cache.kv if isinstance(cache, HybridCache) else cache
    return kept if isinstance(kept, LayerKV) else None


def state_of(cache: LayerCache | None) -> LayerState | None:
    """Return the states of a layer; None if it has none."""
    kept = cache.state if isinstance(cache, HybridCache) else cache
    return kept if isinstance(kept, LayerState) else None


class HostRow(NamedTuple):
    """One row of a `StateStep` on the host: its tokens first .. end - 1, and its places."""

    first: int
    end: int
    read: int
    write: int
    save: int

    def load(self, places: Tensor) -> Tensor:
        """Return a copy of the state before the first token. places: [places, ...]."""
        return torch.zeros_like(places[0]) if self.read < 0 else places[self.read].clone()

    def store(self, places: Tensor, state: Tensor) -> None:
        """Write the state after the last token."""
        for place in (self.write, self.save):
            if place:
                places[place] = state


class DraftedInputs:
    """The projections of a step with drafts, of all recurrent layers. A state cannot be cut back to the last right
    draft, so such a step writes no state; when the right drafts are known, the recurrences alone run over their
    projections again. Buffers stay where they are, since recorded steps write to them."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._kept: dict[int, tuple[Recurrence, LayerState, Tensor]] = {}

    def keep(self, recurrence: Recurrence, state: LayerState, projected: Tensor) -> None:
        """Keep what a layer has projected, [T, width]."""
        if id(state.conv) not in self._kept:
            buffer = projected.new_zeros(self._most_tokens, projected.shape[1])
            self._kept[id(state.conv)] = recurrence, state, buffer
        self._kept[id(state.conv)][2][: len(projected)].copy_(projected)

    def advance(self, tokens: Tensor, step: StateStep) -> None:
        """Let the states come after some of the kept tokens. tokens [T] int64: which, row after row as `step` says."""
        for recurrence, state, buffer in self._kept.values():
            recurrence(buffer.index_select(0, tokens), state, step)


class StateStep(NamedTuple):
    """The rows of a step as the recurrent kernels read them; all layers share it. B: rows.

    Row i has the tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1. Its state before the first of them is the one at place
    read[i], or zeros for -1. Its state after the last is written to the places write[i] and save[i]; 0: nowhere. A row
    without tokens writes what it has read. No place is written by two rows, and no row reads a place that another row
    writes. A row may write the place that it reads. A padding row of a recorded step reads -1 and writes 0.
    """

    cu_seqlens: Tensor  # [B + 1] int32
    read: Tensor  # [B] int32
    write: Tensor  # [B] int32
    save: Tensor  # [B] int32
    query_lens: tuple[int, ...]  # [B] the same on the host, for a CPU: kernels on a device read the tensors alone,
    read_host: tuple[int, ...]  # so that a recorded step is valid for other rows
    write_host: tuple[int, ...]
    save_host: tuple[int, ...]
    num_decodes: int  # the first num_decodes rows have one token each; says nothing about what they read
    drafted: DraftedInputs | None = None  # of a step with drafts, which writes no state

    def host_rows(self) -> Iterator[HostRow]:
        first = 0
        for length, *places in zip(self.query_lens, self.read_host, self.write_host, self.save_host, strict=True):
            yield HostRow(first, first + length, *places)
            first += length


Recurrence = Callable[[Tensor, LayerState, StateStep], Tensor]
"""The part of a recurrent layer behind its projection [T, width]: it reads and writes the states of the step's rows."""
