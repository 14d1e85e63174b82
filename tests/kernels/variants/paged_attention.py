"""Paged attention as served: the settings that the heuristic gives each architecture, for shapes of real models."""

from typing import Any

from localllm.kernels.paged_attention import device, kernels
from tests.kernels.ahead_of_time import MEMORY, Variant

STRIDES = ("q_token_stride", "q_head_stride", "out_stride")
CACHE_TYPES = {
    "plain": "{}", "fp8": "fp8e4nv", "fp8_bits": "u8", "int8": "i8", "int8_ptx": "i8", "k8v4_ptx": "i8", "int4": "u8",
}  # fmt: skip
"""Types of the keys by the format. Values have the same type, or 4 bits."""
FOUR_BITS = ("k8v4_ptx", "int4")
POINTERS = {
    "out": "*{}", "q": "*{}", "k_scale": "*fp32", "v_scale": "*fp32", "block_table": "*i32", "context_lens": "*i32",
    "cu_seqlens_q": "*i32", "key_limits": "*i32", "positions": "*i64", "items": "*i32", "split_starts": "*i32",
    "counters": "*i32",
    "sinks": "*fp32", "alibi_slopes": "*fp32", "partial_out": "*fp32", "partial_max": "*fp32", "partial_sum": "*fp32",
    "slots": "*i64", "angles": "*fp32", "norms": "*fp32",
}  # fmt: skip


def attention(
    entry: str, name: str, group_size: int, head_dim: int, *archs: int, block_size: int = 64, dtype: str = "bf16",
    format: str = "plain", window: int = 0, softcap: float = 0.0, has_sinks: bool = False, has_slopes: bool = False,
    one_loop: bool = False, queries: int = 1, has_positions: bool = False, raw: bool = False, norm: bool = False,
    has_limits: bool = False,
    first_key: int = 0, **budget: Any,
) -> Variant:  # fmt: skip
    """archs share the settings of the first. queries: of a decode row. has_positions: of a prefill row. raw: heads that
    the kernel rotates and stores, and norms with `norm`."""
    kernel, choose = {
        "decode": (kernels.decode_kernel, device.decode_launch),
        "prefill": (kernels.prefill_kernel, device.prefill_launch),
    }[entry]
    cache_type = CACHE_TYPES[format].format(dtype)
    bits = {"plain": 32 if dtype == "fp32" else 16, "int4": 4}.get(format, 8)
    at_once = device.tile_queries(group_size, head_dim, queries)
    launch = choose(archs[0], head_dim, bits, group_size * at_once, block_size)
    launch = launch._replace(tma=launch.tma and format not in FOUR_BITS)
    merge_rows, merge_parts = device.merge_tile(group_size * at_once, head_dim, launch.num_warps)
    block_d = device._block_d(head_dim)
    constants: dict[str, Any] = {
        "GROUP_SIZE": group_size, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.block_m, "TILE": launch.tile, "WINDOW": window, "SOFTCAP": softcap, "FORMAT": format,
        "TMA": launch.tma, "ONE_LOOP": one_loop, "STAGES": launch.num_stages, "FIRST_KEY": first_key,
        "QUERIES": queries, "TILE_QUERIES": at_once, "positions": None, "key_limits": None,
        "MERGE_ROWS": merge_rows, "MERGE_PARTS": merge_parts,
        "k_scale": None, "v_scale": None, "sinks": None, "alibi_slopes": None,
        "slots": None, "angles": None, "norms": None, "k_store": None, "v_store": None,
        "ROTARY_DIM": head_dim if raw else 0, "INTERLEAVED": False,
    }  # fmt: skip
    if format != "plain":
        del constants["k_scale"], constants["v_scale"]
    if queries > 1 or has_positions or raw:
        del constants["positions"]
    if raw:
        for name_of_input in ("slots", "angles", "k_store", "v_store", *(("norms",) if norm else ())):
            del constants[name_of_input]
    if has_limits:
        del constants["key_limits"]
    if has_sinks:
        del constants["sinks"]
    if has_slopes:
        del constants["alibi_slopes"]
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    cache = f"tensordesc<{cache_type}[{launch.tile},{block_d}]>" if launch.tma else f"*{cache_type}"
    types = {name: kind.format(dtype) for name, kind in POINTERS.items()} | {"k_cache": cache, "v_cache": cache}
    if format in FOUR_BITS:
        types |= {"v_cache": "*u8", "v_scale": "*fp16"} | ({"k_scale": "*fp16"} if format == "int4" else {})
    types |= dict.fromkeys(("k_store", "v_store"), "*u8" if format != "plain" else f"*{dtype}")
    signature = {
        name: types.get(name, "fp32" if name in ("scale", "eps") else "i32") for name in names if name not in constants
    }
    del signature["PDL"]
    return Variant(
        f"{entry}, {name}", kernel, signature, constants, launch.num_warps, launch.num_stages, STRIDES,
        archs=archs, not_early=MEMORY, hands_over=entry == "decode" and merge_parts > 0, **budget,
    )  # fmt: skip


def _small(name: str, kernel: Any, constants: dict[str, Any], **budget: Any) -> Variant:
    signature = {n: POINTERS.get(n, "i32").format("bf16") for n in kernel.arg_names if n not in (*constants, "PDL")}
    return Variant(name, kernel, signature, constants, archs=(80, 89, 90, 120), not_early=MEMORY, **budget)


def _pair(name: str, group_size: int, head_dim: int, *archs: int, **terms: Any) -> list[Variant]:
    """Both kernels, compiled only where slow tests run."""
    return [
        attention(entry, name, group_size, head_dim, *archs, often=False, **terms) for entry in ("decode", "prefill")
    ]


BYTES = {"elements_per_loop": 2 * 64 * 128 * 2}  # one tile of keys and one of values, in 16 bits
REDUCE = {"PARTS": 16}
VARIANTS = [
    attention("prefill", "8B", 4, 128, 90, max_registers=232, mma="HGMMA", min_shared=32 + 3 * 2 * 16),
    attention("prefill", "8B, before Hopper", 4, 128, 80, 89, hip=True, max_hip_spills=175, min_shared=32 + 2 * 2 * 8),
    attention("prefill", "8B, small shared memory", 4, 128, 120, min_shared=32 + 2 * 2 * 8),
    attention("prefill", "8B, blocks of 16", 4, 128, 90, block_size=16, max_registers=224, mma="HGMMA"),
    attention(
        "prefill", "Gemma 3 4B, windowed, pictures", 2, 256, 90, window=1024, has_limits=True, max_registers=255,
    ),
    attention(
        "prefill", "Gemma 3 4B, windowed, pictures, before Hopper", 2, 256, 80, window=1024, has_limits=True,
        max_spills=24,
    ),
    attention("prefill", "Gemma 2 9B, windowed", 2, 256, 90, window=4096, softcap=50.0, max_registers=240, mma="HGMMA"),
    attention(
        "decode", "8B", 4, 128, 90, max_registers=128, mma="HMMA", min_shared=2 * 2 * 16, **BYTES,
        max_instructions_per_element=1.2,
    ),
    attention("decode", "8B, small shared memory", 4, 128, 120, min_shared=2 * 2 * 8),
    attention("decode", "8B, before Hopper", 4, 128, 80, min_shared=2 * 2 * 16),
    attention("decode", "8B, RTX 40", 4, 128, 89, 86, min_shared=2 * 2 * 8),
    attention("decode", "Qwen2.5 0.5B, before Hopper", 7, 64, 80, hip=True, max_hip_spills=49),
    attention("decode", "Gemma 2 9B, windowed", 2, 256, 90, window=4096, softcap=50.0, max_registers=128, mma="HMMA"),
    attention(
        "decode", "8B, fp8 cache", 4, 128, 90, format="fp8", max_registers=144, mma="HMMA", forbidden=("F2F",),
        elements_per_loop=2 * 64 * 128, max_instructions_per_element=4.4,
    ),
    attention(
        "decode", "8B, int8 cache", 4, 128, 90, format="int8_ptx", max_registers=144, mma="HMMA",
        forbidden=("F2F", "I2F"), elements_per_loop=2 * 64 * 128, max_instructions_per_element=6.2,
    ),
    attention(
        "decode", "8B, values in 4 bits", 4, 128, 90, format="k8v4_ptx", mma="HMMA", forbidden=("F2F", "I2F"),
        elements_per_loop=2 * 64 * 128, max_instructions_per_element=6.8,
    ),
    attention(
        "decode", "8B, 4 bits", 4, 128, 90, format="int4", mma="HMMA", forbidden=("F2F", "I2F"),
        elements_per_loop=2 * 64 * 128, max_instructions_per_element=8.0,
    ),
    # Triton 3.7.1 spills 8 instructions here on sm_89, and on sm_100 for heads of 64.
    attention("decode", "8B, 4 bits, before Hopper", 4, 128, 80, 89, format="int4", max_spills=8),
    attention(
        "decode", "8B, rotates and stores", 4, 128, 90, raw=True, max_registers=128, mma="HMMA", min_shared=2 * 2 * 16,
    ),
    attention("decode", "8B, rotates and stores, before Hopper", 4, 128, 80, raw=True, min_shared=2 * 2 * 16),
    attention("decode", "8B, rotates and stores, RTX 40", 4, 128, 89, 86, raw=True, min_shared=2 * 2 * 8),
    attention("decode", "8B, rotates and stores, small shared memory", 4, 128, 120, raw=True, min_shared=2 * 2 * 8),
    attention("decode", "Qwen3 8B, rotates and stores", 4, 128, 90, raw=True, norm=True, max_registers=128, mma="HMMA"),
    attention("decode", "Qwen3 8B, rotates and stores, before Hopper", 4, 128, 80, raw=True, norm=True),
    attention("decode", "Qwen2.5 0.5B, rotates and stores", 7, 64, 90, raw=True, max_registers=128, mma="HMMA"),
    attention(
        "decode", "Qwen2.5 0.5B, rotates and stores, before Hopper", 7, 64, 80, raw=True, max_spills=2, hip=True,
        max_hip_spills=41,
    ),
    attention(
        "decode", "Gemma 2 9B, rotates and stores", 2, 256, 90, raw=True, window=4096, softcap=50.0, max_registers=128,
        mma="HMMA",
    ),
    attention(
        "decode", "8B, fp8 cache, rotates and stores", 4, 128, 90, format="fp8", raw=True, max_registers=144,
        mma="HMMA", forbidden=("F2F",),
    ),
    attention(
        "decode", "8B, int8 cache, rotates and stores", 4, 128, 90, format="int8_ptx", raw=True, max_registers=144,
        mma="HMMA", forbidden=("F2F", "I2F"),
    ),
    attention("decode", "8B, 4 queries", 4, 128, 90, queries=4, max_registers=128, mma="HMMA", **BYTES),
    attention("decode", "8B, 4 queries of a drafter", 4, 128, 90, queries=4, first_key=1, mma="HMMA"),
    attention("decode", "8B, 5 queries of a drafter", 4, 128, 90, queries=5, first_key=1, mma="HMMA|HGMMA"),
    attention("decode", "8B, 5 queries of a drafter, before Hopper", 4, 128, 80, queries=5, first_key=1),
    attention("decode", "8B, 5 queries of a drafter, RTX 40", 4, 128, 89, queries=5, first_key=1),
    attention("decode", "8B, 5 queries of a drafter, small shared memory", 4, 128, 120, queries=5, first_key=1),
    attention("prefill", "8B, of a drafter", 4, 128, 90, first_key=1),
    attention("decode", "8B, 16 queries", 4, 128, 90, queries=16, mma="HGMMA"),
    attention("decode", "8B, 8 queries, before Hopper", 4, 128, 80, 89, queries=8, min_shared=2 * 2 * 8),
    attention("decode", "8B, 8 queries, small shared memory", 4, 128, 120, queries=8, min_shared=2 * 2 * 8),
    attention(
        "decode", "Gemma 2 9B, windowed, 8 queries", 2, 256, 90, window=4096, softcap=50.0, queries=8, mma="HMMA"
    ),
    attention(
        "decode", "8B, int8 cache, 8 queries", 4, 128, 90, format="int8_ptx", queries=8, mma="HMMA", max_spills=6
    ),
    attention("decode", "latents, 16 heads, 4 queries", 16, 576, 90, 80, 89, 120, queries=4, max_registers=192),
    attention("decode", "8B, Turing", 4, 128, 75, dtype="fp16"),
    attention("prefill", "Gemma 4 31B, full layers", 8, 512, 90, 80, max_registers=192, mma="HMMA"),
    attention("decode", "Gemma 4 31B, full layers", 8, 512, 90, max_registers=128, mma="HMMA"),
    attention("prefill", "latents, 16 heads", 16, 576, 90, 80, 89, 120, max_registers=192, mma="HMMA"),
    attention("decode", "latents, 16 heads", 16, 576, 90, 80, 89, 120, max_registers=192, mma="HMMA"),
    attention("decode", "latents, 16 heads, fp8 cache", 16, 576, 90, format="fp8", mma="HMMA"),
    attention("decode", "latents, 16 heads, int8 cache", 16, 576, 90, format="int8_ptx", mma="HMMA"),
    _small(
        "head_dim 128", kernels.reduce_kernel, REDUCE | {"HEAD_DIM": 128, "BLOCK_D": 128}, max_registers=64, hip=True
    ),
    _small("latents", kernels.reduce_kernel, REDUCE | {"HEAD_DIM": 576, "BLOCK_D": 1024}, max_registers=255),
    _small(
        "tiles of 64", kernels.plan_kernel, {"TILE_BITS": 6, "WINDOW": 4096, "MIN_TILES": 4, "ROWS": 256, "QUERIES": 4},
        max_registers=64, hip=True,
    ),
    *_pair("Qwen2.5 0.5B", 7, 64, 90, 100, max_spills=8),
    *_pair("Qwen2.5 0.5B, small shared memory", 7, 64, 120),
    *_pair("Qwen2.5 0.5B, RTX 40", 7, 64, 89, 86),
    *_pair("Llama 3.2 1B", 4, 64, 90, 100),
    *_pair("gpt-oss, sinks and window", 8, 64, 90, 100, window=128, has_sinks=True),
    *_pair("gpt-oss, sinks, small shared memory", 8, 64, 120, has_sinks=True, max_spills=20),
    *_pair("a head of keys for each of 96", 1, 96, 90, 100),
    *_pair("a head of keys for each of 128", 1, 128, 90, 100),
    *_pair("BLOOM, slopes", 1, 128, 90, 100, dtype="fp16", has_slopes=True),
    *_pair("fp32", 4, 128, 90, 100, dtype="fp32"),
    *_pair("8B, fp8 cache, small shared memory", 4, 128, 120, format="fp8"),
    *_pair("8B, int8 cache, small shared memory", 4, 128, 120, format="int8_ptx", max_spills=64),
    *_pair("8B, int8 cache, RTX 40", 4, 128, 89, 86, format="int8_ptx", max_spills=16),
    *_pair("8B, 4 bits, small shared memory", 4, 128, 120, format="int4"),
    *_pair("8B, values in 4 bits, RTX 40", 4, 128, 89, 86, format="k8v4_ptx"),
    *_pair("Qwen2.5 0.5B, 4 bits", 7, 64, 90, 100, format="int4", max_spills=8),
    attention("prefill", "8B, 4 bits", 4, 128, 90, 100, format="int4", often=False),
    attention("prefill", "8B, values in 4 bits", 4, 128, 90, 100, format="k8v4_ptx", often=False, max_spills=9),
    attention("decode", "8B, 4 bits, 8 queries", 4, 128, 90, format="int4", queries=8, often=False),
    *_pair("Gemma 2 9B, small shared memory", 2, 256, 120, window=4096, softcap=50.0, min_shared=32),
    *_pair("Gemma 2 9B, RTX 40", 2, 256, 89, 86, window=4096, softcap=50.0),
    *_pair("Gemma 4 31B, small shared memory", 8, 512, 89, 120),
    *_pair("Gemma 4 31B, fp8 cache", 8, 512, 90, format="fp8"),
    attention("prefill", "8B, fp8 cache", 4, 128, 90, 100, format="fp8", often=False),
    attention("prefill", "8B, int8 cache", 4, 128, 90, 100, format="int8_ptx", often=False),
    attention("prefill", "8B, deterministic", 4, 128, 90, 100, one_loop=True, often=False),
    attention("prefill", "8B, deterministic, drafts", 4, 128, 90, one_loop=True, has_positions=True),
]  # fmt: skip
