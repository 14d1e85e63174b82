"""Products with both sides in 8 bits, as `w8a8_tile` launches them."""

from typing import Any

from localllm.kernels.w8a8_gemm import _w8a8_gemm_kernel, w8a8_tile
from tests.kernels.ahead_of_time import Variant


def w8a8(
    name: str, rows: int, kind: str, archs: tuple[int, ...], *, blocks: bool = False, zeros: bool = False, **budget: Any
) -> Variant:
    tile, tma = w8a8_tile(rows, 4096, 4096, archs[0]), archs[0] >= 90
    operand = lambda height: f"tensordesc<{kind}[{height},{tile.block_k}]>" if tma else f"*{kind}"  # noqa: E731
    signature = {
        "out_ptr": "*bf16", "x": operand(tile.block_m), "weight": operand(tile.block_n),
        "x_scales_ptr": "*fp32", "scales_ptr": "*fp32", "zeros_ptr": "*i8", "bias_ptr": "*bf16",
        "rows": "i32", "N": "i32", "K": "i32", "x_stride": "i32", "weight_stride": "i32",
        "x_scales_stride": "i32", "scales_stride": "i32",
    }  # fmt: skip
    constants = {
        "INT8": kind == "i8", "BLOCK_SCALES": blocks, "HAS_ZEROS": zeros, "HAS_BIAS": True, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN_K": True, "TMA": tma,
    }  # fmt: skip
    return Variant(
        f"{name}, {'TMA' if tma else 'pointers'}",
        _w8a8_gemm_kernel,
        signature,
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=("N", "K", "x_stride", "weight_stride"),
        archs=archs,
        **budget,
    )


VARIANTS = [
    w8a8("e4m3 per channel", 128, "fp8e4nv", (90,), mma="QGMMA"),
    w8a8("e4m3 by block", 128, "fp8e4nv", (90, 120), blocks=True, mma="QGMMA"),
    w8a8("e4m3 per channel", 128, "fp8e4nv", (89,)),
    w8a8("int8 with zeros", 128, "i8", (90,), zeros=True, mma="IGMMA"),
    w8a8("int8, RTX 50", 128, "i8", (120,)),
    w8a8("int8, 33-64 rows, RTX 50", 64, "i8", (120,)),
    w8a8("int8, 33-64 rows", 64, "i8", (80,), hip=True, max_hip_spills=121),
]
