"""Values and weights that the tests of several kernels use."""

import torch
from torch import Tensor

from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.quantize import Quantized, largest


def gguf_linear(block_type: str, rows: int, columns: int) -> GGUFWeight:
    """Random bits, but scales that are small numbers: every fp16 field is set to about 0.01."""
    kind = BLOCK_TYPES[block_type]
    data = torch.randint(
        0, 256, (rows, columns // kind.size, kind.num_bytes), generator=torch.Generator().manual_seed(1)
    )
    places = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "IQ4_NL": [0], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82]}
    places |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0], "MXFP4": []}
    scale = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    for place in places[block_type]:
        data[:, :, place : place + 2] = scale
    if block_type == "MXFP4":
        data[:, :, 0] = 120 + data[:, :, 0] % 4
    return repack_gguf(data.to(torch.uint8).view(rows, -1), block_type, columns)


ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error, as a part of sum |x| |w| (what any order of fp32 sums stays within) plus |y| (rounding the output)."""


def exact_weight(weight: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None) -> Tensor:
    wide = weight.double()
    if zeros is not None:
        wide -= zeros.double()[:, None]
    if scales is None:
        return wide
    if scales.ndim == 1:
        return wide * scales.double()[:, None]
    n, k = weight.shape
    if scales.dtype == torch.uint8:  # powers of two of groups
        return wide * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)[:, :k]
    return wide * scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def e4m3(n: int, k: int, device: torch.device) -> Tensor:
    """Every finite value of the type, subnormals and both zeros among them."""
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    return finite[torch.randint(len(finite), (n, k))].view(torch.float8_e4m3fn).to(device)


EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXAMPLES = 12 if INTERPRETED else 40


def poison(tensor: Tensor) -> Tensor:
    """Return it filled with NaN, int8 with 85 and wider integers with their least number."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(85 if tensor.dtype == torch.int8 else 0x7F)
        return tensor
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def assert_quantized(out: Quantized, wanted: Tensor, dtype: torch.dtype, slack: float) -> None:
    """Every value is the nearest one, or next to a tie; the row's largest is on the largest. wanted: float64.

    slack: relative error of what was quantised.
    """
    values, scale = out
    assert values.dtype == dtype
    assert values.shape == wanted.shape
    assert scale.dtype == torch.float32
    assert scale.shape == (*wanted.shape[:-1], 1)
    peak = wanted.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale.double() * largest(dtype), peak.clamp(min=1e-20), rtol=slack + 1e-6, atol=0.0)
    step = scale.double() * (1.0 if dtype == torch.int8 else 2.0**-9)
    half = step / 2 if dtype == torch.int8 else torch.maximum(wanted.abs() * 2.0**-4, step / 2)
    error = (values.double() * scale.double() - wanted).abs()
    assert bool((error <= half * (1 + 1e-4) + slack * (wanted.abs() + peak)).all()), (error / half).max()
