"""y = x W^T + b, with W laid out once at load for the device that will read it.

On a GPU the layout is the plain one; few rows take our own kernel (skinny_gemm.py), many take cuBLAS, and in
deterministic mode all take ours, whose tiles do not depend on their number.

On CPU the layout is oneDNN's blocked one. Against F.linear on the plain weight it measured, fp32 with two threads on
an AVX512 machine at [9728, 896]: 2.0 times at one row (26 of 13 GB/s), 2.8 times at 16 rows, 1.3 times at 512.
The blocks are chosen for PACK_ROWS rows, which is within noise of the best layout for every row count from 1 to 512.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.huge_pages import want_huge_pages
from localllm.kernels.launch import options, runs_triton
from localllm.kernels.skinny_gemm import device_target, skinny_gemm
from localllm.kernels.tuned import settings_for

PACK_ROWS = 16
PACK_MIN_ELEMENTS = 1 << 18  # below this the packed call's fixed cost (13 us against 2) eats what it saves


def pack_weight(weight: Tensor) -> Tensor:
    """weight [N, K] -> what `linear` wants: a blocked copy where that is faster (drop the original), else `weight`."""
    if not packs(weight.numel(), weight.device, weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    want_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight from `pack_weight` of [N, K], bias [N] -> [T, N] in x's dtype."""
    if not weight.is_mkldnn:
        return skinny_gemm(x, weight, bias) if _takes_ours(x, weight) else F.linear(x, weight, bias)
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0]))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class Crossover(NamedTuple):
    skinny_rows: int  # the most rows that take skinny_gemm


def _takes_ours(x: Tensor, weight: Tensor) -> bool:
    if not runs_triton(x):
        return False
    settings = settings_for("linear", crossover_key(weight), crossover_heuristic)
    return options.deterministic or x.shape[0] <= settings.skinny_rows


def crossover_key(weight: Tensor) -> tuple[int, int, int, int]:
    """(N, K, bytes of an element, architecture): what the choice between ours and cuBLAS's depends on beside rows."""
    n, k = weight.shape
    return n, k, weight.element_size(), device_target(weight.device).arch


def crossover_heuristic(n: int, k: int, element_size: int, arch: int) -> Crossover:
    """Up to 64 rows one tile of ours holds them all and W is read once. cuBLAS has what we lack: fp32, before sm_80."""
    return Crossover(64 if element_size == 2 and arch >= 80 and k % 8 == 0 else 0)


def packs(elements: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `pack_weight` makes a blocked copy of a weight of so many elements."""
    if device.type != "cpu" or elements < PACK_MIN_ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
