"""Experts whose bytes a CPU multiplies, unpacked for a device: from the blocks of native/matrix.h to `ExpertWeights`.

An expert's record has the weights of its matrices in blocks of 64 outputs. A prompt's experts are copied to the device
as they are in RAM, one record after the other, and unpacked there:

    Q4 Q4_MIN MXFP4 NVFP4 IQ4    PlanarExperts: codes, scales and minima change their places, no bit of them
    BF16 F16 F32                 Tensor [E, N, K]
    I8                           ScaledExperts
    a GGUF file's rows           PlanarExperts, as `repack_gguf` makes them; some types have no kernel on a device

Each of them is one launch for all matrices. Limited by memory, and a fiftieth of what the copy itself takes.
Does not know: where records come from (models/layers/far.py), products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.native.structures import GROUP, KIND_STORED, OUTPUTS, Kind, Stored
from localllm.kernels.cpu.q4 import CODE_BYTES, PER_GROUP, TABLES
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.launch import cdiv, runs_triton, tl, triton
from localllm.kernels.moe.weights import ExpertWeights, PlanarExperts, ScaledExperts
from localllm.kernels.planar.layout import chunk_size, pack_words, padded_columns
from localllm.kernels.planar.linear import PlanarWeight

Places = Mapping[str, tuple[int, int]]
"""Where a matrix's fields begin in a record, and their bytes."""
_ELEMENTS = {
    Kind.BF16: (torch.bfloat16, 2), Kind.BF16_ROUNDED: (torch.bfloat16, 2), Kind.F16: (torch.float16, 2),
    Kind.F32: (torch.float32, 1), Kind.I8: (torch.int8, 4),
}  # fmt: skip
"""The type of a weight and the inputs in a lane, of kinds without scales in between."""
_STORED = {
    "Q5_0": (False, None), "Q5_1": (True, None), "Q8_0": (False, None),
    "Q2_K": (True, 80), "Q3_K": (False, 108), "Q5_K": (True, 0), "Q6_K": (False, 208),
}  # fmt: skip
"""The types of a GGUF file that a CPU keeps as stored: whether they have minima, and where in a block the unit of its
scales is; that of the minima is behind it. None: each scale is a number of its own."""


def can_unpack(kind: int, places: Places) -> bool:
    """Return whether `from_lanes` unpacks matrices of a kind of native/matrix.h with these fields."""
    if "input_order" in places:
        return False
    if kind >= KIND_STORED:
        return Stored(kind - KIND_STORED).name in BLOCK_TYPES
    return kind in PER_GROUP or kind in _ELEMENTS


def from_lanes(
    records: Tensor, kind: int, shape: tuple[int, int], places: Places, dtype: torch.dtype
) -> ExpertWeights:  # fmt: skip
    """Return a copy of the matrices [E, N, K] in records [E, bytes] uint8, whose fields are at multiples of 64.

    kind: of native/matrix.h, for which `can_unpack` is True. shape: N, K. dtype: of plain weights.
    """
    first = places["weights"][0]
    if kind >= KIND_STORED:
        size = places["weights"][1]
        return PlanarExperts(_stored(records, Stored(kind - KIND_STORED), shape, first, size), len(records))
    if kind in PER_GROUP:
        return PlanarExperts(_planar(records, Kind(kind), shape, first), len(records))
    values = _elements(records, Kind(kind), shape, first)
    if kind != Kind.I8:
        return values.to(dtype)
    at = places["scales"][0]
    return ScaledExperts(values, _copied(records[:, at : at + 4 * shape[0]]))


def bias_of(records: Tensor, outputs: int, places: Places, dtype: torch.dtype) -> Tensor | None:
    """Return the biases [E, N] in the records; None: the matrix has none."""
    if "bias" not in places:
        return None
    at = places["bias"][0]
    return _copied(records[:, at : at + 4 * outputs]).to(dtype)


def _copied(values: Tensor) -> Tensor:
    """Return bytes [E, 4 n] as a tensor [E, n] fp32 of its own: the records are overwritten while it is read."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _stored(records: Tensor, stored: Stored, shape: tuple[int, int], first: int, size: int) -> GGUFWeight:
    """Return the matrices of a GGUF file's rows as one of E * N outputs."""
    (outputs, columns), num_outputs = shape, len(records) * shape[0]
    if not runs_triton(records, "experts") or stored.name not in _STORED:
        return repack_gguf(records[:, first : first + size].reshape(num_outputs, -1), stored.name, columns)
    kind, (has_mins, unit) = BLOCK_TYPES[stored.name], _STORED[stored.name]
    lanes = min(32, kind.group)
    chunks = padded_columns(columns, kind.bits, lanes) // chunk_size(kind.bits, lanes)

    def per_output(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((count, num_outputs), dtype=dtype, device=records.device)

    words = torch.empty((num_outputs, chunks * lanes), dtype=torch.int16, device=records.device)
    scales = per_output(chunks * 16 // kind.bits, torch.int16 if unit is None else torch.int8)
    mins = torch.empty_like(scales) if has_mins else None
    units, min_units = (
        None if unit is None or not needed else per_output(columns // kind.size, torch.int16)
        for needed in (True, has_mins)
    )
    _stored_kernel[(cdiv(num_outputs, 64), chunks)](
        records, words, scales, mins, units, min_units, records.shape[1], first, outputs, columns // lanes,
        num_outputs, TYPE=int(stored), BITS=kind.bits, LANES=lanes, SIZE=kind.size, NUM_BYTES=kind.num_bytes,
        UNIT=unit or 0, num_warps=stored_warps(stored.name),
    )  # fmt: skip
    if unit is None:
        scales, mins = scales.view(torch.float16), None if mins is None else mins.view(torch.float16)
    return GGUFWeight(
        words, scales, columns, bits=kind.bits, lanes=lanes, group=kind.group, zero=kind.zero, mins=mins,
        super_scales=None if units is None else units.view(torch.float16),
        super_mins=None if min_units is None else min_units.view(torch.float16), block_type=stored.name,
    )  # fmt: skip


def stored_warps(name: str) -> int:
    """Return the warps of `_stored_kernel`. Of codes of 5 bits in four, Triton 3.7 spills up to 60 registers."""
    return 8 if name.startswith("Q5") else 4


def _planar(records: Tensor, kind: Kind, shape: tuple[int, int], first: int) -> PlanarWeight:
    """Return the 4-bit matrices as one of E * N outputs."""
    columns, num_outputs = shape[1], len(records) * shape[0]
    group = GROUP // 2 if kind == Kind.NVFP4 else GROUP
    chunks = padded_columns(columns, 4, group) // chunk_size(4, group)
    words = torch.empty((num_outputs, chunks * group), dtype=torch.int16, device=records.device)
    # 16 bits each, whatever their type: the kernel moves bits.
    scales = torch.empty((chunks * 4, num_outputs), dtype=torch.int16, device=records.device)
    mins = torch.empty_like(scales) if kind == Kind.Q4_MIN else None
    if runs_triton(records, "experts"):
        _nibbles_kernel[(len(records) * cdiv(shape[0], OUTPUTS), chunks)](
            records, records.view(torch.int16), words, scales, mins, records.shape[1], first, shape[0],
            columns // GROUP, num_outputs, KIND=int(kind), LANES=group,
            BLOCK_BYTES=CODE_BYTES + OUTPUTS * PER_GROUP[kind], CODE_BYTES=CODE_BYTES, num_warps=4,
        )  # fmt: skip
    else:
        _nibbles_reference(records, kind, shape, first, words, scales, mins)
    scale_type = torch.bfloat16 if kind == Kind.MXFP4 else torch.float16
    extra: dict[str, Any] = {"zero": 8 if kind == Kind.Q4 else 0, "table": TABLES.get(kind)}
    return PlanarWeight(
        words, scales.view(scale_type), columns, lanes=group, group=group,
        mins=None if mins is None else mins.view(torch.float16), **extra,
    )  # fmt: skip


def _nibbles_reference(
    records: Tensor, kind: Kind, shape: tuple[int, int], first: int, words: Tensor, scales: Tensor, mins: Tensor | None
) -> None:
    """The definition in plain torch."""
    (outputs, columns), count = shape, len(records)
    blocks, groups, size = cdiv(outputs, OUTPUTS), columns // GROUP, CODE_BYTES + OUTPUTS * PER_GROUP[kind]
    held = records[:, first : first + blocks * groups * size].reshape(count, blocks, groups, size)
    codes = held[..., :CODE_BYTES].unflatten(3, (4, OUTPUTS, 4)).permute(0, 1, 4, 2, 3, 5).flatten(4)
    codes = torch.cat((codes & 15, codes >> 4), dim=4)  # [E, blocks, 64, groups, 32]
    rows = codes.reshape(count, blocks * OUTPUTS, columns)[:, :outputs].reshape(-1, columns)
    words.copy_(pack_words(rows, 4, GROUP // 2 if kind == Kind.NVFP4 else GROUP))
    if kind == Kind.MXFP4:
        powers = held[..., None, CODE_BYTES:].to(torch.int16)
        per_group = torch.where(powers > 1, (powers - 1) << 7, 32 << powers.clamp_max(1))  # 2^(e - 128)
    else:
        per_group = held[..., CODE_BYTES:].contiguous().view(torch.int16).unflatten(3, (-1, OUTPUTS))
    _write_by_group(per_group if mins is None else per_group[..., :1, :], outputs, scales)
    if mins is not None:
        _write_by_group(per_group[..., 1:, :] ^ -(2**15), outputs, mins)  # w = code * scale - minimum


def _write_by_group(values: Tensor, outputs: int, out: Tensor) -> None:
    """Write values [E, blocks, groups, scales of a group, 64] to out [padded groups, E * N]."""
    by_group = values.permute(2, 3, 0, 1, 4).flatten(0, 1).flatten(2)[:, :, :outputs].flatten(1)
    out.copy_(F.pad(by_group, (0, 0, 0, len(out) - len(by_group))))


def _elements(records: Tensor, kind: Kind, shape: tuple[int, int], first: int) -> Tensor:
    """Return the weights [E, N, K] of a kind without scales in between."""
    (outputs, columns), (dtype, lane) = shape, _ELEMENTS[kind]
    out = torch.empty((len(records), outputs, columns), dtype=dtype, device=records.device)
    blocks, lanes = cdiv(outputs, OUTPUTS), cdiv(columns, lane)
    if runs_triton(records, "experts"):
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        _elements_kernel[(len(records) * blocks, cdiv(columns, 64))](
            records.view(bits), out.view(bits), records.shape[1] // dtype.itemsize, first // dtype.itemsize, outputs,
            columns, LANE=lane, num_warps=4,
        )  # fmt: skip
        return out
    size = blocks * lanes * OUTPUTS * lane * dtype.itemsize
    held = records[:, first : first + size].contiguous().view(dtype).view(len(records), blocks, lanes, OUTPUTS, lane)
    rows = held.permute(0, 1, 3, 2, 4).reshape(len(records), blocks * OUTPUTS, lanes * lane)
    return out.copy_(rows[:, :outputs, :columns])


@triton.jit
def _nibbles_kernel(
    codes_ptr,  # [E, record_bytes] uint8
    halves_ptr,  # the same memory in int16
    words_ptr,  # [E * N, padded K / 4] int16
    scales_ptr,  # [groups, E * N] int16
    mins_ptr,  # the same, or None
    record_bytes,
    first,
    N,
    GROUPS,  # of 32 inputs
    num_outputs,  # E * N
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    """One program per block of 64 outputs and chunk of words: word w of a chunk has the code of input w of each of the
    chunk's planes."""
    SPAN: tl.constexpr = 4 if LANES == 32 else 2  # groups of 32 inputs in a chunk
    blocks = tl.cdiv(N, 64)
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(1)
    start = expert.to(tl.int64) * record_bytes + first + block.to(tl.int64) * GROUPS * BLOCK_BYTES
    n = tl.arange(0, 64)
    w = tl.arange(0, 16)
    rows = block * 64 + n
    valid = rows < N
    outputs = expert.to(tl.int64) * N + rows
    places = (w // 4)[None, :] * 256 + n[:, None] * 4 + (w % 4)[None, :]
    low = tl.zeros([64, 16], tl.int32)
    high = tl.zeros([64, 16], tl.int32)
    for p in tl.static_range(SPAN):
        group = chunk * SPAN + p
        at = start + group.to(tl.int64) * BLOCK_BYTES
        in_group = n * 0 + group < GROUPS
        pair = tl.load(codes_ptr + at + places, mask=in_group[:, None], other=0).to(tl.int32)
        if LANES == 32:
            low |= (pair & 15) << (4 * p)
            high |= (pair >> 4) << (4 * p)
        else:
            low |= pair << (8 * p)  # planes of 16 inputs: a byte's codes are neighbours
        if KIND == 7:  # MXFP4: a byte e for 2^(e - 128), subnormal below 2
            e = tl.load(codes_ptr + at + CODE_BYTES + n, mask=in_group, other=0).to(tl.int32)
            bits = tl.where(e > 1, (e - 1) << 7, tl.where(e > 0, 64, 32))
            bits = tl.where(in_group, bits, 0)
            tl.store(scales_ptr + group.to(tl.int64) * num_outputs + outputs, bits.to(tl.int16), mask=valid)
        elif LANES == 16:
            for half in tl.static_range(2):
                bits = tl.load(halves_ptr + (at + CODE_BYTES) // 2 + half * 64 + n, mask=in_group, other=0)
                tl.store(scales_ptr + (2 * group + half).to(tl.int64) * num_outputs + outputs, bits, mask=valid)
        else:
            bits = tl.load(halves_ptr + (at + CODE_BYTES) // 2 + n, mask=in_group, other=0)
            tl.store(scales_ptr + group.to(tl.int64) * num_outputs + outputs, bits, mask=valid)
        if mins_ptr is not None:
            least = tl.load(halves_ptr + (at + CODE_BYTES) // 2 + 64 + n, mask=in_group, other=0).to(tl.int32)
            least = tl.where(in_group, least ^ 0x8000, 0)  # w = code * scale - minimum
            tl.store(mins_ptr + group.to(tl.int64) * num_outputs + outputs, least.to(tl.int16), mask=valid)
    stride = tl.num_programs(1).to(tl.int64) * LANES
    words = words_ptr + outputs[:, None] * stride + chunk * LANES + w[None, :]
    tl.store(words, low.to(tl.int16), mask=valid[:, None])
    if LANES == 32:
        tl.store(words + 16, high.to(tl.int16), mask=valid[:, None])


@triton.jit
def _byte(ptr, mask):
    return tl.load(ptr, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(ptr, mask):
    """The bits of an fp16 number at any address."""
    return _byte(ptr, mask) | (_byte(ptr + 1, mask) << 8)


@triton.jit
def _stored_code(block, i, mask, TYPE: tl.constexpr):
    """The codes of inputs i of blocks, by the number of their type in native/stored.h; gguf_blocks.py defines them."""
    if TYPE == 4:  # Q8_0
        return _byte(block + 2 + i, mask)
    elif TYPE <= 3:  # Q5_0, Q5_1: nibbles, and a bit for each
        at: tl.constexpr = 2 * TYPE - 2
        low = (_byte(block + at + 4 + i % 16, mask) >> (i // 16 * 4)) & 15
        code = low | (((_byte(block + at + i // 8, mask) >> (i % 8)) & 1) << 4)
        return code - 16 if TYPE == 2 else code
    elif TYPE == 6:  # Q5_K
        low = (_byte(block + 48 + i // 64 * 32 + i % 32, mask) >> (i % 64 // 32 * 4)) & 15
        return low | (((_byte(block + 16 + i % 32, mask) >> (i // 32)) & 1) << 4)
    elif TYPE == 7:  # Q6_K
        low = (_byte(block + i // 128 * 64 + i % 64, mask) >> (i % 128 // 64 * 4)) & 15
        high = (_byte(block + 128 + i // 128 * 32 + i % 32, mask) >> (i % 128 // 32 * 2)) & 3
        return (low | (high << 4)) - 32
    else:  # Q2_K, Q3_K
        pairs: tl.constexpr = 16 if TYPE == 11 else 32
        code = (_byte(block + pairs + i // 128 * 32 + i % 32, mask) >> (i % 128 // 32 * 2)) & 3
        return code if TYPE == 11 else code | (((_byte(block + i % 32, mask) >> (i // 32)) & 1) << 2)


@triton.jit
def _stored_scales(block, s, mask, TYPE: tl.constexpr):
    """The scales and the minima of groups s of blocks. Types without minima have the scales twice."""
    if TYPE <= 4:  # Q5_0, Q5_1, Q8_0
        return _half(block, mask), _half(block + 2, mask)
    elif TYPE == 6:  # Q5_K: 6 bits, the last four of them in two parts
        first, second = _byte(block + 4 + s % 4, mask), _byte(block + 8 + s % 4, mask)
        third = _byte(block + 12 + s % 4, mask)
        scale = tl.where(s < 4, first & 63, (third & 15) | ((first >> 2) & 48))
        return scale, tl.where(s < 4, second & 63, (third >> 4) | ((second >> 2) & 48))
    elif TYPE == 7:  # Q6_K
        scale = _byte(block + 192 + s, mask)
        return scale, scale
    elif TYPE == 11:  # Q2_K
        both = _byte(block + s, mask)
        return both & 15, both >> 4
    else:  # Q3_K
        low = (_byte(block + 96 + s % 8, mask) >> (s // 8 * 4)) & 15
        scale = (low | (((_byte(block + 104 + s % 4, mask) >> (s // 4 * 2)) & 3) << 4)) - 32
        return scale, scale


@triton.jit
def _stored_kernel(
    rows_ptr,  # [E, record_bytes] uint8
    words_ptr,  # [E * N, padded K * BITS / 16] int16
    scales_ptr,  # [groups, E * N] int8, or int16 with the bits of fp16
    mins_ptr,  # the same, or None
    units_ptr,  # [blocks, E * N] int16 with the bits of fp16, or None
    min_units_ptr,  # the same, or None
    record_bytes,
    first,
    N,
    GROUPS,  # of LANES inputs
    num_outputs,  # E * N
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,  # inputs of a block
    NUM_BYTES: tl.constexpr,
    UNIT: tl.constexpr,  # place of the unit of a block's scales
):
    """One program per 64 outputs and chunk of words; a plane of a chunk is a group."""
    PLANES: tl.constexpr = 16 // BITS
    chunk = tl.program_id(1)
    n = tl.arange(0, 64)
    outputs = tl.program_id(0).to(tl.int64) * 64 + n
    valid = outputs < num_outputs
    expert = outputs // N
    rows = rows_ptr + expert * record_bytes + first + (outputs - expert * N) * (GROUPS * LANES // SIZE * NUM_BYTES)
    lane = tl.arange(0, LANES)
    words = tl.zeros([64, LANES], tl.int32)
    for p in tl.static_range(PLANES):
        group = chunk * PLANES + p
        inside = valid & (n * 0 + group < GROUPS)
        number = group * LANES // SIZE
        place = group * LANES % SIZE
        block = rows + number * NUM_BYTES
        code = _stored_code(block[:, None], (place + lane)[None, :], inside[:, None], TYPE)
        code = tl.where(inside[:, None], code & (2**BITS - 1), 0)
        words |= code << (BITS * p)
        scale, least = _stored_scales(block, place // LANES, inside, TYPE)
        at = group.to(tl.int64) * num_outputs + outputs
        scale = tl.where(inside, scale, 0)
        tl.store(scales_ptr + at, scale.to(scales_ptr.dtype.element_ty), mask=valid)
        if mins_ptr is not None:
            least = tl.where(inside, least, 0)
            tl.store(mins_ptr + at, least.to(mins_ptr.dtype.element_ty), mask=valid)
        begins = inside & (n * 0 + place == 0)
        at = number.to(tl.int64) * num_outputs + outputs
        if units_ptr is not None:
            tl.store(units_ptr + at, _half(block + UNIT, begins).to(tl.int16), mask=begins)
        if min_units_ptr is not None:  # w = scale * code - minimum
            bits = _half(block + UNIT + 2, begins) ^ 0x8000
            tl.store(min_units_ptr + at, bits.to(tl.int16), mask=begins)
    to = words_ptr + outputs[:, None] * (tl.num_programs(1).to(tl.int64) * LANES) + chunk * LANES + lane[None, :]
    tl.store(to, words.to(tl.int16), mask=valid[:, None])


@triton.jit
def _elements_kernel(in_ptr, out_ptr, record_size, first, N, K, LANE: tl.constexpr):
    """One program per block of 64 outputs and 64 inputs. record_size, first: in elements."""
    blocks = tl.cdiv(N, 64)
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    n = tl.arange(0, 64)
    k = tl.program_id(1) * 64 + tl.arange(0, 64)
    start = expert * record_size + first + block * tl.cdiv(K, LANE) * 64 * LANE
    places = (k // LANE)[None, :] * 64 * LANE + n[:, None] * LANE + (k % LANE)[None, :]
    mask = (block * 64 + n < N)[:, None] & (k < K)[None, :]
    values = tl.load(in_ptr + start + places, mask=mask, other=0)
    tl.store(out_ptr + (expert * N + block * 64 + n)[:, None] * K + k[None, :], values, mask=mask)
