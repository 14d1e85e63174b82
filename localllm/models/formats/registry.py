"""Find the format that reads a checkpoint's matrices, by the method in its config.json or its file type.

A format's module is imported only when a checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from localllm.errors import UnsupportedModel

if TYPE_CHECKING:
    from localllm.models.formats.linear_format import LinearFormat

FORMATS: dict[str, str] = {
    "awq": "awq:awq",
    "bitsandbytes": "bitsandbytes:bitsandbytes",
    "compressed-tensors": "compressed_tensors:compressed_tensors",
    "fbgemm_fp8": "fp8:fbgemm_fp8",
    "fp8": "fp8:fp8",
    "gguf": "gguf_matrices:gguf_matrices",
    "gptq": "gptq:gptq",
    "modelopt": "modelopt:modelopt",
    "mxfp4": "mxfp4:mxfp4",
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
