"""The kernels of an indexer at the sizes of DeepSeek-V3.2 (64 heads of 128, 2,048 keys) and GLM-5 (32 heads)."""

from typing import Any

from localllm.kernels import indexer
from tests.kernels.ahead_of_time import MEMORY, Variant

ARCHS = (80, 89, 90, 120)


def scores(name: str, heads: int, *archs: int, dtype: str = "bf16", rows_of_one: bool, **fields: Any) -> Variant:
    how = indexer.score_launch(archs[0] if archs else 75, 32 if dtype == "fp32" else 16, heads, rows_of_one)
    signature = {
        "scores": "*fp32", "q": f"*{dtype}", "weights": "*fp32", "keys": f"*{dtype}",
        **dict.fromkeys(("block_table", "token_rows", "token_ends"), "*i32"),
        **dict.fromkeys(("first_token", "end_token", "first_key", "topk", "table_stride", "scores_stride"), "i32"),
    }  # fmt: skip
    constants = {
        "HEADS": heads, "BLOCK_H": heads, "HEAD_DIM": 128, "BLOCK_D": 128, "QUERIES": how.queries, "BLOCK_SIZE": 64,
        "TILE": how.tile, "STAGES": how.num_stages,
    }  # fmt: skip
    return Variant(
        f"scores, {name}", indexer._score_kernel, signature, constants, how.num_warps, how.num_stages, archs=archs,
        not_early=MEMORY, **fields,
    )  # fmt: skip


def select(topk: int, **fields: Any) -> Variant:
    signature = {
        "chosen": "*i32", "scores": "*fp32", "token_ends": "*i32",
        **dict.fromkeys(("first_token", "first_key", "scores_stride"), "i32"),
    }  # fmt: skip
    constants = {"TOPK": topk, "TILE": indexer.SELECTED_AT_ONCE}
    return Variant(
        f"choice of {topk:,} keys", indexer._select_kernel, signature, constants, 8, archs=ARCHS, not_early=MEMORY,
        **fields,
    )  # fmt: skip


def attend(
    name: str, *archs: int, dtype: str = "bf16", format: str = "plain", is_prompt: bool = False, parts: bool = True,
    latent: int = 512, **fields: Any,
) -> Variant:  # fmt: skip
    how = indexer.chosen_launch(archs[0] if archs else 75, 32 if dtype == "fp32" else 16, latent, is_prompt=is_prompt)
    signature = {
        "out": f"*{dtype}", **dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32"),
        "q": f"*{dtype}", "cache": {"plain": f"*{dtype}", "int8": "*i8", "fp8": "*u8"}[format], "k_scale": "*fp32",
        **dict.fromkeys(("block_table", "token_rows", "token_ends", "chosen"), "*i32"), "scale": "fp32",
        **dict.fromkeys(("first_key", "table_stride", "part_keys"), "i32"),
    }  # fmt: skip
    constants = {
        "HEADS": 128, "BLOCK_M": how.heads, "ROPE": 64, "BLOCK_R": 64, "LATENT": latent, "BLOCK_L": latent,
        "TOPK": 2048, "BLOCK_SIZE": 64, "TILE": how.tile, "FORMAT": format, "STAGES": how.num_stages,
    }  # fmt: skip
    absent = (() if parts else ("partial_out", "partial_max", "partial_sum")) + (
        ("k_scale",) if format == "plain" else ()
    )
    constants |= dict.fromkeys(absent)
    signature = {key: kind for key, kind in signature.items() if key not in absent}
    return Variant(
        f"chosen keys, {name}", indexer._attend_kernel, signature, constants, how.num_warps, how.num_stages,
        aligned=("part_keys",), archs=archs, not_early=MEMORY, **fields,
    )  # fmt: skip


VARIANTS = [
    scores("DeepSeek-V3.2, decode", 64, *ARCHS, rows_of_one=True),
    scores("DeepSeek-V3.2, AMD", 64, rows_of_one=True, hip=True),
    scores("DeepSeek-V3.2, prompts", 64, *ARCHS, rows_of_one=False),
    scores("GLM-5, prompts", 32, *ARCHS, rows_of_one=False, often=False),
    scores("DeepSeek-V3.2, fp32", 64, *ARCHS, rows_of_one=True, dtype="fp32", often=False),
    select(2048, hip=True),
    attend("DeepSeek-V3.2, decode", 90, 100),
    attend("DeepSeek-V3.2, decode, before Hopper", 80, 89, 120),
    attend("DeepSeek-V3.2, AMD", hip=True, max_hip_spills=200),
    attend("DeepSeek-V3.2, prompts", 90, is_prompt=True, parts=False),
    attend("DeepSeek-V3.2, prompts, before Hopper", 80, is_prompt=True, parts=False),
    attend("DeepSeek-V3.2, prompts, small shared memory", 89, 120, is_prompt=True, parts=False),
    attend("DeepSeek-V3.2, decode, int8", *ARCHS, format="int8", often=False),
    attend("DeepSeek-V3.2, decode, fp8", *ARCHS, format="fp8", often=False),
    attend("DeepSeek-V3.2, decode, fp32", *ARCHS, dtype="fp32", often=False, max_spills=2),
]
