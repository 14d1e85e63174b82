"""SwiGLU's elementwise half (Shazeer 2020, arXiv:2002.05202): silu(gate) * up. The kernel is in gated.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.gated import launch_gated, launch_gated_quantized
from localllm.kernels.launch import runs_triton
from localllm.kernels.quantize import Quantized, quantize_reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype."""
    if not runs_triton(gate_up):
        return silu_mul_reference(gate_up)
    return launch_gated(gate_up, "silu")


def silu_mul_quantized(gate_up: Tensor, dtype: torch.dtype) -> Quantized:
    """Return `silu_mul` with each row quantised to dtype, float8_e4m3fn or int8."""
    if not runs_triton(gate_up):
        return quantize_reference(silu_mul_reference(gate_up.float()), dtype)
    return launch_gated_quantized(gate_up, "silu", dtype)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The plain-torch twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
