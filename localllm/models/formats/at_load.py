"""`--quantization int4|int8|fp8`: quantise the matrices of a 16-bit checkpoint while loading.

    int4    16 evenly spaced values for each 128 weights, rounded to nearest
    int8    255 values for each output; activations are unchanged
    fp8     e4m3 with a scale for each output; activations too if the GPU multiplies in fp8

One matrix at a time, so peak memory is the quantised model so far plus one matrix. Embeddings, norms, routers and the
head are not quantised: they are a small and the most sensitive part of the weights. In small encoder-decoders, of which
the head is half, int8 takes it too where a CPU multiplies bytes (`takes_head`).
Does not know: how a matrix is read (weights/weights.py), whether a checkpoint may be quantised (registry.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.cpu.int8 import has_int8
from localllm.kernels.fp8_linear import quantize_fp8
from localllm.kernels.int4_linear import meta_int4, quantize_int4
from localllm.kernels.int8_linear import Int8Weight, quantize_int8
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.blocks import whole_blocks
from localllm.models.formats.fp8 import meta_fp8
from localllm.models.formats.registry import GROUP, load_method


@dataclass(frozen=True, slots=True)
class AtLoad:
    """One way to quantise: functions that quantise a matrix or, on `meta`, return its empty result."""

    _quantize: Callable[[Tensor], QuantizedWeight]
    _meta_matrix: Callable[[Tensor], QuantizedWeight]
    _group: int = 1

    def takes(self, stems: Sequence[str]) -> bool:
        """Return whether the matrices of these names (Llama's) are quantised. The small ones that give a recurrent
        layer its rates, in_proj_a and in_proj_b, are not: their errors would add up over all tokens."""
        return stems[0].startswith("model.layers.") and stems[0].endswith(_QUANTIZED)

    def takes_head(self, device: torch.device, cpu_weights: str) -> bool:
        """Return whether the head of an encoder-decoder is quantised, and an encoder of sound before it: by int8, on a
        CPU with a fast product of bytes."""
        return self is AT_LOAD["int8"] and device.type == "cpu" and cpu_weights != "exact" and has_int8()

    def widened(self, columns: range, total: int) -> range:
        """Return the columns of a plain matrix with `total` that have to be read so that those in `columns` keep their
        groups, and so their values.

        int8 and fp8 have no groups along a row: an output's scale follows from the columns that are read, and is never
        coarser than that of the whole row. Their values differ from the whole matrix's by rounding.
        """
        return whole_blocks(columns, self._group, total)

    def __call__(self, weight: Tensor) -> QuantizedWeight:
        return self._meta_matrix(weight) if weight.is_meta else self._quantize(weight)


def _meta_int4(weight: Tensor) -> QuantizedWeight:
    scales = torch.float16 if weight.dtype == torch.float32 else weight.dtype
    return meta_int4((weight.shape[0], weight.shape[1]), GROUP, scales, zeros=True)


def _meta_int8(weight: Tensor) -> QuantizedWeight:
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
    return Int8Weight(torch.empty(weight.shape, dtype=torch.int8, device="meta"), scales)


def _meta_fp8(weight: Tensor) -> QuantizedWeight:
    return meta_fp8((weight.shape[0], weight.shape[1]), None, static=False)


_QUANTIZED = ("_proj", *(f".in_proj_{inputs}" for inputs in ("qkv", "q", "k", "v", "z", "qkvz")))
"""How the stems of matrices end that are quantised at load."""
AT_LOAD: Mapping[str, AtLoad] = {
    "int4": AtLoad(lambda weight: quantize_int4(weight, GROUP), _meta_int4, GROUP),
    "int8": AtLoad(quantize_int8, _meta_int8),
    "fp8": AtLoad(lambda weight: quantize_fp8(weight, "channel"), _meta_fp8),
}
"""By the names in registry.py."""


def of_sound(asked: str | None, device: torch.device, cpu_weights: str) -> AtLoad | None:
    """Return what `--quantization asked` does to the encoder of a model that transcribes; None: nothing."""
    method = at_load(asked, None)
    return method if method is not None and method.takes_head(device, cpu_weights) else None


def at_load(asked: str | None, stored: Mapping[str, Any] | None) -> AtLoad | None:
    """Return what `--quantization asked` does to a checkpoint with this quantization_config; None: nothing.

    Raises `UnsupportedOption` if it is not possible.
    """
    method = load_method(asked, stored)
    return None if method is None else AT_LOAD[method]
