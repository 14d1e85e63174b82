"""kernels/lora.py for a model as wide as Llama-3.1-8B: rank 16 on one matrix, and on the three of q, k and v."""

from localllm.kernels.lora import BLOCK_M, PART, _expand_kernel, _shrink_kernel, lora_tile
from tests.kernels.ahead_of_time import Variant

_SIZES = dict.fromkeys(("num_tokens", "rank"), "i32")


def shrink(
    name: str, rank: int, *, dtype: str = "bf16", archs: tuple[int, ...] = (80, 89, 90, 120), hip: bool = False
) -> Variant:
    tiles = lora_tile(rank, dtype != "fp32" and archs != (75,))
    pointers = {"x_ptr": f"*{dtype}", "a_ptr": f"*{dtype}", "low_ptr": "*fp32", "ids_ptr": "*i32"}
    return Variant(
        name, _shrink_kernel, {**pointers, **_SIZES, "depth": "i32", "x_stride": "i32"},
        {"BLOCK_M": BLOCK_M, "BLOCK_R": tiles.block_r, "BLOCK_K": tiles.block_k, "PART": PART, "PDL": False},
        num_warps=4, num_stages=3, aligned=("depth", "x_stride", "rank"), archs=archs, hip=hip,
    )  # fmt: skip


def expand(
    name: str, rank: int, *, dtype: str = "bf16", archs: tuple[int, ...] = (80, 89, 90, 120), hip: bool = False
) -> Variant:
    tiles = lora_tile(rank, dtype != "fp32" and archs != (75,))
    pointers = {"low_ptr": "*fp32", "b_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "ids_ptr": "*i32"}
    return Variant(
        name, _expand_kernel, {**pointers, **_SIZES, "width": "i32", "y_stride": "i32", "parts": "i32"},
        {"BLOCK_M": BLOCK_M, "BLOCK_R": tiles.block_r, "BLOCK_N": tiles.block_n, "PDL": False},
        num_warps=4, num_stages=2, aligned=("width", "y_stride", "rank"), archs=archs, hip=hip,
    )  # fmt: skip


VARIANTS = [
    shrink("x A^T, rank 16, bf16", 16, hip=True),
    shrink("x A^T, three of rank 16, bf16", 48),
    shrink("x A^T, three of rank 16, fp16", 48, dtype="fp16", archs=(75,)),
    expand("y += (x A^T) B^T, rank 16, bf16", 16, hip=True),
    expand("y += (x A^T) B^T, three of rank 16, bf16", 48, archs=(80, 86, 89, 90, 100, 120)),
    expand("y += (x A^T) B^T, three of rank 16, fp16", 48, dtype="fp16", archs=(75,)),
    expand("y += (x A^T) B^T, three of rank 16, fp32", 48, dtype="fp32", archs=(80,)),
]
