"""GeGLU's elementwise half (Shazeer 2020, arXiv:2002.05202): gelu(gate) * up, exact or with the tanh approximation.
The kernel is in gated.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.gated import launch_gated
from localllm.kernels.launch import runs_triton
from localllm.kernels.split_sum import SplitSum


def gelu_mul(gate_up: Tensor | SplitSum, approximate: str) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype. approximate: 'none' or 'tanh'."""
    if isinstance(gate_up, Tensor) and not runs_triton(gate_up):
        return gelu_mul_reference(gate_up, approximate)
    return launch_gated(gate_up, approximate)


def gelu_mul_reference(gate_up: Tensor, approximate: str) -> Tensor:
    """The plain-torch twin."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
