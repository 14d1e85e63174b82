"""SwiGLU's elementwise half (Shazeer 2020, arXiv:2002.05202): silu(gate) * up. The kernel is in gated.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.gated import launch_gated
from localllm.kernels.launch import runs_triton
from localllm.kernels.split_sum import SplitSum


def silu_mul(gate_up: Tensor | SplitSum) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype."""
    if isinstance(gate_up, Tensor) and not runs_triton(gate_up):
        return silu_mul_reference(gate_up)
    return launch_gated(gate_up, "silu")


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The plain-torch twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
