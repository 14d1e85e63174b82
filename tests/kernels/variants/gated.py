"""kernels/gated.py at the widths of Llama-3.1-8B and Gemma 3 4B."""

from localllm.kernels.gated import _gated_kernel
from tests.kernels.ahead_of_time import Variant


def plain(
    name: str, width: int, activation: str, archs: tuple[int, ...], dtype: str = "bf16", hip: bool = False,
    limit: float = 0.0,
) -> Variant:  # fmt: skip
    return Variant(
        name,
        _gated_kernel,
        signature={
            "gate_up_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "stride": "i32",
        },
        constants={
            "WIDTH": width,
            "ACTIVATION": activation,
            "LIMIT": limit,
            "BLOCK": 1024,
            "PDL": False,
        },
        aligned=("stride",),
        archs=archs,
        max_registers=40,
        hip=hip,
    )


VARIANTS = [
    plain("SiLU, 14336 wide, bf16", 14336, "silu", (80, 89, 90, 120), hip=True),
    plain("SiLU, 14336 wide, fp16", 14336, "silu", (75,), "fp16"),
    plain("SiLU up to 16, 1280 wide, bf16", 1280, "silu", (80, 89, 90, 120), limit=16.0),
    plain("GELU by tanh, 10240 wide, bf16", 10240, "gelu_tanh", (80, 89, 90, 120)),
    plain("GELU, 10240 wide, bf16", 10240, "gelu", (80, 89, 90, 120)),
]
