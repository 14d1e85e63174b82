"""kernels/rms_norm.py at the widths of Llama-3.1-8B, Qwen2.5-0.5B and Gemma 3."""

from localllm.kernels.rms_norm import _rms_norm_kernel, norm_launch
from tests.kernels.ahead_of_time import Variant


def variant(
    name: str, width: int, *, dtype: str = "bf16", add: bool = False, pdl: bool = False, hip: bool = False,
    archs: tuple[int, ...] = (80, 89, 90, 120), max_registers: int = 40,
) -> Variant:  # fmt: skip
    block, num_warps = norm_launch(width)
    pointers = {"x_ptr": f"*{dtype}", "weight_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    residual = {"residual_ptr": f"*{dtype}" if add else None}
    return Variant(
        name,
        _rms_norm_kernel,
        signature={
            **pointers,
            **{k: v for k, v in residual.items() if v},
            "x_stride": "i32",
            "x_head_stride": "i32",
            "eps": "fp32",
        },
        constants={
            **{k: None for k, v in residual.items() if not v},
            "WIDTH": width,
            "HEADS": 1,
            "BLOCK": block,
            "PDL": pdl,
        },
        num_warps=num_warps,
        aligned=("x_stride", "x_head_stride"),
        archs=archs,
        max_registers=max_registers,
        hip=hip,
        options={"launch_pdl": True} if pdl else {},
    )


VARIANTS = [
    variant("after a residual add, 4096 wide, bf16", 4096, add=True, archs=(80, 89, 90, 120), hip=True),
    variant("after a residual add, launched early, 4096 wide, bf16", 4096, add=True, pdl=True, archs=(90, 120)),
    variant("after a residual add, 4096 wide, fp16", 4096, add=True, dtype="fp16", archs=(75,)),
    variant("896 wide, bf16", 896),
]
