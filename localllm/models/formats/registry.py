"""Open a checkpoint in its file format, and find the format that reads its matrices.

The format of matrices follows from the method in config.json or from the file type, or is chosen at load. Plans and
pages need names and dictionaries of the settings and config.json alone, so a format's module is imported only when a
checkpoint needs it or its matrices are described, and torch with it.
Does not know: what the tensors mean, how a matrix is quantised (at_load.py) or read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.errors import UnsupportedModel, UnsupportedOption
from localllm.models.formats.checkpoint import Checkpoint, is_gguf, layer_forms

if TYPE_CHECKING:
    from localllm.models.formats.linear_format import LinearFormat


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in folder or GGUF file `path`. Raises `CorruptModel`, `UnsupportedModel`, `ModelNotFound`."""
    if is_gguf(path):
        from localllm.models.formats.gguf.checkpoint import open_gguf

        return open_gguf(path)
    from localllm.models.formats.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


class Headers:
    """The headers of a checkpoint, which are read when they are first needed, and what follows from them."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def open(self) -> Checkpoint:
        """Return the checkpoint. A GGUF file is opened again, since its map is closed after each use; `read_header`
        keeps what was parsed."""
        return open_checkpoint(self.path) if is_gguf(self.path) else self._folder

    @cached_property
    def _folder(self) -> Checkpoint:
        return open_checkpoint(self.path)

    @cached_property
    def stored_bytes(self) -> int:
        """The exact bytes of all tensors as stored."""
        with self.open() as checkpoint:
            return sum(info.num_bytes for info in checkpoint.tensors.values())

    @cached_property
    def layer_forms(self) -> Mapping[int, Hashable]:
        """The result of `layer_forms` for the checkpoint's tensors."""
        with self.open() as checkpoint:
            return layer_forms(checkpoint.tensors)


FORMATS: dict[str, str] = {
    "awq": "awq:awq",
    "bitsandbytes": "bitsandbytes:bitsandbytes",
    "compressed-tensors": "compressed_tensors:compressed_tensors",
    "fbgemm_fp8": "fp8:fbgemm_fp8",
    "fp8": "fp8:fp8",
    "gguf": "gguf.matrices:gguf_matrices",
    "gptq": "gptq:gptq",
    "modelopt": "compressed_tensors:modelopt",
    "mxfp4": "fp4:mxfp4",
    "mxfp8": "fp8:mxfp8",
}
"""`quant_method` -> "module:function" in this folder; the function takes the quantization_config."""


def method_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the quantisation method; old bitsandbytes configs only name their bits."""
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"
    method = quantization.get("quant_method")
    return None if method is None else str(method)


def linear_format(quantization: Mapping[str, Any] | None) -> LinearFormat | None:
    """Return the format; None: all matrices are unquantised. Raises `UnsupportedModel`."""
    if quantization is None:
        return None
    method = method_of(quantization)
    if method not in FORMATS:
        raise UnsupportedModel(
            f"This checkpoint is quantised ({method or 'no method named'}).",
            f"Supported: {', '.join(sorted(FORMATS)) or 'float32, bfloat16 and float16 weights'}.",
            "Use another quantisation, or the unquantised repository, of the same model.",
        )
    module, function = FORMATS[method].split(":")
    make: Callable[[Mapping[str, Any]], LinearFormat] = getattr(
        import_module(f"localllm.models.formats.{module}"), function
    )
    return make(quantization)


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


def quantization_notes(stored: Mapping[str, Any] | None, device: str) -> tuple[str, ...]:
    """Return sentences on what runs differently on a device (cpu, cuda) than the checkpoint says."""
    format = linear_format(stored)
    return () if format is None else tuple(format.notes_on(device))
