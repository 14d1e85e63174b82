"""W4A16 and GGUF at the shapes of an 8B model. Instructions a weight: 4.3 TB/s leave 3.8 to 4.1 at 4.25 bits a weight
and twice that at 8.5, so what is above is bound by issue, not by memory."""

from typing import Any

import torch

from localllm.kernels.fused_epilogue import parts_at_once
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.launch import next_power_of_2
from localllm.kernels.planar.kernels import (
    PREFETCHED_LINES,
    dequantize_kernel,
    planar_linear_kernel,
    planar_tile,
    register_limit,
)
from localllm.kernels.planar.layout import ptx
from tests.kernels.ahead_of_time import Variant

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STRIDES = ("N", "K", "x_stride", "words_stride", "scales_stride")
OPTIONAL = ("zeros_ptr", "mins_ptr", "super_scales_ptr", "super_mins_ptr", "table_ptr", "bias_ptr")
POINTERS = ("parts_ptr", "counters_ptr", "residual_ptr", "gamma_ptr", "sum_squares_ptr", "x_squares_ptr")
STREAM = {"residual_ptr": "*{}", "gamma_ptr": "*fp32", "sum_squares_ptr": "*fp32"}


def _weight(
    *,
    bits: int = 4,
    group: int = 128,
    zeros: bool = False,
    mins: bool = False,
    steps: bool = False,
    table: tuple[float, ...] | None = None,
) -> tuple[dict[str, str], dict[str, Any]]:
    """(pointer types, constants) of one kind of weight; steps: small scales times 16-bit ones."""
    pointers = {"words_ptr": "*i16", "scales_ptr": "*i8" if steps else "*fp16"}
    pointers |= {"zeros_ptr": "*u8"} if zeros else {}
    pointers |= {"mins_ptr": "*i8" if steps else "*fp16"} if mins else {}
    pointers |= {"super_scales_ptr": "*fp16"} if steps else {}
    pointers |= {"super_mins_ptr": "*fp16"} if steps and mins else {}
    pointers |= {"table_ptr": "*fp32"} if table else {}
    zero = 8 if bits == 4 and not (zeros or mins or table) else 0
    constants = {"BITS": bits, "LANES": min(32, group), "GROUP": group, "SUPER_GROUP": 256, "ZERO": zero}
    return pointers, constants


def _gguf(name: str) -> dict[str, Any]:
    kind = BLOCK_TYPES[name]
    steps = kind.size == 256
    return {
        "bits": kind.bits,
        "group": kind.group,
        "mins": name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"),
        "steps": steps,
        "table": kind.table,
    }


def _linear(
    name: str,
    rows: int,
    dtype: str,
    budget: float = 0,
    registers: int = 255,
    archs: tuple[int, ...] = (90,),
    hip_spills: int = 0,
    plain: bool = False,
    activation: str | None = None,
    adds: bool = False,
    squares: int = 0,
    shape: tuple[int, int] | None = None,
    max_spills: int = 0,
    **kind: Any,
) -> Variant:
    """The out projection of an 8B model, with the tiles that its GPU gets; or gate and up of a 70B with activation.
    adds: y to the stream. squares: parts of the sum of x's squares."""
    pointers, constants = _weight(**kind)
    pdl = min(archs) >= 90
    lanes, bits, mins = constants["LANES"], constants["BITS"], "mins_ptr" in pointers
    n, k = shape or ((4096, 4096) if activation is None else (57344, 8192))
    tile = planar_tile(rows, n, k, bits, constants["GROUP"], mins, 132, wgmma=90 in archs)
    merges = tile.split > 1 or tile.num_warps == 8
    signature = {"y_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", **pointers}
    signature |= {"parts_ptr": "*fp32", "counters_ptr": "*i32"} if merges else {}
    signature |= {name: kind.format(dtype) for name, kind in STREAM.items()} if adds else {}
    signature |= {"x_squares_ptr": "*fp32"} if squares else {}
    signature |= {"x_eps": "fp32"} | dict.fromkeys(("num_squares", "M", *STRIDES), "i32")
    constants |= {
        "EVEN_K": True,
        "ASSEMBLY": "" if plain else ptx(bits, TYPES[dtype], kind.get("table")),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PARTS": parts_at_once(tile.split, tile.block_m * tile.block_n),
        "ALWAYS_SPLIT": tile.num_warps != 8,
        "ACTIVATION": activation,
        "SQUARES": next_power_of_2(squares),
        "PDL": pdl,
    }
    return Variant(
        name=f"{name}, {rows} rows, {dtype}{', no assembly' if plain else ''}",
        kernel=planar_linear_kernel,
        signature=signature,
        constants=constants | {p: None for p in (*OPTIONAL, *POINTERS) if p not in signature},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=STRIDES,
        archs=archs,
        max_registers=registers,
        max_spills=max_spills,
        # At 8 rows Triton 3.6 takes HMMA, whose tile has just as many, and fewer instructions with it.
        mma="HGMMA|HMMA" if tile.block_m == 8 else "HGMMA",
        hip=plain,
        max_hip_spills=hip_spills,
        forbidden=("I2F", "F2F"),
        elements_per_loop=tile.block_n * lanes * 16 // bits,
        max_instructions_per_element=budget,
        prefetches=PREFETCHED_LINES.value // (32 * tile.num_warps) if pdl else 0,
        hands_over=merges,
        not_early=("LDGSTS", "UTMALDG"),  # the first groups' scales are loaded
        options=({"launch_pdl": True} if pdl else {})
        | register_limit(
            tile,
            bits,
            constants["GROUP"],
            mins=mins,
            wgmma=90 in archs,
            reads_squares=squares > 0,
            gated=activation is not None,
        ),
    )


NO_BYTES = tuple(code / 16 for code in range(16))
AWQ, SHORT = "AWQ or GPTQ, groups of 128", "symmetric, groups of 32"
VARIANTS = [
    _linear(AWQ, 8, "bf16", 3.0, 112, zeros=True),
    _linear(AWQ, 16, "bf16", 3.0, 128, archs=(80, 89, 90, 120), zeros=True),
    _linear(AWQ, 16, "fp16", 3.0, 128, zeros=True),
    _linear(AWQ, 32, "bf16", 3.1, 176, zeros=True),
    _linear(AWQ, 64, "bf16", 3.5, 248, zeros=True),
    _linear(AWQ, 64, "bf16", archs=(80, 120), zeros=True),
    _linear(AWQ, 128, "bf16", 5.8, 224, zeros=True),
    _linear(f"{AWQ}, and SiLU", 16, "bf16", 3.0, 128, zeros=True, activation="silu"),
    _linear(f"{AWQ}, to stream", 16, "bf16", 3.0, 128, archs=(90, 120), zeros=True, adds=True),
    _linear(f"{AWQ}, of pending norm", 16, "bf16", 3.0, 128, zeros=True, squares=32),
    _linear(
        f"{AWQ}, and SiLU of pending norm, split",
        8,
        "bf16",
        3.0,
        112,
        zeros=True,
        activation="silu",
        squares=32,
        shape=(28672, 4096),
    ),
    _linear(
        f"{AWQ}, and SiLU of pending norm, split",
        16,
        "bf16",
        3.1,
        128,
        zeros=True,
        activation="silu",
        squares=32,
        shape=(28672, 4096),
    ),
    _linear(SHORT, 8, "bf16", 3.5, 128, group=32),
    _linear(SHORT, 16, "fp16", 3.8, 168, group=32),
    _linear(SHORT, 64, "fp16", 6.5, 200, archs=(90, 120), group=32),
    _linear("GGUF Q4_K", 16, "bf16", 5.9, 200, **_gguf("Q4_K")),
    _linear("GGUF Q4_K", 32, "bf16", 9.8, 200, archs=(89, 90), **_gguf("Q4_K")),
    _linear("GGUF IQ4_XS", 16, "bf16", 6.4, 160, **_gguf("IQ4_XS")),
    # Triton 3.6 and 3.7 take 140, so that a processor runs three programs instead of four; limited, they spill.
    _linear("GGUF Q3_K", 16, "bf16", 6.0, 144, **_gguf("Q3_K")),
    _linear("GGUF Q8_0", 16, "bf16", 4.8, 128, **_gguf("Q8_0")),
    _linear("GGUF Q6_K", 16, "bf16", 7.6, 128, **_gguf("Q6_K")),
    _linear(AWQ, 16, "fp16", archs=(80,), plain=True, zeros=True),
    _linear("GGUF IQ4_XS", 16, "bf16", archs=(80,), plain=True, hip_spills=932, **_gguf("IQ4_XS")),
    _linear("GGUF Q5_K", 16, "bf16", archs=(80,), plain=True, **_gguf("Q5_K")),
    # A table whose values are not bytes is looked up in memory, on every GPU.
    _linear("NF4, blocks of 64", 16, "bf16", archs=(80, 90), plain=True, hip_spills=782, group=64, table=NO_BYTES),
    # Triton has no MMA for Turing: it multiplies in fp32 lanes there, slow and right.
    _linear(AWQ, 16, "fp16", archs=(75,), zeros=True, max_spills=3),
]


_POINTERS, _CONSTANTS = _weight(zeros=True)
VARIANTS += [
    Variant(
        name="groups of 128 to bf16",
        kernel=dequantize_kernel,
        signature={
            "out_ptr": "*bf16",
            **_POINTERS,
            **dict.fromkeys(("N", "K", "words_stride", "scales_stride"), "i32"),
        },
        constants={
            **{p: None for p in OPTIONAL[:-1] if p not in _POINTERS},
            **_CONSTANTS,
            "BLOCK_N": 32,
        },
        aligned=("N", "K", "words_stride", "scales_stride"),
        archs=(80, 89, 90, 120),
        max_registers=96,
        hip=True,
    ),
]
