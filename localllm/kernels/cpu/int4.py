"""4-bit weights on a CPU in groups of 32 to 256, times rows of bf16: torch's product for a few rows.

    CpuInt4Weight     W in torch's layout, and optionally a second time in int8 for more rows
    pack_int4_for_cpu from a planar weight

    w[n, k] = (q[n, k] - 8) * scale[group of k, n] + zero[group of k, n]

scale and zero are bf16, so a group has an error of up to 0.2 %; x and the result are bf16 too. Beyond FEW_ROWS rows the
product is limited by arithmetic, and one with int8 weights is several times faster.
The operations are torch's own but not public: `has_int4` tries them before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu.int8 import (
    CODES_AT_A_TIME,
    CpuInt8Weight,
    int8_codes,
    int8_nbytes,
    is_no_reference_loop,
    pack_int8,
)
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.planar.layout import unpack_words
from localllm.kernels.planar.linear import SUPER_GROUP, PlanarWeight

GROUPS = (256, 128, 64, 32)
ROWS_MULTIPLE = 16
FEW_ROWS = 2


@dataclass(frozen=True, slots=True, eq=False)
class CpuInt4Weight:
    """A 4-bit `QuantizedWeight` for a CPU."""

    packed: Tensor  # [N, K / 2] uint8 in torch's layout
    scales_and_zeros: Tensor  # [K / group, N, 2] bf16
    group: int
    many: CpuInt8Weight | None  # the same matrix for more than FEW_ROWS rows; None: use `packed` for them too
    input_order: Tensor | None = None  # [K] int64: column k of `packed` multiplies x[:, input_order[k]] (GPTQ)

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        order = 0 if self.input_order is None else self.input_order.nbytes
        many = 0 if self.many is None else self.many.nbytes
        return self.packed.nbytes + self.scales_and_zeros.nbytes + order + many

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] fp16, bf16 or fp32, bias [N] -> [T, N] in x's dtype"""
        if x.shape[0] > FEW_ROWS and self.many is not None:
            return self.many.linear(x, bias)
        if x.shape[0] == 0:
            return x.new_empty((0, self.shape[0]))
        narrow = x.to(torch.bfloat16)
        if self.input_order is not None:
            narrow = narrow.index_select(1, self.input_order)
        y = _multiply(narrow, self.packed, self.group, self.scales_and_zeros).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K]. The codes are recovered by multiplying them, without their scales, by the identity."""
        rows, columns = self.shape
        bare = torch.zeros_like(self.scales_and_zeros)
        bare[..., 0] = 1
        codes = _multiply(torch.eye(columns, dtype=torch.bfloat16), self.packed, self.group, bare).t().float()
        scales, zeros = (part.t()[..., None] for part in self.scales_and_zeros.float().unbind(-1))
        w = codes.reshape(rows, -1, self.group).mul_(scales).add_(zeros).view(rows, columns).to(dtype)
        return w if self.input_order is None else torch.empty_like(w).index_copy_(1, self.input_order, w)


def fits_int4(weight: PlanarWeight) -> bool:
    """Return whether torch's layout can hold the weight."""
    plain = weight.bits == 4 and weight.table is None
    return plain and weight.shape[0] % ROWS_MULTIPLE == 0 and _group(weight) is not None


def pack_int4_for_cpu(weight: PlanarWeight, *, twice: bool) -> CpuInt4Weight:
    """Pack a weight for which `fits_int4` is True. twice: also in int8."""
    group = _group(weight)
    assert group is not None
    rows, columns = weight.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    for start, part in PlanarWeight.parts(weight, CODES_AT_A_TIME):  # whole blocks of torch's layout
        codes = unpack_words(part.words, 4, part.lanes)[:, :columns].to(torch.int32)
        packed[start : start + part.shape[0]] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    many = pack_int8(*int8_codes(weight)) if twice else None
    return CpuInt4Weight(packed, _scales_and_zeros(weight, group), group, many, _order(weight))


def int4_nbytes(weight: PlanarWeight, *, twice: bool) -> int:
    """Return the bytes of the result of `pack_int4_for_cpu`; the weight may be on `meta`."""
    (rows, columns), group = weight.shape, _group(weight)
    assert group is not None
    order = 0 if _order(weight) is None else columns * 8
    return rows * columns // 2 + rows * columns // group * 4 + order + (int8_nbytes(rows, columns) if twice else 0)


def _scales_and_zeros(weight: PlanarWeight, group: int) -> Tensor:
    """Return [K / group, N, 2] bf16. Products of scales and steps are computed in fp32 and rounded once."""
    size = min(weight.group, weight.columns)
    scales = _in_fp32(weight.scales, weight.super_scales, size)
    zeros = 8 - (float(weight.zero) if weight.zeros is None else weight.zeros.float())
    zeros = scales * zeros
    if weight.mins is not None:
        zeros += _in_fp32(weight.mins, weight.super_mins, size)
    both = torch.stack((scales, zeros), dim=-1).repeat_interleave(size // group, dim=0)
    return both[: weight.columns // group].to(torch.bfloat16).contiguous()


def _in_fp32(scales: Tensor, super_scales: Tensor | None, group: int) -> Tensor:
    """Return stored scales or minima as fp32 [G, N]."""
    if super_scales is None:
        return scales.float()
    return scales.float() * super_scales.float().repeat_interleave(SUPER_GROUP // group, dim=0)[: scales.shape[0]]


def _order(weight: PlanarWeight) -> Tensor | None:
    return weight.input_order if isinstance(weight, Int4Weight) else None


def _group(weight: PlanarWeight) -> int | None:
    """Return the longest group that divides both the weight's own group and its inputs."""
    columns = weight.shape[1]
    size = min(weight.group, columns)
    return next((g for g in GROUPS if columns % g == 0 and size % g == 0), None)


@cache
def has_int4() -> bool:
    """Return whether this torch has a fast product on this processor, in the expected layout."""
    try:
        rows, columns = 1024, 256
        codes = torch.arange(rows * columns, dtype=torch.int32, device="cpu").view(rows, columns) % 16
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        bare = torch.tensor([1.0, 0.0], dtype=torch.bfloat16, device="cpu").expand(columns // 32, rows, 2).contiguous()
        unit = torch.eye(columns, dtype=torch.bfloat16, device="cpu")[:4]
        if not torch.equal(_multiply(unit, packed, 32, bare).int(), codes[:, :4].t() - 8):
            return False
        plain = torch.ones((rows, columns), device="cpu")
        fast = is_no_reference_loop(lambda: _multiply(unit[:1], packed, 32, bare), plain)
        return fast and packed.nbytes == codes.numel() // 2
    except (AttributeError, RuntimeError):
        return False


def _multiply(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """x [T, K] bf16 -> [T, N] bf16"""
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, scales_and_zeros)
    return y
