"""kernels/layer_norm.py at the width of a 7B model."""

from localllm.kernels.layer_norm import _layer_norm_kernel
from localllm.kernels.rms_norm import norm_launch
from tests.kernels.ahead_of_time import Variant

BLOCK, NUM_WARPS = norm_launch(4096)

VARIANTS = [
    Variant(
        "after a residual add, 4096 wide, bf16",
        _layer_norm_kernel,
        signature={
            "x_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "bias_ptr": "*fp32",
            "out_ptr": "*bf16",
            "x_stride": "i32",
            "eps": "fp32",
        },
        constants={"WIDTH": 4096, "BLOCK": BLOCK, "PDL": False},
        num_warps=NUM_WARPS,
        aligned=("x_stride",),
        archs=(80, 89, 90, 120),
        max_registers=40,
        hip=True,
    )
]
