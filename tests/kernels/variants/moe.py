"""Mixtures as they are served: Mixtral 8x7B (8 experts, top 2), Qwen3-30B-A3B (128, top 8), gpt-oss-20b (32, top 4)."""

from dataclasses import replace
from typing import Any

import torch

from localllm.kernels.cpu.native.structures import Stored
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.moe.align import _align_kernel, _combine_kernel
from localllm.kernels.moe.from_lanes import _elements_kernel, _nibbles_kernel, _stored_kernel, stored_warps
from localllm.kernels.moe.grouped_gemm import AMD, _grouped_gemm_kernel, grouped_gemm_tile, has_tensor_cores
from localllm.kernels.moe.planar_gemm import _planar_gemm_kernel, planar_gemm_tile
from localllm.kernels.moe.route import _route_kernel
from localllm.kernels.planar.layout import ptx
from tests.kernels.ahead_of_time import Variant


def product(
    name: str,
    block_m: int,
    top_k: int,
    activation: str,
    *,
    gpu: int = 90,
    itemsize: int = 2,
    depth: int,
    dtype: str = "bf16",
    kind: str = "float",
    bias: bool = False,
    single: bool = False,
    in_blocks: bool = False,
    in_groups: bool = False,
    limit: float = 0.0,
    mma: str = "HGMMA",
    archs: tuple[int, ...] = (75, 80, 89, 90, 120),
    **limits: Any,
) -> Variant:
    """As launched on a GPU of that compute capability; GPUs with the same settings are compiled for as well."""
    tile = grouped_gemm_tile(block_m, bool(activation), itemsize, gpu, in_blocks=in_blocks)
    tma = tile.tma
    stored = "i16" if kind != "float" else dtype  # two weights of a byte each
    box = f"[{tile.block_n},{tile.block_k // (1 if kind == 'float' else 2)}]"
    signature = {
        "x_ptr": f"*{dtype}",
        "weight_ptr": f"*{stored}",
        "bias_ptr": f"*{dtype}",
        "scales_ptr": "*u8" if in_groups else "*fp32",
        "weight_desc": f"tensordesc<{stored}{box}>",
        "weights_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
        "rows_ptr": "*i32",
        "experts_ptr": "*i32",
        **dict.fromkeys(("x_stride", "weight_stride", "N", "K"), "i32"),
    }
    absent = [
        *([] if bias else ["bias_ptr"]),
        *(["scales_ptr"] if kind == "float" else []),
        *([] if tma else ["weight_desc"]),
    ]
    tiles = 2 if activation else 1
    return Variant(
        name=f"{name}, {'gate and up' if activation else 'down'}, {block_m} rows{', TMA' if tma else ''}",
        kernel=_grouped_gemm_kernel,
        signature={key: value for key, value in signature.items() if key not in absent},
        constants={
            **dict.fromkeys(absent),
            "TOP_K": top_k,
            "ACTIVATION": activation,
            "LIMIT": limit,
            "KIND": kind,
            "BLOCKS": in_blocks,
            "GROUPS": in_groups,
            "PTX": gpu != AMD,
            "SINGLE": single,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "SWAP": tile.swap,
            "EVEN_K": depth % tile.block_k == 0,
            "PDL": gpu >= 90,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=("x_stride", "weight_stride", "N", "K"),
        archs=tuple(
            arch
            for arch in archs
            if grouped_gemm_tile(block_m, bool(activation), itemsize, arch, in_blocks=in_blocks) == tile
        ),
        mma=mma if gpu == 90 else "",
        options={"launch_pdl": True} if gpu >= 90 else {},
        elements_per_loop=tiles * tile.block_n * tile.block_k,
        **limits,
    )


def planar(
    name: str,
    block_m: int,
    top_k: int,
    activation: str,
    *,
    depth: int,
    group: int = 128,
    dtype: str = "bf16",
    zeros: bool = True,
    gpu: int = 90,
    limit: float = 0.0,
    **limits: Any,
) -> Variant:
    """4 bits in groups, with zero points of their own where a checkpoint has them."""
    tile = planar_gemm_tile(block_m, 4, False, has_tensor_cores(2, gpu))
    absent = [
        "mins_ptr",
        "super_scales_ptr",
        "super_mins_ptr",
        "table_ptr",
        "bias_ptr",
        *([] if zeros else ["zeros_ptr"]),
    ]
    signature = {
        "x_ptr": f"*{dtype}",
        "words_ptr": "*i16",
        "scales_ptr": "*fp16",
        "zeros_ptr": "*u8",
        "weights_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
        "rows_ptr": "*i32",
        "experts_ptr": "*i32",
        **dict.fromkeys(("x_stride", "words_stride", "scales_stride", "N", "K"), "i32"),
    }
    return Variant(
        name=f"{name} int4 g{group}, {'gate and up' if activation else 'down'}, {block_m} rows",
        kernel=_planar_gemm_kernel,
        signature={key: value for key, value in signature.items() if key not in absent},
        constants={
            **dict.fromkeys(absent),
            "BITS": 4,
            "LANES": 32,
            "GROUP": group,
            "SUPER_GROUP": 256,
            "ZERO": 0 if zeros else 8,
            "EVEN_K": depth % 128 == 0,
            "ASSEMBLY": ptx(4, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], None) if gpu else "",
            "TOP_K": top_k,
            "ACTIVATION": activation,
            "LIMIT": limit,
            "SINGLE": False,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "GROUP_M": tile.group_m,
            "PDL": gpu == 90,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=("x_stride", "words_stride", "scales_stride", "N", "K"),
        options={"launch_pdl": True} if gpu == 90 else {},
        mma="HGMMA" if gpu == 90 else "",
        elements_per_loop=tile.block_n * 128,
        **limits,
    )


def nibbles(name: str, kind: int, block_bytes: int, lanes: int = 32, **more: Any) -> Variant:
    """The experts of a prompt as they arrive: 4 bits in the layout of the CPU."""
    pointers = {"codes_ptr": "*u8", "halves_ptr": "*i16", "words_ptr": "*i16", "scales_ptr": "*i16"}
    pointers |= {"mins_ptr": "*i16"} if kind == 6 else {}
    return Variant(
        name=f"{name}, 2880 inputs",
        kernel=_nibbles_kernel,
        signature={**pointers, **dict.fromkeys(("record_bytes", "first", "N", "GROUPS", "num_outputs"), "i32")},
        constants={
            **({} if kind == 6 else {"mins_ptr": None}), "KIND": kind, "LANES": lanes, "BLOCK_BYTES": block_bytes,
            "CODE_BYTES": 1024,
        },
        aligned=("record_bytes", "first"),
        archs=(75, 80, 89, 90, 120),
        max_registers=128,
        **more,
    )  # fmt: skip


def stored(name: str, *, units: bool = True, mins: bool = False, lanes: int = 32, **more: Any) -> Variant:
    """The experts of a prompt as they arrive: a GGUF file's rows."""
    kind, scales = BLOCK_TYPES[name], "*i8" if units else "*i16"
    optional = {"mins_ptr": (mins, scales), "units_ptr": (units, "*i16"), "min_units_ptr": (units and mins, "*i16")}
    pointers = {"rows_ptr": "*u8", "words_ptr": "*i16", "scales_ptr": scales}
    pointers |= {pointer: dtype for pointer, (is_there, dtype) in optional.items() if is_there}
    return Variant(
        name=f"{name}, rows of a file",
        kernel=_stored_kernel,
        signature={**pointers, **dict.fromkeys(("record_bytes", "first", "N", "GROUPS", "num_outputs"), "i32")},
        constants={
            **{pointer: None for pointer, (is_there, _) in optional.items() if not is_there},
            "TYPE": int(Stored[name]), "BITS": kind.bits, "LANES": lanes, "SIZE": kind.size,
            "NUM_BYTES": kind.num_bytes, "UNIT": 80,
        },
        aligned=("record_bytes", "first"),
        archs=(75, 80, 89, 90, 120),
        num_warps=stored_warps(name),
        max_registers=128,
        **more,
    )  # fmt: skip


ROUTE = Variant(
    name="Qwen3-30B-A3B: 8 of 128",
    kernel=_route_kernel,
    signature={
        "logits_ptr": "*bf16",
        "slots_ptr": "*i64",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "logits_stride": "i32",
        "scale": "fp32",
        "least_sum": "fp32",
        "tolerance": "fp32",
    },
    constants={
        "bias_ptr": None,
        "TOP_K": 8,
        "NUM_GROUPS": 1,
        "TOP_GROUPS": 1,
        "GROUP_SIZE": 128,
        "BLOCK_GROUPS": 1,
        "BLOCK_SIZE": 128,
        "BLOCK_K": 8,
        "SIGMOID": False,
        "SPARSE_MIXER": False,
        "RENORMALIZE": True,
        "PDL": False,
    },
    num_warps=1,
    hip=True,
    archs=(80, 89, 90, 120),
    max_registers=64,
)
DEEPSEEK = {"NUM_GROUPS": 8, "TOP_GROUPS": 4, "GROUP_SIZE": 32, "BLOCK_GROUPS": 8, "BLOCK_SIZE": 32, "SIGMOID": True}
ALIGN = Variant(
    name="128 experts, blocks of 16 rows",
    kernel=_align_kernel,
    signature={"ids_ptr": "*i32", "rows_ptr": "*i32", "experts_ptr": "*i32", "num_ids": "i32", "num_blocks": "i32"},
    constants={"NUM_EXPERTS": 128, "NUM_BINS": 256, "BLOCK_M": 16, "CHUNK": 512, "PDL": False},
    archs=(75, 80, 89, 90, 120),
    hip=True,
    max_registers=96,
)

VARIANTS = [
    ROUTE,
    replace(
        ROUTE,
        hip=False,
        name="DeepSeek-V3: 8 of 256, the best 4 of 8 groups",
        signature={**ROUTE.signature, "logits_ptr": "*fp32", "bias_ptr": "*fp32"},
        constants={key: value for key, value in ROUTE.constants.items() if key != "bias_ptr"} | DEEPSEEK,
        max_registers=112,  # 80 with Triton 3.9, 106 with 3.6
    ),
    ALIGN,
    replace(
        ALIGN,
        hip=False,
        name="8 experts, blocks of 128 rows",
        constants={**ALIGN.constants, "NUM_EXPERTS": 8, "NUM_BINS": 16, "BLOCK_M": 128, "CHUNK": 2048},
    ),
    Variant(
        name="top 8 of 2048 columns",
        kernel=_combine_kernel,
        signature={"partial_ptr": "*bf16", "ids_ptr": "*i32", "out_ptr": "*bf16", "width": "i32"},
        constants={"TOP_K": 8, "BLOCK": 1024, "PDL": False},
        aligned=("width",),
        archs=(80, 89, 90, 120),
        hip=True,
        max_registers=64,
    ),
    product("one token, E128 N768 K2048", 16, 8, "silu", depth=2048, single=True, max_instructions_per_element=2.0),
    product("E128 N768 K2048", 16, 8, "silu", depth=2048, max_instructions_per_element=2.0),
    product("E128 N768 K2048", 16, 8, "", depth=768, max_instructions_per_element=2.0),
    product("E8 N14336 K4096", 64, 2, "silu", depth=4096),
    product("E8 N14336 K4096", 128, 2, "silu", depth=4096),
    product("E8 N14336 K4096", 128, 2, "", depth=14336),
    product("E32 N2880 K2880", 32, 4, "swiglu_clamped", depth=2880, bias=True, max_instructions_per_element=3.0),
    product("E32 N2880 K2880", 32, 4, "", depth=2880, bias=True, max_instructions_per_element=3.0),
    product("E32 N2880 K2880", 64, 4, "", depth=2880, bias=True),
    product("E128 N768 K2048", 16, 8, "silu", gpu=80, depth=2048),
    product("E8 N14336 K4096", 64, 2, "silu", gpu=80, depth=4096),
    product("E8 N14336 K4096", 64, 2, "", gpu=80, depth=14336),
    product("E8 N14336 K4096", 128, 2, "silu", gpu=80, depth=4096),
    product("E8 N14336 K4096", 128, 2, "", gpu=80, depth=14336),
    product("E32 N2880 K2880", 32, 4, "swiglu_clamped", gpu=120, depth=2880, bias=True, archs=(120,)),
    product("E8 N14336 K4096", 16, 2, "silu", gpu=75, depth=4096, dtype="fp16"),
    product("E8 N14336 K4096", 16, 2, "", gpu=75, depth=14336, dtype="fp32", itemsize=4, archs=(75, 90)),
    product("E128 N768 K2048", 16, 8, "silu", gpu=AMD, depth=2048, archs=(), hip=True),
    product("E128 N768 K2048 int8", 16, 8, "silu", depth=2048, kind="int8", max_instructions_per_element=4.5),
    product("E128 N768 K2048 e4m3", 16, 8, "silu", depth=2048, kind="e4m3", max_instructions_per_element=4.5),
    product("E128 N768 K2048 e4m3", 128, 8, "silu", depth=2048, kind="e4m3"),
    product("E128 N768 K2048 e4m3", 16, 8, "", depth=768, kind="e4m3", gpu=80, archs=(80, 120)),
    product("E128 N768 K2048 e4m3 in blocks", 16, 8, "silu", depth=2048, kind="e4m3", in_blocks=True),
    product("E128 N768 K2048 e4m3 in blocks", 64, 8, "silu", depth=2048, kind="e4m3", in_blocks=True),
    product("E128 N768 K2048 e4m3 in blocks", 64, 8, "", depth=768, kind="e4m3", in_blocks=True),
    product(
        "E128 N768 K2048 e4m3 in blocks",
        64,
        8,
        "silu",
        depth=2048,
        kind="e4m3",
        in_blocks=True,
        gpu=80,
        archs=(80, 120),
        mma="HMMA",
    ),
    *(
        product(f"E128 N768 K{depth} MXFP8", rows, 8, activation, depth=depth, kind="e4m3", in_groups=True, gpu=gpu)
        for gpu in (80, 90)
        for rows, activation, depth in ((16, "silu", 2048), (64, "silu", 2048), (64, "", 768))
    ),
    planar("E128 N768 K2048", 16, 8, "silu", depth=2048, archs=(90,), max_instructions_per_element=3.1),
    planar("E128 N768 K2048", 16, 8, "", depth=768, zeros=False, archs=(90,), max_instructions_per_element=3.1),
    planar("E8 N14336 K4096", 32, 2, "silu", depth=4096, archs=(90,), max_instructions_per_element=3.2),
    planar("E8 N14336 K4096", 64, 2, "silu", depth=4096, archs=(90,)),
    planar("E8 N14336 K4096", 128, 2, "", depth=14336, archs=(90,)),
    planar("E128 N768 K2048", 64, 8, "", depth=768, group=32, dtype="fp16", archs=(90,)),
    planar("E128 N768 K2048", 16, 8, "silu", gpu=80, depth=2048, archs=(80, 89, 120)),
    planar("E8 N14336 K4096", 64, 2, "silu", gpu=80, depth=4096, archs=(80, 89, 120)),
    planar("E128 N768 K2048", 16, 8, "silu", gpu=75, depth=2048, dtype="fp16", archs=(75,)),
    planar("E128 N768 K2048", 16, 8, "silu", gpu=0, depth=2048, archs=(), hip=True),
    nibbles("MXFP4", 7, 1024 + 64, hip=True),
    nibbles("Q4_0", 5, 1024 + 128),
    nibbles("Q4_K", 6, 1024 + 256),
    nibbles("NVFP4", 8, 1024 + 256, lanes=16),
    stored("Q6_K", lanes=16, hip=True),
    stored("Q2_K", mins=True, lanes=16),
    stored("Q3_K", lanes=16),
    stored("Q5_K", mins=True),
    stored("Q5_0", units=False),
    stored("Q5_1", units=False, mins=True),
    stored("Q8_0", units=False),
    *(
        Variant(
            name=f"{name}, 2880 inputs",
            kernel=_elements_kernel,
            signature={
                "in_ptr": f"*{kind}",
                "out_ptr": f"*{kind}",
                **dict.fromkeys(("record_size", "first", "N", "K"), "i32"),
            },
            constants={"LANE": lane},
            aligned=("record_size", "first"),
            archs=(75, 80, 89, 90, 120),
            max_registers=128,
            hip=kind == "i16",
        )
        for name, kind, lane in (("16 bits", "i16", 2), ("int8", "i8", 4), ("float32", "i32", 1))
    ),
]
