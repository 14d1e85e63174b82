"""kernels/rotary_store_kv.py with the heads of Llama-3.1-8B, Qwen2.5-0.5B, Qwen3-8B, Gemma 3 and Phi-4-mini."""

from localllm.kernels.rotary_store_kv import _rotary_store_kv_kernel, rotary_launch, rotation_size
from tests.kernels.ahead_of_time import Variant


def variant(
    name: str, heads: tuple[int, int], head_dim: int, *, rotary_dim: int | None = None, interleaved: bool = False,
    norm: bool = False, norm_last: bool = False, values: str = "own", dtype: str = "bf16", to: str = "",
    values_to: str = "", native: bool = False,
    latents: bool = False, pdl: bool = False, hip: bool = False,
    archs: tuple[int, ...] = (80, 89, 90, 120), max_registers: int = 48, max_spills: int = 0,
) -> Variant:  # fmt: skip
    num_heads, num_kv_heads = heads
    """to, values_to: of the keys and of the values; empty: as the keys."""
    launch = rotary_launch(num_heads, head_dim)
    block_heads, block_pairs, num_warps = launch.for_products() if to == "int4" else launch
    cache = "*u8" if to else f"*{dtype}"
    scale = "*fp32" if to else None
    turns = rotary_dim != 0
    stores_nothing = values == "none"
    pointers = {
        "qkv_ptr": f"*{dtype}",
        "q_ptr": f"*{dtype}",
        "k_ptr": None if stores_nothing else cache,
        "v_ptr": None if latents or stores_nothing else cache,
        "k_scale_ptr": "*fp16" if to == "int4" else scale,
        "v_scale_ptr": "*fp16" if "int4" in (to, values_to) else scale,
        "slots_ptr": "*i64",
        "table_ptr": "*fp32" if turns else None,
        "positions_ptr": "*i64" if turns else None,
        "norm_ptr": "*fp32" if norm else None,
    }
    return Variant(
        name,
        _rotary_store_kv_kernel,
        signature={
            **{k: v for k, v in pointers.items() if v},
            "eps": "fp32",
            "qkv_stride": "i32",
            "num_slots": "i32",
        },
        constants={
            **{k: None for k, v in pointers.items() if not v},
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": head_dim if rotary_dim is None else rotary_dim,
            "INTERLEAVED": interleaved,
            "FIRST_VALUE": num_heads + (0 if values == "keys" else num_kv_heads),
            "NORMS_VALUES": values == "keys",
            "NORM_LAST": norm_last,
            "TO": to,
            "VALUES_TO": values_to or to,
            "TURN_SIZE": rotation_size(head_dim) if to == "int4" else 0,
            "NATIVE_FP8": native,
            "BLOCK_HEADS": block_heads,
            "BLOCK_PAIRS": block_pairs,
            "PDL": pdl,
        },
        num_warps=num_warps,
        aligned=("qkv_stride", "num_slots"),
        archs=archs,
        max_registers=max_registers,
        max_spills=max_spills,
        hip=hip,
        options={"launch_pdl": True} if pdl else {},
    )


VARIANTS = [
    variant("32 + 8 heads of 128, bf16", (32, 8), 128, archs=(80, 89, 90, 120), hip=True),
    variant("launched early, 32 + 8 heads of 128, bf16", (32, 8), 128, pdl=True, archs=(90, 120)),
    variant("14 + 2 heads of 64, bf16", (14, 2), 64),
    variant("14 + 2 heads of 64, fp16", (14, 2), 64, dtype="fp16", archs=(75,)),
    variant("normed, 32 + 8 heads of 128, bf16", (32, 8), 128, norm=True),
    variant("normed last, 32 + 8 heads of 128, bf16", (32, 8), 128, norm=True, norm_last=True),
    variant("normed, 8 + 4 heads of 256, bf16", (8, 4), 256, norm=True),
    variant("values are normed keys, 32 + 4 heads of 512, bf16", (32, 4), 512, norm=True, values="keys", hip=True),
    variant("queries alone, 8 + 1 heads of 512, bf16", (8, 1), 512, norm=True, values="none"),
    variant("96 of 128 dimensions turn, 24 + 8 heads, bf16", (24, 8), 128, rotary_dim=96),
    variant("interleaved, 32 + 2 heads of 128, bf16", (32, 2), 128, rotary_dim=64, interleaved=True),
    variant("no positions, 16 + 4 heads of 128, bf16", (16, 4), 128, rotary_dim=0),
    variant("latents of 576, 16 + 1 heads, bf16", (16, 1), 576, rotary_dim=64, latents=True, hip=True),
    variant("fp8 cache, 32 + 8 heads of 128, bf16", (32, 8), 128, to="fp8", native=True, archs=(89, 90)),
    variant("fp8 cache by hand, 32 + 8 heads of 128, bf16", (32, 8), 128, to="fp8", archs=(80,)),
    variant("int8 cache, normed, 32 + 8 heads of 128, bf16", (32, 8), 128, norm=True, to="int8"),
    variant("values in 4 bits, 32 + 8 heads of 128, bf16", (32, 8), 128, to="int8", values_to="int4", max_registers=64),
    variant("4 bits, 32 + 8 heads of 128, bf16", (32, 8), 128, to="int4", max_registers=208),
    variant(
        "4 bits, normed, 8 + 4 heads of 256, bf16",
        (8, 4),
        256,
        norm=True,
        to="int4",
        archs=(80, 90),
        max_registers=255,
        max_spills=8,
    ),
    variant("4 bits, 14 + 2 heads of 64, fp16", (14, 2), 64, dtype="fp16", to="int4", max_registers=128),
]
