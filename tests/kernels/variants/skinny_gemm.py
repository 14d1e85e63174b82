"""Decode's matrix products at the shapes of Llama-3.1-8B and Qwen2.5-0.5B, as `skinny_gemm_tile` launches them."""

from typing import Any

from localllm.kernels.launch import next_power_of_2
from localllm.kernels.skinny_gemm import PREFETCHED_LINES, _skinny_gemm_kernel, num_stages, skinny_gemm_tile
from tests.kernels.ahead_of_time import Variant

QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)  # 8B
SMALL_QKV, SMALL_DOWN = (1152, 896), (896, 4864)  # 0.5B
WITH_TMA, WITHOUT = (90, 120), (80, 89)


def skinny(
    name: str,
    rows: int,
    shape: tuple[int, int],
    kind: str = "float",
    scales: str = "none",
    dtype: str = "bf16",
    archs: tuple[int, ...] = WITH_TMA,
    *,
    zeros: bool = False,
    serial: int = 0,
    plain: bool = False,
    activation: str | None = None,
    adds: bool = False,
    squares: int = 0,
    **budget: Any,
) -> Variant:
    """serial: splits that one program takes in turn, in deterministic mode's tiles. plain: for what is not NVIDIA.
    activation: of a product of gate and up. adds: y to the stream. squares: parts of the sum of x's squares."""
    (n, k), new = shape, archs[0] >= 90  # with TMA and early launch
    x_bytes = 4 if dtype == "fp32" else 2
    tile = skinny_gemm_tile(rows, n, k, x_bytes if kind == "float" else 1, x_bytes, scales == "block", archs[0])
    if serial:
        tile = tile._replace(block_m=64, block_n=64, block_k=64, split_k=serial, num_stages=4)
    stages = num_stages(tile, kind, archs[0], tma=new, ptx=not plain, gated=activation is not None)
    packed = 1 if kind == "float" else 2
    stored = dtype if kind == "float" else "i16"
    tile_of_w = f"2,{tile.block_n // 2}" if activation else f"{tile.block_n}"
    constants = {
        "KIND": kind, "SCALES": scales, "HAS_ZEROS": zeros, "HAS_BIAS": True, "ACTIVATION": activation,
        "SQUARES": next_power_of_2(squares), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "EVEN_K": k % tile.block_k == 0, "SPLIT_K": tile.split_k, "SERIAL": serial > 0, "TMA": new, "PTX": not plain,
        "PDL": new,
    } | ({} if new else {"weight_ptr": None})  # fmt: skip
    constants |= {} if adds else dict.fromkeys(("residual_ptr", "gamma_ptr", "sum_squares_ptr"))
    constants |= {} if squares else {"x_squares_ptr": None}
    is_merged = tile.split_k > 1 and not serial
    constants |= {} if is_merged else {"parts_ptr": None, "counters_ptr": None}
    signature = {
        "out_ptr": f"*{dtype}", "parts_ptr": "*fp32", "counters_ptr": "*i32",
        "x_ptr": f"*{dtype}",
        "weight": f"tensordesc<{stored}[{tile_of_w},{tile.block_k // packed}]>" if new else f"*{stored}",
        "weight_ptr": f"*{stored}", "scales_ptr": "*u8" if scales == "group" else "*fp32", "zeros_ptr": "*i8",
        "bias_ptr": f"*{dtype}",
        "residual_ptr": f"*{dtype}", "gamma_ptr": "*fp32", "sum_squares_ptr": "*fp32", "x_squares_ptr": "*fp32",
        "x_eps": "fp32", "num_squares": "i32",
        "rows": "i32", "N": "i32", "K": "i32", "x_stride": "i32", "weight_stride": "i32", "scales_stride": "i32",
    }  # fmt: skip
    return Variant(
        f"{name}, {dtype}, {'TMA' if new else 'pointers'}",
        _skinny_gemm_kernel,
        signature,
        constants,
        num_warps=tile.num_warps,
        num_stages=stages,
        aligned=("N", "K", "x_stride", "weight_stride", "num_squares"),
        archs=archs,
        elements_per_loop=tile.block_n * tile.block_k,
        prefetches=PREFETCHED_LINES.value // (32 * tile.num_warps) if new else 0,
        not_early=("LDG", "LDGSTS", "UTMALDG"),
        hands_over=is_merged,
        options={"launch_pdl": True} if new else {},
        **budget,
    )


NO_CONVERSIONS = ("I2F", "F2F")
HGMMA: dict[str, Any] = {"mma": "HGMMA", "max_instructions_per_element": 4.0}
BYTES: dict[str, Any] = {"mma": "HGMMA", "max_instructions_per_element": 5.25, "forbidden": NO_CONVERSIONS}
E4M3_BLOCK: dict[str, Any] = {**BYTES, "max_instructions_per_element": 6.5}

SILU: dict[str, Any] = {"activation": "silu"}
NORMED: dict[str, Any] = {"squares": 128, **SILU}

# With splits, shared memory has room for one to three programs of such a tile, whatever their registers: Triton 3.6
# takes up to 151 where 3.9 takes 109.
VARIANTS = [
    skinny("8B o to stream, 33-64 rows, split, e4m3", 64, OUT, "e4m3", "channel", adds=True, archs=(90,)),
    skinny("1B down to stream, 1-8 rows, split", 8, (2048, 8192), adds=True, archs=(90, 120)),
    skinny("8B gate_up and SiLU, 1-16 rows", 16, GATE_UP, **HGMMA, max_registers=96, **SILU, archs=(90,)),
    skinny("8B gate_up and SiLU, 33-64 rows", 64, GATE_UP, **HGMMA, max_registers=96, **SILU, archs=(90,)),
    skinny("8B gate_up and SiLU, e4m3, 1-16 rows", 16, GATE_UP, "e4m3", "channel", **BYTES, **SILU, archs=(90,)),
    skinny("8B gate_up and SiLU, e4m3 by block", 16, GATE_UP, "e4m3", "block", **E4M3_BLOCK, **SILU, archs=(90,)),
    skinny("8B gate_up and SiLU, 1-16 rows", 16, GATE_UP, **SILU, archs=(120,)),
    skinny("8B gate_up and SiLU, 33-64 rows", 64, GATE_UP, **SILU, archs=(89,)),
    skinny("8B o to stream, 1-16 rows", 16, OUT, mma="HMMA", max_registers=96, adds=True, archs=(90,)),
    skinny("8B o to stream", 16, OUT, adds=True, archs=(120,)),
    skinny("8B qkv of pending norm, 1-8 rows", 8, QKV, mma="HMMA", max_registers=96, squares=128, archs=(90,)),
    skinny("8B qkv of pending norm, 9-16 rows, split", 16, QKV, **HGMMA, max_registers=152, squares=128, archs=(90,)),
    skinny("8B gate_up and SiLU, pending norm", 16, GATE_UP, **HGMMA, max_registers=128, **NORMED, archs=(90,)),
    skinny("8B gate_up and SiLU, pending norm", 16, GATE_UP, **NORMED, archs=(89,)),
    skinny("8B gate_up and GELU, B200", 64, GATE_UP, activation="gelu", archs=(100,), often=False),
    skinny("8B o, 1-16 rows", 16, OUT, mma="HMMA", max_instructions_per_element=6.0, max_registers=96, archs=(90,)),
    skinny("8B down, 9-16 rows, split", 16, DOWN, **HGMMA, max_registers=120, archs=(90,)),
    skinny("8B gate_up, 1-16 rows", 16, GATE_UP, **HGMMA, max_registers=64, archs=(90,)),
    skinny("8B gate_up, 33-64 rows", 64, GATE_UP, **HGMMA, max_registers=80, archs=(90,)),
    skinny("8B gate_up, 33-64 rows, RTX 50", 64, GATE_UP, archs=(120,)),
    skinny("0.5B down, 1-8 rows, split", 8, SMALL_DOWN, mma="HMMA", max_registers=96, archs=(90,)),
    skinny("8B down, deterministic, splits in turn", 64, DOWN, serial=2, mma="HGMMA", max_registers=128, archs=(90,)),
    skinny("8B gate_up, 33-64 rows", 64, GATE_UP, archs=(89,)),
    skinny("any shape", 16, (1152, 900), dtype="fp32", archs=(90,)),
    skinny("8B gate_up, before tensor cores", 16, GATE_UP, dtype="fp16", archs=(75,), hip=True),
    skinny("8B qkv int8, 1-8 rows", 8, QKV, "int8", "channel", **BYTES, max_registers=168, archs=(90,)),
    skinny("8B qkv int8, 9-16 rows, split", 16, QKV, "int8", "channel", **BYTES, max_registers=128, archs=(90,)),
    skinny("8B down int8, 33-64 rows, split", 64, DOWN, "int8", "channel", **BYTES, max_registers=192, archs=(90,)),
    skinny("8B down int8, 33-64 rows, RTX 50", 64, DOWN, "int8", "channel", archs=(120,)),
    skinny("8B qkv int8 with zeros, 17-32 rows", 32, QKV, "int8", "channel", **BYTES, zeros=True, archs=(90,)),
    skinny("0.5B qkv int8, 1-16 rows", 16, SMALL_QKV, "int8", "channel", "fp16", **BYTES, archs=(90,)),
    skinny("8B gate_up int8, 33-64 rows", 64, GATE_UP, "int8", "channel", archs=(80,)),
    skinny("8B gate_up int8, no PTX", 16, GATE_UP, "int8", "channel", archs=(80,), plain=True, hip=True),
    skinny("8B qkv e4m3, 1-8 rows", 8, QKV, "e4m3", "channel", **BYTES, max_registers=168, archs=(90,)),
    skinny("8B gate_up e4m3, 33-64 rows", 64, GATE_UP, "e4m3", "channel", **BYTES, max_registers=168, archs=(90,)),
    skinny("8B gate_up e4m3, 1-16 rows", 16, GATE_UP, "e4m3", "channel", "fp16", **BYTES, archs=(90,)),
    skinny("8B gate_up e4m3 by block, 1-16 rows", 16, GATE_UP, "e4m3", "block", **BYTES, archs=(90,)),
    skinny("8B gate_up e4m3 by block, 33-64 rows", 64, GATE_UP, "e4m3", "block", **E4M3_BLOCK, archs=(90,)),
    skinny("8B gate_up e4m3, 1-16 rows", 16, GATE_UP, "e4m3", "channel", archs=(89,)),
    skinny("8B gate_up MXFP8, 1-16 rows", 16, GATE_UP, "e4m3", "group", mma="HGMMA", archs=(90,)),
    skinny("8B gate_up MXFP8, 33-64 rows", 64, GATE_UP, "e4m3", "group", mma="HGMMA", archs=(90,)),
    skinny("8B gate_up MXFP8 and SiLU, 1-16 rows", 16, GATE_UP, "e4m3", "group", dtype="fp16", **SILU, archs=(90,)),
    skinny("8B gate_up MXFP8 and SiLU, 1-16 rows", 16, GATE_UP, "e4m3", "group", **SILU, archs=(120,)),
    skinny("8B gate_up MXFP8, 1-16 rows", 16, GATE_UP, "e4m3", "group", archs=(80, 89)),
    skinny(
        "8B gate_up MXFP8, no PTX",
        16,
        GATE_UP,
        "e4m3",
        "group",
        archs=(80,),
        plain=True,
        hip=True,
        max_hip_spills=48,  # by Triton 3.7, for gfx11
    ),
    skinny(
        "8B gate_up e4m3 by block, no PTX",
        16,
        GATE_UP,
        "e4m3",
        "block",
        archs=(80,),
        plain=True,
        hip=True,
        max_hip_spills=3,
    ),
    skinny("8B gate_up, 33-64 rows, B200", 64, GATE_UP, archs=(100,), often=False),
    skinny("8B gate_up e4m3, 1-16 rows, B200", 16, GATE_UP, "e4m3", "channel", archs=(100,), often=False),
    skinny("8B gate_up, 33-64 rows, RTX 30", 64, GATE_UP, archs=(86,), often=False),
]
