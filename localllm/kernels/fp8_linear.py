"""Linear layers with float8 e4m3 weights (Micikevicius et al. 2022, arXiv:2209.05433): half the bytes of 16 bits.

    rows      activations   kernel
    <= 32     unquantised   skinny_gemm: e4m3 is converted exactly to 16 bits in registers
    more      e4m3          w8a8_gemm: tensor cores at twice the rate; scales per token, or one from the checkpoint

All rows use the first kernel below sm_89 (which has no e4m3 arithmetic), in deterministic mode (which must not choose
by rows), if the checkpoint requires unquantised activations, and with scales that are powers of two for each 32 inputs
(MXFP8, OCP Microscaling Formats, 2023). On a CPU, weights are converted to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.choice import Crossover
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.launch import INTERPRETED, cdiv, device_features, launch_options, runs_triton
from localllm.kernels.quantize import SMALLEST, Quantized, largest, quantize, round_to
from localllm.kernels.quantized_weight import ROW_BLOCK, SCALE_BLOCK, SCALE_GROUP, dequantized
from localllm.kernels.rms_norm import normed
from localllm.kernels.skinny_gemm import skinny_gemm_reference, w8a16_gemm
from localllm.kernels.tuned import settings_for
from localllm.kernels.w8a8_gemm import w8a8_gemm

E4M3 = torch.float8_e4m3fn
Granularity = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """W = values * scales; a `QuantizedWeight`."""

    values: Tensor  # [N, K] float8_e4m3fn, finite, rows contiguous
    scales: Tensor  # fp32 [N], or [ceil(N/128), ceil(K/128)] per block; or uint8 [N, ceil(K/32)], powers of two
    activations: Literal["dynamic", "static", "16-bit"] = "dynamic"
    activation_scale: Tensor | None = None  # fp32 [1] where static: x is about round(x / scale) * scale

    def __post_init__(self) -> None:
        n, k = self.values.shape
        blocks = (cdiv(n, SCALE_BLOCK), cdiv(k, SCALE_BLOCK))
        assert self.values.dtype == E4M3, "weights are e4m3"
        shapes = {torch.float32: ((n,), blocks), torch.uint8: ((n, cdiv(k, SCALE_GROUP)),)}[self.scales.dtype]
        assert self.scales.shape in shapes, f"scales {tuple(self.scales.shape)} of weights {n} x {k}"
        assert self.scales.dtype == torch.float32 or self.activations == "16-bit", "powers of two go with 16 bits"
        assert (self.activations == "static") == (self.activation_scale is not None), "a static scale, or none"
        assert self.activations != "static" or self.scales.ndim == 1, "block scales go with dynamic activations"

    @property
    def in_blocks(self) -> bool:
        """Return whether rows share scales."""
        return self.scales.ndim == 2 and self.scales.dtype == torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        static = 0 if self.activation_scale is None else self.activation_scale.nbytes
        return self.values.nbytes + self.scales.nbytes + static

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        return fp8_linear(x, self, bias)

    def unfinished(self, x: Tensor | PendingNorm, bias: Tensor | None = None) -> Unfinished:
        """Compute `linear`, but leave its last work to the reader (fused_epilogue.py)."""
        return fp8_linear_unfinished(x, self, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K]"""
        return dequantized(self.values, self.scales, None, dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
    return whole(fp8_linear_unfinished(x, weight, bias))


def fp8_linear_unfinished(x: Tensor | PendingNorm, weight: Fp8Weight, bias: Tensor | None = None) -> Unfinished:
    if not runs_triton(weight.values, "products"):
        return fp8_linear_reference(normed(x), weight, bias)
    stays_16_bit = weight.activations == "16-bit" or launch_options().deterministic or not _has_mma(x.device)
    if stays_16_bit or x.shape[0] <= settings_for("fp8_linear", fp8_key(weight), fp8_crossover).skinny_rows:
        return w8a16_gemm(x, weight.values, bias, weight.scales)
    x = normed(x)
    return w8a8_gemm(_quantized_input(x, weight), weight.values, weight.scales, bias, dtype=x.dtype)


def fp8_key(weight: Fp8Weight) -> tuple[int, int, bool, int]:
    """Return (N, K, whether scales are per block, architecture)."""
    return *weight.shape, weight.in_blocks, device_features(weight.values.device).arch


def fp8_crossover(n: int, k: int, block_scales: bool, arch: int) -> Crossover:
    """Return 32 rows, which one tile of x holds."""
    return Crossover(32)


def fp8_linear_reference(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """The plain-torch twin with unquantised activations, which quantised ones approximate."""
    return skinny_gemm_reference(x, weight.values, bias, weight.scales)


def quantize_fp8(
    weight: Tensor, granularity: Granularity, activations: Literal["dynamic", "16-bit"] = "dynamic"
) -> Fp8Weight:
    """Quantise weight [N, K], 16 bits or fp32, on any device; a few thousand rows at a time are converted to fp32."""
    n, k = weight.shape
    values = torch.empty((n, k), dtype=E4M3, device=weight.device)
    shape = (cdiv(n, SCALE_BLOCK), cdiv(k, SCALE_BLOCK)) if granularity == "block" else (n,)
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    if granularity == "tensor":
        peaks = [rows.abs().amax().float() for rows in weight.split(ROW_BLOCK)]
        scales.fill_(0).add_(torch.stack(peaks).amax().clamp_(min=SMALLEST) / largest(E4M3))
    for first in range(0, n, ROW_BLOCK):
        rows = slice(first, min(n, first + ROW_BLOCK))
        wide = weight[rows].float()
        if granularity == "block":
            blocks = slice(first // SCALE_BLOCK, cdiv(rows.stop, SCALE_BLOCK))
            scales[blocks] = _block_scales(wide)
            spread = scales[blocks].repeat_interleave(SCALE_BLOCK, 0)[: wide.shape[0]]
            divisor = spread.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
        else:
            if granularity == "channel":
                scales[rows] = wide.abs().amax(dim=1).clamp_(min=SMALLEST) / largest(E4M3)
            divisor = scales[rows][:, None]
        values[rows] = round_to(wide / divisor, E4M3)
    return Fp8Weight(values, scales, activations)


def _block_scales(wide: Tensor) -> Tensor:
    """Return the scales of blocks: fp32 [n, k] -> [ceil(n/128), ceil(k/128)]."""
    n, k = wide.shape
    padded = F.pad(wide, (0, -k % SCALE_BLOCK, 0, -n % SCALE_BLOCK))
    tiles = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, padded.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    return tiles.abs().amax(dim=(1, 3)).clamp_(min=SMALLEST) / largest(E4M3)


def _quantized_input(x: Tensor, weight: Fp8Weight) -> Quantized:
    """Return x in e4m3 with the scales that `weight` needs: per row, or per row and 128 columns."""
    if weight.activation_scale is not None:
        scale = weight.activation_scale.view(1, 1)
        return Quantized(round_to(x.float() / scale, E4M3), scale.expand(x.shape[0], 1).contiguous())
    if weight.scales.ndim == 1:
        return quantize(x, E4M3)
    rows, k = x.shape
    groups = F.pad(x, (0, -k % SCALE_BLOCK)).view(rows, -1, SCALE_BLOCK)
    values, scale = quantize(groups, E4M3)
    return Quantized(values.view(rows, -1)[:, :k], scale.squeeze(2))


@cache
def _has_mma(device: torch.device) -> bool:
    """Return whether the device multiplies e4m3 with e4m3."""
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
