"""What decoding's matrix products ask of memory, by their tiles: bytes that L2 delivers, and bytes in flight.

A product at few rows reads W once from memory through L2. Everything else that L2 delivers, x for every tile of W and
the sums of splits, takes from the same bandwidth: at 4.3 TB/s of weights L2 has little more than a fifth to spare.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytest.importorskip("triton")
from localllm.kernels.launch import cdiv
from localllm.kernels.skinny_gemm import UNMASKED_ROWS, SkinnyGemmTile, _row_bucket, skinny_gemm_tile
from scripts.random_weights import shape_spec


class Matrix(NamedTuple):
    name: str
    n: int
    k: int


def served(shape: str) -> list[Matrix]:
    """The matrices that a decode step reads."""
    spec = shape_spec(shape)
    heads = spec.num_heads * spec.head_dim
    return [
        Matrix("qkv", heads + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        Matrix("out", spec.hidden_size, heads),
        Matrix("gate_up", 2 * spec.intermediate_size, spec.hidden_size),
        Matrix("down", spec.hidden_size, spec.intermediate_size),
    ]


SHAPES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-14b")


def tile_of(matrix: Matrix, rows: int, weight_bytes: int) -> SkinnyGemmTile:
    return skinny_gemm_tile(_row_bucket(rows), matrix.n, matrix.k, weight_bytes, 2, False, 90)


def l2_bytes_per_weight_byte(matrix: Matrix, rows: int, weight_bytes: int) -> float:
    """W, x for each tile of W's rows, and the splits' fp32 sums, which are written and read."""
    tile = tile_of(matrix, rows, weight_bytes)
    rows_read = rows if tile.block_m < UNMASKED_ROWS.value else cdiv(rows, tile.block_m) * tile.block_m
    x = cdiv(matrix.n, tile.block_n) * rows_read * matrix.k * 2
    sums = 2 * tile.split_k * rows * matrix.n * 4 if tile.split_k > 1 else 0
    return 1 + (x + sums) / (matrix.n * matrix.k * weight_bytes)


@pytest.mark.parametrize("weight_bytes", [2, 1])
@pytest.mark.parametrize(("rows", "limit"), [(1, 1.05), (4, 1.16), (8, 1.32)])
def test_x_adds_little_to_what_l2_delivers(rows: int, limit: float, weight_bytes: int) -> None:
    for matrix in [matrix for shape in SHAPES for matrix in served(shape)]:
        assert l2_bytes_per_weight_byte(matrix, rows, weight_bytes) <= limit, matrix
