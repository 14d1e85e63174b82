"""kernels/quantize.py at the width of Llama-3.1-8B's attention output."""

from localllm.kernels.quantize import _quantize_kernel
from tests.kernels.ahead_of_time import Variant


def variant(name: str, to: str, native: bool, archs: tuple[int, ...]) -> Variant:
    return Variant(
        name,
        _quantize_kernel,
        signature={"x_ptr": "*bf16", "out_ptr": "*u8", "scale_ptr": "*fp32"},
        constants={"WIDTH": 4096, "TO": to, "NATIVE_FP8": native, "BLOCK": 4096, "PDL": False},
        num_warps=8,
        archs=archs,
        max_registers=40,
        hip=not native and to == "fp8",
    )


VARIANTS = [
    variant("to fp8, 4096 wide, bf16", "fp8", True, (89, 90, 120)),
    variant("to fp8 by hand, 4096 wide, bf16", "fp8", False, (80,)),
    variant("to int8, 4096 wide, bf16", "int8", False, (80, 89, 90, 120)),
]
