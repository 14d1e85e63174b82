"""The methods that quantise a checkpoint's matrices, stored or at load: which one applies, and how users read of it.

Decided from the names and dictionaries of the settings and config.json alone, so a plan or a page needs no torch. Only
describing how stored matrices run imports their format.
Does not know: tensors, how a matrix is quantised (at_load.py) or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from localllm.errors import UnsupportedOption
from localllm.models.formats.registry import FORMATS, linear_format, method_of

GROUP = 128
"""Weights in a row that share a scale in int4 made at load."""


class LoadMethod(NamedTuple):
    """One way to quantise at load, in words for users."""

    name: str
    runs_as: str


LOAD_METHODS: Mapping[str, LoadMethod] = {
    "int4": LoadMethod(f"int4 made at load, groups of {GROUP}", "packed int4"),
    "int8": LoadMethod("int8 made at load, per output", "int8"),
    "fp8": LoadMethod("FP8 made at load, per output", "fp8"),
}


def load_method(asked: str | None, stored: Mapping[str, Any] | None) -> str | None:
    """Return the key in `LOAD_METHODS` by which `--quantization asked` quantises a checkpoint with this
    quantization_config; None: nothing is quantised at load.

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
    if asked in LOAD_METHODS:
        return asked
    known = asked in FORMATS
    raise UnsupportedOption(
        f"--quantization {asked} {'does not fit this checkpoint' if known else 'is not known'}.",
        f"This checkpoint is not quantised; supported at load: {', '.join(LOAD_METHODS)}.",
        f"--quantization int4, or name a checkpoint that is {asked}." if known else "--quantization int4",
        param="quantization",
    )


def quantization_in_words(
    stored: Mapping[str, Any] | None, asked: str | None = None, device: str | None = None, cpu_weights: str = "fast"
) -> str:
    """Describe the stored or requested quantisation and how it runs; empty: none. device: if known. For a CPU the
    processor is tried, which imports torch."""
    method = load_method(asked, stored)
    way = linear_format(stored) if method is None else LOAD_METHODS[method]
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
