"""Values and weights that the tests of several kernels use."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf


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
    return wide * scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def e4m3(n: int, k: int, device: torch.device) -> Tensor:
    """Every finite value of the type, subnormals and both zeros among them."""
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    return finite[torch.randint(len(finite), (n, k))].view(torch.float8_e4m3fn).to(device)
