"""What decoding's matrix products ask of memory, by their tiles: bytes that L2 delivers, and bytes in flight.

A product at few rows reads W once from memory through L2. Everything else that L2 delivers, x for every tile of W and
the sums of splits, takes from the same bandwidth: at 4.3 TB/s of weights L2 has little more than a fifth to spare.
"""

import itertools
from typing import NamedTuple

import pytest

pytest.importorskip("triton")
from localllm.kernels.launch import INTERPRETED, cdiv, next_power_of_2
from localllm.kernels.planar.kernels import planar_tile
from localllm.kernels.planar.layout import chunk_size
from localllm.kernels.skinny_gemm import UNMASKED_ROWS, SkinnyGemmTile, _row_bucket, num_stages, skinny_gemm_tile
from scripts.random_weights import shape_spec
from tests.kernels.ahead_of_time import compile_variant
from tests.kernels.variants import skinny_gemm as skinny_variants


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


SMALL = 10e6  # bytes: such a matrix is read in the time of two launches, whatever L2 delivers or is in flight
SHAPES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-14b")


ALL = [matrix for shape in SHAPES for matrix in served(shape)]


def tile_of(matrix: Matrix, rows: int, weight_bytes: int) -> SkinnyGemmTile:
    return skinny_gemm_tile(_row_bucket(rows), matrix.n, matrix.k, weight_bytes, 2, False, 90)


def l2_bytes_per_weight_byte(matrix: Matrix, rows: int, weight_bytes: int) -> float:
    """W, x for each tile of W's rows, and the splits' fp32 sums, which are written and read."""
    tile = tile_of(matrix, rows, weight_bytes)
    rows_read = rows if tile.block_m < UNMASKED_ROWS.value else cdiv(rows, tile.block_m) * tile.block_m
    x = cdiv(matrix.n, tile.block_n) * rows_read * matrix.k * 2
    sums = 2 * tile.split_k * rows * matrix.n * 4 if tile.split_k > 1 else 0
    return 1 + (x + sums) / (matrix.n * matrix.k * weight_bytes)


@pytest.mark.parametrize(
    ("weight_bytes", "rows", "limit"),
    [(2, 1, 1.04), (2, 4, 1.13), (2, 8, 1.26), (2, 9, 1.15), (2, 16, 1.25), (2, 32, 1.5), (2, 64, 2.0),
     (1, 1, 1.04), (1, 4, 1.15), (1, 8, 1.29), (1, 9, 1.22), (1, 16, 1.38), (1, 32, 1.75)],
)  # fmt: skip
def test_x_and_sums_add_little_to_what_l2_delivers(weight_bytes: int, rows: int, limit: float) -> None:
    """One-byte weights have 8-bit activations, and another kernel, from 33 rows on. The square matrix after attention
    keeps narrow tiles up to 16 rows, since a split would cost more: the launch of a norm."""
    for matrix in ALL:
        narrow = rows in (9, 16) and weight_bytes == 2 and matrix.n == matrix.k
        if matrix.n * matrix.k * weight_bytes >= SMALL:
            assert l2_bytes_per_weight_byte(matrix, rows, weight_bytes) <= (1.5 if narrow else limit), matrix


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen3-14b"])
@pytest.mark.parametrize(("weight_bytes", "rows", "limit"), [(2, 9, 1.1), (2, 16, 1.175), (1, 9, 1.2), (1, 16, 1.35)])
def test_x_and_sums_add_little_to_a_layer(shape: str, weight_bytes: int, rows: int, limit: float) -> None:
    weights = {matrix: matrix.n * matrix.k for matrix in served(shape)}
    delivered = sum(size * l2_bytes_per_weight_byte(m, rows, weight_bytes) for m, size in weights.items())
    assert delivered <= limit * sum(weights.values())


def test_k_is_whole_where_the_next_operation_can_be_part_of_the_product() -> None:
    """The activation after gate and up; the norm after the others, if there are few rows."""
    for matrix, weight_bytes, rows in itertools.product(ALL, (2, 1), (1, 8, 16, 32, 64)):
        if matrix.name == "gate_up":
            assert tile_of(matrix, rows, weight_bytes).split_k == 1, (matrix, rows)
    for matrix in [matrix for matrix in ALL if matrix.n >= 4096]:
        assert tile_of(matrix, 8, 2).split_k == 1, matrix
        assert tile_of(matrix, 16, 2).split_k == 1 or matrix.name != "out"


@pytest.mark.parametrize("arch", [80, 90])
def test_many_rows_fill_a_gpu_without_splits(arch: int) -> None:
    """Sums of 8192 rows would be half a gigabyte."""
    for matrix in ALL:
        for weight_bytes in (2, 1):
            tile = skinny_gemm_tile(_row_bucket(8192), matrix.n, matrix.k, weight_bytes, 2, False, arch)
            assert tile.split_k == 1, matrix


def test_a_row_of_sums_is_read_by_one_program() -> None:
    for matrix, rows in itertools.product(ALL, (9, 16, 32, 64)):
        tile = tile_of(matrix, rows, 1)
        assert tile.split_k == 1 or tile.split_k * matrix.n * 4 <= 128 << 10, matrix


class Gpu(NamedTuple):
    arch: int
    processors: int
    bytes_per_s: float
    shared_kib: int  # per processor


H200, RTX_4090, RTX_5090 = Gpu(90, 132, 4.3e12, 227), Gpu(89, 128, 0.93e12, 99), Gpu(120, 170, 1.65e12, 99)
LATENCY_S = 0.8e-6  # of a load from busy memory
REGISTERS = 65536  # per processor
LARGEST = 128  # registers of a thread, as tests/kernels/variants has them


def buffers(tile: SkinnyGemmTile, weight_bytes: int, arch: int, gated: bool) -> tuple[int, int]:
    """Return how many tiles of W and of x are in shared memory. wgmma reads 16-bit operands there, and Triton keeps one
    tile more of what it reads; what is converted, or goes through registers, has been read by then."""
    kind = "float" if weight_bytes == 2 else "int8"
    stages = num_stages(tile, kind, arch, tma=arch >= 90, ptx=True, gated=gated)
    wgmma = arch == 90 and tile.block_n >= 64
    more = stages if wgmma else stages - 1
    return (more if weight_bytes == 2 and not gated else stages - 1), more


def shared_bytes(tile: SkinnyGemmTile, weight_bytes: int, arch: int, gated: bool) -> int:
    of_w, of_x = buffers(tile, weight_bytes, arch, gated)
    return tile.block_k * (of_w * tile.block_n * weight_bytes + of_x * tile.block_m * 2)


def resident(shared: int, num_warps: int, programs: int, gpu: Gpu, registers: int = LARGEST) -> float:
    """Return how many programs a processor runs at once, on average over the processors."""
    by_registers = REGISTERS // (registers * 32 * num_warps)
    return min(gpu.shared_kib * 1024 // (shared + 1024), by_registers, programs / gpu.processors)


def bytes_in_flight(matrix: Matrix, rows: int, weight_bytes: int, gpu: Gpu) -> float:
    """Return the bytes of W that a processor waits for at any time: all buffers but the one that is read."""
    tile = skinny_gemm_tile(_row_bucket(rows), matrix.n, matrix.k, weight_bytes, 2, False, gpu.arch)
    programs = cdiv(matrix.n, tile.block_n) * tile.split_k
    gated = matrix.name == "gate_up" and tile.split_k == 1
    per_processor = resident(shared_bytes(tile, weight_bytes, gpu.arch, gated), tile.num_warps, programs, gpu)
    of_w, _ = buffers(tile, weight_bytes, gpu.arch, gated)
    return per_processor * (of_w - 1) * tile.block_n * tile.block_k * weight_bytes


def planar_bytes_in_flight(matrix: Matrix, rows: int, gpu: Gpu) -> float:
    """The same for int4 with groups of 128. Words are unpacked in registers, so they have a buffer less."""
    tile = planar_tile(next_power_of_2(rows), matrix.n, matrix.k, 4, 128, False, gpu.processors, gpu.arch == 90)
    words, x = tile.block_n * 64, tile.block_m * chunk_size(4, 32) * 2
    more = tile.num_stages if gpu.arch == 90 else tile.num_stages - 1
    shared = (tile.num_stages - 1) * words + more * x
    programs = cdiv(matrix.n, tile.block_n) * cdiv(rows, tile.block_m) * tile.split
    registers = LARGEST if tile.block_m <= 16 else 255
    return resident(shared, tile.num_warps, programs, gpu, registers) * (tile.num_stages - 2) * words


@pytest.mark.parametrize("gpu", [H200, RTX_4090, RTX_5090], ids=["H200", "RTX 4090", "RTX 5090"])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_enough_bytes_are_in_flight(rows: int, gpu: Gpu) -> None:
    """As many as arrive while one load is under way, but for a tenth."""
    wanted = 0.9 * gpu.bytes_per_s * LATENCY_S / gpu.processors
    for matrix in ALL:
        weights = matrix.n * matrix.k
        for weight_bytes in (2, 1) if rows <= 32 else (2,):
            if weights * weight_bytes >= SMALL:
                assert bytes_in_flight(matrix, rows, weight_bytes, gpu) >= wanted, (matrix, weight_bytes)
        if weights / 2 >= SMALL:
            assert planar_bytes_in_flight(matrix, rows, gpu) >= wanted, matrix


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(
    "name",
    [
        "8B o, 1-16",
        "8B gate_up, 33-64",
        "8B gate_up e4m3, 1-16",
        "8B gate_up and SiLU, 1-16",
        "8B gate_up and SiLU, 33",
    ],
)
def test_the_model_of_shared_memory_is_the_compilers(name: str) -> None:
    variant = next(v for v in skinny_variants.VARIANTS if v.name.startswith(name) and 90 in v.archs)
    constants, weight_bytes = variant.constants, 2 if variant.constants["KIND"] == "float" else 1
    gated = constants["ACTIVATION"] is not None
    stages = variant.num_stages - 1 if gated and weight_bytes == 2 else variant.num_stages
    sizes = (constants[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K"))
    modelled = shared_bytes(SkinnyGemmTile(*sizes, variant.num_warps, stages), weight_bytes, 90, gated)
    assert modelled <= compile_variant(variant, 90).shared_bytes <= modelled + 1024  # and barriers
