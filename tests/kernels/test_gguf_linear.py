"""GGUF's block types: repacked without losing a bit, and multiplied as the matrix they stand for."""

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import repack_gguf
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.planar.linear import stack_rows
from tests.kernels.conftest import DTYPES

gguf = pytest.importorskip("gguf")
quants = pytest.importorskip("gguf.quants")
FP16_AT = pytest.importorskip("tests.gguf_files").FP16_AT
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_blocks(block_type: str, rows: int, columns: int, *, any_exponent: bool = False) -> np.ndarray:
    """[rows, bytes]: every bit random, but fp16 numbers of the size that scales have, of both signs."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    random = np.random.default_rng(columns)
    blocks = random.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    for at in FP16_AT.get(block_type, (0,)):
        scales = (random.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if block_type == "MXFP4":  # above 251 twelve times the power of two does not fit into fp32
        # The interpreter reads small bf16 numbers wrongly, and does not let fp16 overflow.
        least, most = (0, 252) if any_exponent and not INTERPRETED else (118, 124)
        blocks[:, 0] = random.integers(least, most, len(blocks))
    return blocks.reshape(rows, -1)


def meant(blocks: np.ndarray, block_type: str) -> Tensor:
    return torch.from_numpy(quants.dequantize(blocks, gguf.GGMLQuantizationType[block_type]))


@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_dequantises_to_the_same_bits(block_type: str, device: torch.device) -> None:
    columns = 256 if INTERPRETED else 1024
    blocks = random_blocks(block_type, 40, columns, any_exponent=True)
    weight = repack_gguf(torch.from_numpy(blocks).to(device), block_type, columns)
    exact = meant(blocks, block_type).to(device)
    assert weight.shape == (40, columns)
    assert torch.equal(weight.dequantize(torch.float32).view(torch.int32), exact.view(torch.int32))
    assert torch.equal(weight.dequantize(DTYPES[-1]), exact.to(DTYPES[-1]))


@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_rows_that_end_inside_a_chunk(block_type: str, device: torch.device) -> None:
    blocks = random_blocks(block_type, 64, 224)
    weight = repack_gguf(torch.from_numpy(blocks).to(device), block_type, 224)
    exact = meant(blocks, block_type).to(device)
    assert torch.equal(weight.dequantize(torch.float32), exact)
    x = torch.randn(2, 224, device=device)
    assert_close(weight.linear(x), x.double() @ exact.double().t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_product_of_the_dequantised_matrix(
    block_type: str, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(rows)
    columns = 512 if rows == 1 else 256
    blocks = random_blocks(block_type, 72, columns)
    weight = repack_gguf(torch.from_numpy(blocks).to(device), block_type, columns)
    x = torch.randn(rows, columns, dtype=dtype, device=device)
    bias = torch.randn(72, dtype=dtype, device=device)
    exact = x.double() @ meant(blocks, block_type).to(device).double().t() + bias.double()
    assert_close(weight.linear(x, bias), exact)


def assert_close(y: Tensor, exact: Tensor) -> None:
    assert (y.double() - exact).abs().max() / exact.abs().max() < TOLERANCE[y.dtype]


def test_types_that_do_not_mix() -> None:
    q4, q8 = (repack_gguf(torch.from_numpy(random_blocks(name, 4, 256)), name, 256) for name in ("Q4_0", "Q8_0"))
    assert stack_rows([q4, q4]).shape == (8, 256)
    with pytest.raises(ValueError, match="block_type"):
        stack_rows([q4, q8])


def test_bytes_held_beside_those_in_the_file() -> None:
    """Q4_K stays 4.5 bits and a bit, Q8_0 as it is."""
    for name, bits in (
        ("Q4_0", 4.5),
        ("Q4_K", 4.625),
        ("Q6_K", 8.5625),
        ("Q8_0", 8.5),
        ("Q3_K", 4.5625),
        ("Q2_K", 5.125),
    ):
        weight = repack_gguf(torch.from_numpy(random_blocks(name, 64, 512)), name, 512)
        assert weight.nbytes * 8 == 64 * 512 * bits, name


def test_bytes_that_are_not_the_matrix() -> None:
    data = torch.zeros(4, 144, dtype=torch.uint8)
    with pytest.raises(ValueError, match="144 bytes a row are not 512 weights of type Q4_K"):
        repack_gguf(data, "Q4_K", 512)
    with pytest.raises(ValueError, match="IQ1_S cannot be repacked"):
        repack_gguf(data, "IQ1_S", 256)
