"""Weights in the layouts of matrix.h, written the slow and obvious way, with the values that they stand for.

Does not know: the library, how the package packs weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.cpu.native.structures import OUTPUTS, Kind, NativeMatrix

GROUP = 32
FLOATS = (Kind.F32, Kind.BF16, Kind.F16, Kind.BF16_ROUNDED)
SMALLEST_K = dict.fromkeys(Kind, GROUP) | dict.fromkeys(FLOATS, 1) | {Kind.I8: 4}
"""K is a multiple of this."""
CODES = {Kind.I8: (-128, 127), Kind.Q8: (0, 255), Kind.MXFP4: (7, 15), Kind.NVFP4: (7, 15)}
"""The codes of the extreme values; of the other kinds 0 and 15."""
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
TABLES = {kind: torch.tensor(E2M1 + [-value for value in E2M1]).double() for kind in (Kind.MXFP4, Kind.NVFP4)}
TABLES[Kind.IQ4] = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float64
)


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] in one layout. Keeps the memory alive that `native` points to."""

    native: NativeMatrix
    values: Tensor  # [N, K] float64, column k for x[k]
    memory: tuple[Tensor, ...]


def draw(kind: Kind, outputs: int, inputs: int, *, bias: bool = False, order: bool = False, extreme: bool = False,
         seed: int = 0) -> Packed:  # fmt: skip
    """Return a random weight. extreme: every code is the least or the greatest that the layout can hold. With an odd
    seed, int8 has further inputs in memory, which are not read."""
    rng = torch.Generator().manual_seed(seed)
    padded = -(-outputs // OUTPUTS) * OUTPUTS
    scales, stored_inputs = None, 0
    if kind in FLOATS:
        weights, values = _floats(kind, torch.randn(padded, inputs, generator=rng))
    else:
        codes = _codes(kind, (padded, inputs), extreme, rng)
        if kind == Kind.I8:
            scales = torch.rand(padded, generator=rng) + 0.1
            stored_inputs = -(-inputs // OUTPUTS) * OUTPUTS if seed % 2 else 0
            unread = _codes(kind, (padded, max(0, stored_inputs - inputs)), extreme, rng)
            stored = torch.cat((codes, unread), dim=1)
            weights, values = _fours(stored.to(torch.int8)), codes.double() * scales.double()[:, None]
        else:
            weights, values = _groups(kind, codes, rng)
    biases = torch.randn(padded, generator=rng) if bias else None
    permutation = torch.randperm(inputs, generator=rng) if order else None
    if permutation is not None:
        values = torch.empty_like(values).index_copy_(1, permutation, values)
    packed = _packed(kind, outputs, values, weights, scales, biases, permutation)
    packed.native.stored_inputs = stored_inputs
    return packed


def _packed(kind: Kind, outputs: int, values: Tensor, weights: Tensor, scales: Tensor | None, bias: Tensor | None,
            order: Tensor | None) -> Packed:  # fmt: skip
    space = torch.empty(weights.nbytes + 64, dtype=torch.uint8)
    start = -space.data_ptr() % 64
    space[start : start + weights.nbytes] = weights.reshape(-1).view(torch.uint8)
    order = None if order is None else order.to(torch.int32)
    native = NativeMatrix(
        kind=kind,
        outputs=outputs,
        inputs=values.shape[1],
        weights=space.data_ptr() + start,
        scales=None if scales is None else scales.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        input_order=None if order is None else order.data_ptr(),
    )
    memory = tuple(tensor for tensor in (space, scales, bias, order) if tensor is not None)
    return Packed(native, values[:outputs], memory)


def bias_of(packed: Packed) -> Tensor:
    """Return [N] float64, zeros without a bias."""
    if not packed.native.bias:
        return torch.zeros(packed.native.outputs, dtype=torch.float64)
    bias = next(tensor for tensor in packed.memory if tensor.data_ptr() == packed.native.bias)
    return bias[: packed.native.outputs].double()


def _floats(kind: Kind, w: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = w.shape
    if kind == Kind.F32:
        return w.view(-1, OUTPUTS, columns).transpose(1, 2).contiguous(), w.double()
    w = w.to(torch.float16 if kind == Kind.F16 else torch.bfloat16)
    even = torch.nn.functional.pad(w, (0, columns % 2))
    return even.view(rows // OUTPUTS, OUTPUTS, -1, 2).transpose(1, 2).contiguous(), w.double()


def _codes(kind: Kind, shape: tuple[int, int], extreme: bool, rng: torch.Generator) -> Tensor:
    least, greatest = CODES.get(kind, (0, 15))
    if extreme:
        return torch.where(torch.rand(shape, generator=rng) < 0.5, least, greatest)
    return torch.randint(0 if kind in TABLES else least, greatest + 1, shape, generator=rng)


def _fours(codes: Tensor) -> Tensor:
    """[N, K] bytes -> [N / 64, K / 4, 64, 4]"""
    return codes.view(-1, OUTPUTS, codes.shape[1] // 4, 4).transpose(1, 2).contiguous()


def _groups(kind: Kind, codes: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    rows, columns = codes.shape
    grouped = codes.view(rows, -1, GROUP)
    scales = (torch.rand(grouped.shape[:2], generator=rng) + 0.1).half()
    minima = torch.rand(grouped.shape[:2], generator=rng).half()
    tails = [scales, minima] if kind in (Kind.Q4_MIN, Kind.NVFP4) else [scales]
    if kind == Kind.Q8:
        values, size = (grouped - 128) * scales.double()[..., None], GROUP
        body = codes.to(torch.uint8)
    elif kind in TABLES:
        size, body = GROUP // 2, (grouped[..., :16] | grouped[..., 16:] << 4).to(torch.uint8)
        if kind == Kind.MXFP4:
            exponents = torch.randint(117, 131, grouped.shape[:2], generator=rng)
            each, tails = torch.exp2(exponents.double() - 127)[..., None], [exponents.to(torch.uint8)]
        elif kind == Kind.NVFP4:  # the stored scales belong to the doubled values
            each = torch.stack((scales, minima), dim=2).double().repeat_interleave(16, dim=2) * 2
        else:
            each = scales.double()[..., None]
        values = TABLES[kind][grouped] * each
    else:
        values, size = grouped * scales.double()[..., None] - minima.double()[..., None], GROUP // 2
        if kind == Kind.Q4:
            values = (grouped - 8) * scales.double()[..., None]
        body = (grouped[..., :16] | grouped[..., 16:] << 4).to(torch.uint8)
    blocks = body.reshape(rows // OUTPUTS, OUTPUTS, -1, size // 4, 4).permute(0, 2, 3, 1, 4)
    parts = [blocks.reshape(rows // OUTPUTS, columns // GROUP, -1)]
    parts += [tail.view(-1, OUTPUTS, tail.shape[1]).transpose(1, 2).contiguous().view(torch.uint8) for tail in tails]
    return torch.cat(parts, dim=2), values.reshape(rows, columns)
