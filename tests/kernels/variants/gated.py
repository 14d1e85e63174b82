"""kernels/gated.py at the widths of Llama-3.1-8B and Gemma 3 4B."""

from __future__ import annotations

from localllm.kernels.gated import _gated_kernel, _gated_quantized_kernel
from tests.kernels.ahead_of_time import Variant


def plain(
    name: str, width: int, activation: str, archs: tuple[int, ...], dtype: str = "bf16", hip: bool = False
) -> Variant:
    return Variant(
        name,
        _gated_kernel,
        signature={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "stride": "i32"},
        constants={"WIDTH": width, "ACTIVATION": activation, "BLOCK": 1024, "PDL": False},
        aligned=("stride",),
        archs=archs,
        max_registers=40,
        hip=hip,
    )


def quantized(name: str, width: int, to: str, native: bool, archs: tuple[int, ...]) -> Variant:
    return Variant(
        name,
        _gated_quantized_kernel,
        signature={"gate_up_ptr": "*bf16", "out_ptr": "*u8", "scale_ptr": "*fp32", "stride": "i32"},
        constants={"WIDTH": width, "ACTIVATION": "silu", "TO": to, "NATIVE_FP8": native, "BLOCK": 4096, "PDL": False},
        num_warps=8,
        aligned=("stride",),
        archs=archs,
        max_registers=56,
        hip=to == "int8",
    )


VARIANTS = [
    plain("SiLU, 14336 wide, bf16", 14336, "silu", (80, 89, 90, 120), hip=True),
    plain("SiLU, 14336 wide, fp16", 14336, "silu", (75,), "fp16"),
    plain("GELU by tanh, 10240 wide, bf16", 10240, "tanh", (80, 89, 90, 120)),
    plain("GELU, 10240 wide, bf16", 10240, "none", (80, 89, 90, 120)),
    quantized("SiLU to fp8, 14336 wide, bf16", 14336, "fp8", True, (89, 90, 120)),
    quantized("SiLU to int8, 14336 wide, bf16", 14336, "int8", False, (80, 89, 90, 120)),
]
