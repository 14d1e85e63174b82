"""The recurrent states of a model: the tensors that a request keeps in its recurrent layers, whatever its length.

A request has one *place* for the whole model: the same row of every one of these tensors. The convolution's inputs are
kept in the type of the activations, the matrix in fp32.
Does not know: who owns a place (engine/state_pool.py), the tensors themselves (runner/state_cache.py).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from localllm.models.spec.model_spec import ModelSpec

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StateTensor(NamedTuple):
    """One tensor of a layer's state. Its rows are places."""

    name: Literal["conv", "matrix"]
    shape: tuple[int, ...]  # of one place: conv [channels, K - 1], matrix [heads, rows, columns]
    dtype: str  # float32, bfloat16, float16

    @property
    def num_bytes(self) -> int:
        """Bytes of one place."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


class StateGroup(NamedTuple):
    """The recurrent layers of a model, which all advance together."""

    layers: tuple[int, ...]  # ascending
    tensors: tuple[tuple[StateTensor, ...], ...]  # per layer of `layers`

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one request's state over all layers."""
        return sum(tensor.num_bytes for layer in self.tensors for tensor in layer)


def state_group(spec: ModelSpec, dtype: str) -> StateGroup | None:
    """Return the states of a model whose activations have this dtype; None: the model has no recurrent layer."""
    recurrent = spec.recurrent
    if recurrent is None:
        return None
    tensors = [StateTensor("conv", recurrent.conv_shape, dtype)]
    if recurrent.matrix_shape is not None:
        tensors.append(StateTensor("matrix", recurrent.matrix_shape, "float32"))
    return StateGroup(spec.recurrent_layers, (tuple(tensors),) * len(spec.recurrent_layers))


def state_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of one request's state; 0 without recurrent layers."""
    group = state_group(spec, dtype)
    return group.bytes_per_place if group is not None else 0
