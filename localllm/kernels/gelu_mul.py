"""GeGLU's elementwise half (Shazeer 2020, arXiv:2002.05202): gelu(gate) * up, exact or with the tanh approximation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu_mul(gate_up: Tensor, approximate: str) -> Tensor:
    """gate_up [T, 2 * I], gate first -> [T, I] contiguous, same dtype. approximate: 'none' or 'tanh'."""
    return gelu_mul_reference(gate_up, approximate)


def gelu_mul_reference(gate_up: Tensor, approximate: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)
