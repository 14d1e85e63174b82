"""SwiGLU's elementwise half (Shazeer 2020, arXiv:2002.05202): silu(gate) * up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype."""
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
