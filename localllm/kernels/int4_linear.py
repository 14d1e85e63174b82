"""Linear layers with 4-bit weights and 16-bit activations (W4A16): AWQ, GPTQ, and weights quantised here.

    Int4Weight      W in the planar layout; `linear` runs the planar kernel, on CPU its twin
    pack_int4       from codes, scales and zero points
    repack_awq      from an AWQ checkpoint (Lin et al. 2023, arXiv:2306.00978)
    repack_gptq     from a GPTQ checkpoint (Frantar et al. 2022, arXiv:2210.17323)
    quantize_int4   from 16-bit weights, rounded to nearest
    meta_int4       a weight without data, of the right size, on `meta`

Codes of 2 and 3 bits are stored in 4: lossless, but without a gain.

    w[n, k] = scales[k // group, n] * (q[n, k] - zeros[k // group, n])

Conversions process some outputs at a time, so their extra memory is small compared with one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.fused_epilogue import PendingNorm, Unfinished
from localllm.kernels.planar.layout import chunk_size, pack_words, padded_columns
from localllm.kernels.planar.linear import PlanarWeight, planar_linear_unfinished
from localllm.kernels.rms_norm import normed

PACK_ELEMENTS = 1 << 22  # weights converted at a time
QUANTIZE_ELEMENTS = 1 << 20  # weights rounded at a time: several fp32 copies are needed
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AWQ word is column AWQ_ORDER[i] of its eight


@dataclass(frozen=True, slots=True)
class Int4Weight(PlanarWeight):
    """A planar weight whose inputs may have been reordered by group (GPTQ's desc_act)."""

    input_order: Tensor | None = None  # [K] int64: column k of W multiplies x[:, input_order[k]]

    def unfinished(self, x: Tensor | PendingNorm, bias: Tensor | None = None) -> Unfinished:
        """Compute `linear`, but leave its last work to the reader (fused_epilogue.py)."""
        x = x if self.input_order is None else normed(x).index_select(1, self.input_order)
        return planar_linear_unfinished(x, self, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [N, K] in the original order of the inputs."""
        w = PlanarWeight.dequantize(self, dtype)
        return w if self.input_order is None else torch.empty_like(w).index_copy_(1, self.input_order, w)


def pack_int4(
    q: Tensor, scales: Tensor, zeros: Tensor | None, group: int, bits: int = 4, g_idx: Tensor | None = None
) -> Int4Weight:
    """Pack q [N, K] uint8 codes of `bits` bits. scales [G, N] fp16 or bf16 and zeros [G, N] (None: the middle code) of
    G = ceil(K / group) groups; g_idx [K]: each column's group, if they are not in order.

    group is 16, 32, 64, a multiple of 128, or -1 for one group per row; bits is 2, 3, 4 or 8. Raises ValueError for
    others.
    """
    rows, columns = q.shape
    order = None if g_idx is None else _input_order(g_idx, group)
    weight = _empty(rows, columns, group, bits, scales, zeros, order)
    for start, stop in _row_blocks(rows, columns):
        _write_codes(weight, start, q[start:stop])
    return weight


def meta_int4(
    shape: tuple[int, int],
    group: int,
    scales: torch.dtype,
    *,
    bits: int = 4,
    zeros: bool,
    input_order: Tensor | None = None,
) -> Int4Weight:
    """Return a weight of `shape` like the functions above, on `meta`."""
    columns = shape[1]
    held = _plane_bits(bits)
    num_groups = -(-columns // _group_size(columns, group, held))
    per_group = torch.empty((num_groups, shape[0]), dtype=scales, device="meta")
    weight = _empty(*shape, group, bits, per_group, None, input_order)
    # Not empty_like: on `meta` that imports torch's compiler, which takes 80 MiB permanently.
    return (
        replace(weight, zeros=torch.empty(weight.scales.shape, dtype=torch.uint8, device="meta")) if zeros else weight
    )


def repack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Int4Weight:
    """Repack qweight [K, N / 8] int32, qzeros [G, N / 8] int32, scales [G, N]: eight outputs per word, in AWQ_ORDER."""
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    weight = _empty(rows, columns, group, 4, scales, _unpack_awq(qzeros))
    for start, stop in _row_blocks(rows, columns):
        codes = _unpack_awq(qweight[:, start // 8 : stop // 8]).t()
        weight.words[start:stop] = pack_words(codes, 4, weight.lanes)
    return weight


def repack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    checkpoint_format: str = "gptq",
    bits: int = 4,
    group: int | None = None,
) -> Int4Weight:
    """Repack qweight [K * bits / 32, N] int32, low bits first; qzeros [G, N * bits / 32]; scales [G, N];
    g_idx [K]: groups.

    checkpoint_format "gptq" (v1) stores zero points minus one, "gptq_v2" unchanged. With desc_act g_idx is not sorted:
    columns are then reordered group by group, and x is reordered in the same way. bits is 2, 3, 4 or 8; 3-bit codes
    continue from one word into the next. group: None if it follows from K and G.
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"GPTQ with {bits} bits: only 2, 3, 4 and 8 are supported")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(f"unknown GPTQ checkpoint_format {checkpoint_format!r}: gptq and gptq_v2 are supported")
    rows, columns = qweight.shape[1], qweight.shape[0] * 32 // bits
    groups = scales.shape[0]
    group = (-1 if groups == 1 else -(-columns // groups)) if group is None else group
    order = None if g_idx is None else _input_order(g_idx, group)
    zeros = unpack_words32(qzeros, bits).to(torch.int16)  # v1: 15 + 1 is a valid zero point, and 255 + 1 is not 0
    if checkpoint_format == "gptq":
        zeros += 1
    weight = _empty(rows, columns, group, bits, scales, zeros, order)
    for start, stop in _row_blocks(rows, columns):
        _write_codes(weight, start, unpack_words32(qweight[:, start:stop].t().contiguous(), bits))
    return weight


def quantize_int4(weight: Tensor, group: int = 128) -> Int4Weight:
    """Quantise weight [N, K], any float,
    to the nearest of 16 evenly spaced values between each group's minimum and maximum.

    0 is always one of the values. Scales have the weight's type, fp16 for fp32.
    """
    rows, columns = weight.shape
    scale_type = weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.float16
    size = _group_size(columns, group, 4)
    shape = (-(-columns // size), rows)
    scales = torch.empty(shape, dtype=scale_type, device=weight.device)
    zeros = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    packed = _empty(rows, columns, group, 4, scales, zeros)
    for start, stop in _row_blocks(rows, columns, QUANTIZE_ELEMENTS):
        codes, scale, zero = _round_to_groups(weight[start:stop].float(), size, scale_type)
        packed.words[start:stop] = pack_words(codes, 4, packed.lanes)
        packed.scales[: scale.shape[1], start:stop] = scale.t()
        assert packed.zeros is not None
        packed.zeros[: zero.shape[1], start:stop] = zero.t()
    return packed


def _round_to_groups(rows: Tensor, group: int, scale_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [n, K] fp32 -> codes [n, K] uint8, scales [n, G], zeros [n, G].
    The codes are computed with the rounded scales."""
    count, columns = rows.shape
    grouped = F.pad(rows, (0, -columns % group)).view(count, -1, group)
    minimum, maximum = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    tiny = torch.finfo(scale_type).smallest_normal
    scales = ((maximum - minimum) / 15).clamp_(min=tiny).to(scale_type)
    step = scales.float()
    zeros = (-minimum / step).round_().clamp_(0, 15)
    codes = (grouped / step[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return codes.view(count, -1)[:, :columns].to(torch.uint8), scales, zeros.to(torch.uint8)


def _write_codes(weight: Int4Weight, start: int, codes: Tensor) -> None:
    """Write codes [n, K] uint8, in the original order of the inputs, to the weight's rows from `start`."""
    if weight.input_order is not None:
        codes = codes.index_select(1, weight.input_order)
    values = codes if weight.bits == 4 else (codes ^ 128).view(torch.int8)
    weight.words[start : start + codes.shape[0]] = pack_words(values, weight.bits, weight.lanes)


def _plane_bits(bits: int) -> int:
    """Return the bits of the planes that store codes of `bits` bits."""
    return 4 if bits <= 4 else 8


def _empty(
    rows: int,
    columns: int,
    group: int,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    input_order: Tensor | None = None,
) -> Int4Weight:
    """Return a weight whose words are to be filled in. Zero points that are all the middle code are omitted."""
    middle, bits = 1 << (bits - 1), _plane_bits(bits)
    size = _group_size(columns, group, bits)
    lanes = min(32, size)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if zeros is not None and int(zeros.max()) > 255:
        raise ValueError("an 8-bit zero point of 256 has no place in a byte")
    if scales.dtype not in (torch.float16, torch.bfloat16):
        scales = scales.to(torch.float16)
    num_words = padded_columns(columns, bits, lanes) * bits // 16
    num_groups = -(-padded_columns(columns, bits, lanes) // size)
    return Int4Weight(
        words=torch.empty((rows, num_words), dtype=torch.int16, device=scales.device),
        scales=_with_groups(scales, num_groups),
        columns=columns,
        bits=bits,
        lanes=lanes,
        group=size,
        zeros=None if zeros is None else _with_groups(zeros.to(torch.uint8), num_groups),
        zero=middle if bits == 4 else 0,
        input_order=input_order,
    )


def _group_size(columns: int, group: int, bits: int) -> int:
    """Return the group size for the kernel: a row's only group extends to the end of its last chunk."""
    if group == -1 or group >= columns:
        return padded_columns(columns, bits, 32)
    if group in (16, 32, 64) or group % chunk_size(bits, 32) == 0:
        return group
    raise ValueError(f"groups of {group} weights: only 16, 32, 64, multiples of 128 and whole rows (-1) are supported")


def _with_groups(per_group: Tensor, num_groups: int) -> Tensor:
    """Return [G, N] with further rows for groups that are entirely in the padding of the last chunk."""
    return F.pad(per_group, (0, 0, 0, num_groups - per_group.shape[0])).contiguous()


def _input_order(g_idx: Tensor, group: int) -> Tensor | None:
    """Return the order of the columns group by group; None if they are already in order."""
    columns = g_idx.shape[0]
    in_order = torch.arange(columns, device=g_idx.device) // (columns if group == -1 else group)
    if torch.equal(g_idx.long(), in_order):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), in_order):
        raise ValueError(f"g_idx does not divide {columns} columns into groups of {group}")
    return order


def _row_blocks(rows: int, columns: int, elements: int = PACK_ELEMENTS) -> list[tuple[int, int]]:
    step = max(64, elements // columns // 64 * 64)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack [r, c / 8] int32 -> [r, c] uint8."""
    shifts = torch.tensor([4 * AWQ_ORDER.index(column) for column in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def unpack_words32(words: Tensor, bits: int) -> Tensor:
    """Unpack [r, c * bits / 32] int32 -> [r, c] uint8, low bits first. Three words hold 32 codes of 3 bits."""
    if bits == 3:
        return _unpack_3bit(words)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def _unpack_3bit(words: Tensor) -> Tensor:
    """Unpack runs of three words, each 96 consecutive bits: code i is bits 3 i, 3 i + 1 and 3 i + 2."""
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = ((words[..., None] >> bit) & 1).to(torch.uint8).view(words.shape[0], -1, 3)
    return bits[..., 0] | (bits[..., 1] << 1) | (bits[..., 2] << 2)
