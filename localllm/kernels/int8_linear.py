"""Linear layers with int8 weights, one scale per channel, symmetric or with a zero point: half the bytes of 16 bits.

    rows      activations   kernel
    <= 32     unquantised   skinny_gemm: int8 is converted exactly to 16 bits in registers
    more      int8          w8a8_gemm: int8 tensor cores, exact sums; only if the checkpoint is made for it

Quantising activations to int8 loses accuracy unless the checkpoint was made for it (SmoothQuant, Xiao et al. 2022,
arXiv:2211.10438). By default, and in deterministic mode, activations therefore stay unquantised and all rows use the
first kernel. On a CPU, weights are converted to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from localllm.kernels.choice import Crossover
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.launch import device_features, launch_options, runs_triton
from localllm.kernels.quantize import SMALLEST, quantize
from localllm.kernels.quantized_weight import ROW_BLOCK, dequantized
from localllm.kernels.rms_norm import normed
from localllm.kernels.skinny_gemm import skinny_gemm_reference, w8a16_gemm
from localllm.kernels.tuned import settings_for
from localllm.kernels.w8a8_gemm import w8a8_gemm

Activations = Literal["dynamic", "16-bit"]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """W = (values - zeros) * scales; a `QuantizedWeight`."""

    values: Tensor  # [N, K] int8, rows contiguous
    scales: Tensor  # [N] fp32
    zeros: Tensor | None = None  # [N] int8; None: symmetric
    activations: Activations = "16-bit"

    def __post_init__(self) -> None:
        n = self.values.shape[0]
        assert self.values.dtype == torch.int8, "weights are int8"
        assert self.scales.shape == (n,), f"scales {tuple(self.scales.shape)} of {n} channels"
        assert self.scales.dtype == torch.float32, "scales are fp32"
        assert self.zeros is None or (self.zeros.shape == (n,) and self.zeros.dtype == torch.int8), "a zero a channel"

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        return int8_linear(x, self, bias)

    def unfinished(self, x: Tensor | PendingNorm, bias: Tensor | None = None) -> Unfinished:
        """Compute `linear`, but leave its last work to the reader (fused_epilogue.py)."""
        return int8_linear_unfinished(x, self, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]"""
        return dequantized(self.values, self.scales, self.zeros, dtype)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
    return whole(int8_linear_unfinished(x, weight, bias))


def int8_linear_unfinished(x: Tensor | PendingNorm, weight: Int8Weight, bias: Tensor | None = None) -> Unfinished:
    if not runs_triton(weight.values, "products"):
        return int8_linear_reference(normed(x), weight, bias)
    dynamic = weight.activations == "dynamic" and not launch_options().deterministic and _has_int8_mma(weight.values)
    if not dynamic or x.shape[0] <= settings_for("int8_linear", int8_key(weight), int8_crossover).skinny_rows:
        return w8a16_gemm(x, weight.values, bias, weight.scales, weight.zeros)
    x = normed(x)
    return w8a8_gemm(quantize(x, torch.int8), weight.values, weight.scales, bias, weight.zeros, dtype=x.dtype)


def int8_key(weight: Int8Weight) -> tuple[int, int, int]:
    """Return (N, K, architecture)."""
    return *weight.shape, device_features(weight.values.device).arch


def int8_crossover(n: int, k: int, arch: int) -> Crossover:
    """Return 32 rows, which one tile of x holds."""
    return Crossover(32)


def _has_int8_mma(x: Tensor) -> bool:
    """Return whether Triton compiles int8 products for the device: from sm_80. Turing uses 16-bit activations."""
    return device_features(x.device).arch >= 80


def int8_linear_reference(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """The plain-torch twin with unquantised activations, which quantised ones approximate."""
    return skinny_gemm_reference(x, weight.values, bias, weight.scales, weight.zeros)


def quantize_int8(weight: Tensor, *, symmetric: bool = True, activations: Activations = "16-bit") -> Int8Weight:
    """Quantise weight [N, K], 16 bits or fp32, on any device; a few thousand rows at a time are converted to fp32."""
    n = weight.shape[0]
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    zeros = None if symmetric else torch.empty(n, dtype=torch.int8, device=weight.device)
    for first in range(0, n, ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        wide = weight[rows].to(torch.float32, copy=True)
        if zeros is None:
            scales[rows] = wide.abs().amax(dim=1).clamp_(min=SMALLEST) / 127
            offset = torch.zeros((), device=weight.device)
        else:
            low, high = wide.amin(dim=1).clamp_(max=0), wide.amax(dim=1).clamp_(min=0)  # 0 must be representable
            scales[rows] = (high - low).clamp_(min=SMALLEST) / 255
            offset = (-128 - low / scales[rows]).round_()
            zeros[rows] = offset.to(torch.int8)
        quantised = wide.div_(scales[rows][:, None]).add_(offset.view(-1, 1)).round_()
        values[rows] = quantised.clamp_(-127 if zeros is None else -128, 127).to(torch.int8)
    return Int8Weight(values, scales, zeros, activations)
