"""y = x W^T + b, with W laid out once at load for its device.

On a GPU the layout is the plain one. Few rows use our own kernel (skinny_gemm.py), many use cuBLAS; in deterministic
mode all rows use ours, whose tiles do not depend on their number.

On a CPU the layout is oneDNN's blocked one. Compared with F.linear on the plain weight (fp32, two threads, an AVX512
machine, [9728, 896]) it is 2.0 times as fast at one row (26 instead of 13 GB/s), 2.8 times at 16 rows, 1.3 times at
512. The blocks are chosen for PACK_ROWS rows, which is within noise of the best layout for every row count from 1 to
512.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.choice import Crossover
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.launch import device_features, launch_options, runs_triton
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.kernels.rms_norm import normed
from localllm.kernels.skinny_gemm import skinny_gemm, skinny_gemm_unfinished
from localllm.kernels.tuned import settings_for

PACK_ROWS = 16
PACK_MIN_ELEMENTS = 1 << 18  # for smaller weights the packed call's fixed cost (13 us instead of 2) exceeds its gain


def pack_weight(weight: Tensor) -> Tensor:
    """Return the weight [N, K] in the layout of `linear`:
    a blocked copy if that is faster (drop the original), else `weight`."""
    if not should_pack(weight.numel(), weight.device, weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight from `pack_weight` of [N, K], bias [N] -> [T, N] in x's dtype."""
    return whole(linear_unfinished(x, weight, bias))


def linear_unfinished(x: Tensor | PendingNorm, weight: Tensor, bias: Tensor | None = None) -> Unfinished:
    """Compute `linear`, but leave its last work to the reader (fused_epilogue.py)."""
    if _uses_skinny_gemm(x, weight):
        return skinny_gemm_unfinished(x, weight, bias)
    x = normed(x)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0]))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return `linear` as fp32 [T, N], in `out` if given. On a GPU its sums are not rounded to x's dtype before."""
    has_kernel = _uses_skinny_gemm(x, weight)
    if not has_kernel and (not x.is_cuda or torch.version.hip is not None):
        y = linear(x, weight, bias)
        return y.float() if out is None else out.copy_(y)
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    if has_kernel:
        return skinny_gemm(x, weight, bias, out=out)
    if x.dtype == torch.float32:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return out if bias is None else out.add_(bias)


def _uses_skinny_gemm(x: Tensor | PendingNorm, weight: Tensor) -> bool:
    if weight.is_mkldnn or not runs_triton(weight, "products"):
        return False
    settings = settings_for("linear", crossover_key(weight), crossover_heuristic)
    return launch_options().deterministic or x.shape[0] <= settings.skinny_rows


def crossover_key(weight: Tensor) -> tuple[int, int, int, int]:
    """Return (N, K, bytes per element, architecture):
    the choice between our kernel and cuBLAS depends on these and the rows."""
    n, k = weight.shape
    return n, k, weight.element_size(), device_features(weight.device).arch


def crossover_heuristic(n: int, k: int, element_size: int, arch: int) -> Crossover:
    """Return 64 rows for 16-bit weights from sm_80 on: one of our tiles holds them all, and W is read once. Else 0."""
    return Crossover(64 if element_size == 2 and arch >= 80 and k % 8 == 0 else 0)


def should_pack(elements: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `pack_weight` makes a blocked copy of a weight of this size."""
    if device.type != "cpu" or elements < PACK_MIN_ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class StackedWeight:
    """W = [part 0; part 1; ...], if the checkpoint stores the parts of a layer in different ways; a `QuantizedWeight`.
    Plain parts are as `pack_weight` returns them.

    A GGUF file may store q and k in 4 bits and v in 6; GPTQ with desc_act orders the inputs of each part differently.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor | QuantizedWeight]) -> None:
        columns = {part.shape[1] for part in parts}
        assert len(columns) == 1, f"parts with {columns} inputs"
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.dtype.itemsize if isinstance(part, Tensor) else part.nbytes
                   for part in self.parts)  # fmt: skip

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K], bias [N] -> [T, N] in x's dtype"""
        outs, start = [], 0
        for part in self.parts:
            stop = start + part.shape[0]
            own = None if bias is None else bias[start:stop]
            outs.append(linear(x, part, own) if isinstance(part, Tensor) else part.linear(x, own))
            start = stop
        return torch.cat(outs, dim=1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]"""
        return torch.cat(
            [
                (part.to_dense() if part.is_mkldnn else part).to(dtype)
                if isinstance(part, Tensor)
                else part.dequantize(dtype)
                for part in self.parts
            ]
        )
