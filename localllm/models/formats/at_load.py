"""`--quantization int4|int8|fp8`: quantise the matrices of a 16-bit checkpoint while loading.

    int4    16 evenly spaced values for each 128 weights, rounded to nearest
    int8    255 values for each output; activations are unchanged
    fp8     e4m3 with a scale for each output; activations too if the GPU multiplies in fp8

One matrix at a time, so peak memory is the quantised model so far plus one matrix. Embeddings, norms, routers and the
head are not quantised: they are a small and the most sensitive part of the weights.
torch and the kernels are imported only where a matrix is quantised, so that a memory plan needs neither.
Does not know: how a matrix is read (weights/weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.errors import UnsupportedOption
from localllm.models.formats.registry import FORMATS, linear_format, method_of

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.kernels.quantized_weight import QuantizedWeight

GROUP = 128


@dataclass(frozen=True, slots=True)
class AtLoad:
    """One way to quantise: its name, and functions that quantise a matrix or, on `meta`, return its empty result."""

    name: str
    runs_as: str
    _quantize: Callable[[Tensor], QuantizedWeight]
    _meta_matrix: Callable[[Tensor], QuantizedWeight]
    _group: int = 1

    def takes(self, stems: Sequence[str]) -> bool:
        """Return whether the matrices of these names (Llama's) are quantised. The small ones that give a recurrent
        layer its rates, in_proj_a and in_proj_b, are not: their errors would add up over all tokens."""
        return stems[0].startswith("model.layers.") and stems[0].endswith(_QUANTIZED)

    def widened(self, columns: range, total: int) -> range:
        """Return the columns of a plain matrix with `total` that have to be read so that those in `columns` keep their
        groups, and so their values.

        int8 and fp8 have no groups along a row: an output's scale follows from the columns that are read, and is never
        coarser than that of the whole row. Their values differ from the whole matrix's by rounding.
        """
        from localllm.models.formats.blocks import whole_blocks

        return whole_blocks(columns, self._group, total)

    def __call__(self, weight: Tensor) -> QuantizedWeight:
        return self._meta_matrix(weight) if weight.is_meta else self._quantize(weight)


def _int4(weight: Tensor) -> QuantizedWeight:
    from localllm.kernels.int4_linear import quantize_int4

    return quantize_int4(weight, GROUP)


def _meta_int4(weight: Tensor) -> QuantizedWeight:
    import torch

    from localllm.kernels.int4_linear import meta_int4

    scales = torch.float16 if weight.dtype == torch.float32 else weight.dtype
    return meta_int4((weight.shape[0], weight.shape[1]), GROUP, scales, zeros=True)


def _int8(weight: Tensor) -> QuantizedWeight:
    from localllm.kernels.int8_linear import quantize_int8

    return quantize_int8(weight)


def _meta_int8(weight: Tensor) -> QuantizedWeight:
    import torch

    from localllm.kernels.int8_linear import Int8Weight

    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
    return Int8Weight(torch.empty(weight.shape, dtype=torch.int8, device="meta"), scales)


def _fp8(weight: Tensor) -> QuantizedWeight:
    from localllm.kernels.fp8_linear import quantize_fp8

    return quantize_fp8(weight, "channel")


def _meta_fp8(weight: Tensor) -> QuantizedWeight:
    from localllm.models.formats.fp8 import meta_fp8

    return meta_fp8((weight.shape[0], weight.shape[1]), in_blocks=False, static=False)


_QUANTIZED = ("_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_qkvz")
"""How the stems of matrices end that are quantised at load."""
AT_LOAD: Mapping[str, AtLoad] = {
    "int4": AtLoad(f"int4 made at load, groups of {GROUP}", "packed int4", _int4, _meta_int4, GROUP),
    "int8": AtLoad("int8 made at load, per output", "int8", _int8, _meta_int8),
    "fp8": AtLoad("FP8 made at load, per output", "fp8", _fp8, _meta_fp8),
}


def at_load(asked: str | None, stored: Mapping[str, Any] | None) -> AtLoad | None:
    """Return what `--quantization asked` does to a checkpoint with this quantization_config; None: nothing.

    Raises `UnsupportedOption` if it is not possible.
    """
    method = None if stored is None else method_of(stored) or "no method named"
    if asked is None or asked == method:
        return None
    if method is not None:
        raise UnsupportedOption(
            f"--quantization {asked} does not fit this checkpoint.",
            f"It is quantised already: {method}. Quantised weights cannot be quantised again.",
            f"Leave the flag out, say --quantization {method}, or name the unquantised checkpoint.",
            param="quantization",
        )
    if asked in AT_LOAD:
        return AT_LOAD[asked]
    known = asked in FORMATS
    raise UnsupportedOption(
        f"--quantization {asked} {'does not fit this checkpoint' if known else 'is not known'}.",
        f"This checkpoint is not quantised; supported at load: {', '.join(AT_LOAD)}.",
        f"--quantization int4, or name a checkpoint that is {asked}." if known else "--quantization int4",
        param="quantization",
    )


def quantization_in_words(
    stored: Mapping[str, Any] | None, asked: str | None = None, device: str | None = None, cpu_weights: str = "fast"
) -> str:
    """Describe the stored or requested quantisation and how it runs; empty: none. device: if known."""
    way = at_load(asked, stored) or linear_format(stored)
    if way is None:
        return ""
    if device != "cpu":
        return f"{way.name} · runs as {way.runs_as}"
    from localllm.kernels.cpu.pack import describe_layout

    return f"{way.name} · on this CPU: {describe_layout(cpu_weights)}"


def quantization_notes(stored: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return sentences on what runs differently than the checkpoint says."""
    format = linear_format(stored)
    return () if format is None else tuple(format.notes)
