"""Matrix products whose epilogue (adding K splits, gate, norm) is fused into the kernel that makes or reads y.

A `Product` is not launched yet: its reader tells the kernel what to do with the sums before it writes them. Any other
reader calls `whole`. Products also finish what they read: `PendingNorm` is an RMSNorm without its division. Any other
reader calls `normed` (rms_norm.py). Every way gives bit-identical rows.

A product of few rows splits K to fill the GPU: y = part 0 + part 1 + ..., in this order. Each program writes the fp32
sums of one split of one tile and counts that it has. The program that counts last adds the tile's parts, and goes on as
the only program of an unsplit tile does: scales, bias, activation, addition to the stream. So a split product needs no
second kernel. Parts are added in the order of the splits, whichever program is the last: y has the same bits in every
run.

A tile's counter is zero before and after each product, since the last program resets it. `prepare_step` sets all to
zero at the start of a step, in case the step before was aborted. Products of one stream share the counters; each runner
has its own (`LaunchOptions.counters`).
Does not know: how a product is computed or split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.launch import is_last_program, launch_options, tl, triton

COUNTERS = 4096  # tiles of one product whose K is split
SUMS = 4096  # of a tile that are loaded at once: as many as the registers of four warps hold beside the sums
SUMS_AT_ONCE = tl.constexpr(SUMS)


def new_counters(device: torch.device) -> Tensor:
    """Return [COUNTERS] int32, all zero."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def parts_and_counters(splits: int, rows: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scratch memory of a product that is about to be launched: [splits, rows, n] fp32, and the counters."""
    parts = torch.empty((splits, rows, n), dtype=torch.float32, device=device)
    counters = launch_options().counters
    if counters is None:
        counters = _default_counters(device, torch.cuda.current_stream(device).cuda_stream if parts.is_cuda else 0)
    return parts, counters


@cache
def _default_counters(device: torch.device, stream: int) -> Tensor:
    """Return the counters of a stream on which products run outside of a runner."""
    return new_counters(device)


def parts_at_once(splits: int, tile_sums: int) -> int:
    """Return how many parts of a tile of `tile_sums` sums are loaded at once. Unlike the number of splits, this is a
    constant of the kernel, so that tiles with several numbers of splits are compiled once."""
    return min(splits, max(1, SUMS // tile_sums))


@triton.jit
def places_of_part(m, n, in_n, rows, N):
    """Return where a tile's sums [N, M] are within a part, and which of them exist.

    m [M] and n [N]: rows of x and of W. in_n [N]: whether a row of W is in this tile, and not its edge.
    """
    return m[None, :] * N + n[:, None], (m < rows)[None, :] & in_n[:, None]


@triton.jit
def is_last_part(total, parts_ptr, counter_ptr, places, inside, part, rows, N, splits):
    """Write `total`, the sums of one of `splits` parts of a tile. Return whether all parts are written."""
    tl.store(parts_ptr + part * (tl.cast(rows, tl.int64) * N) + places, total, mask=inside)
    return is_last_program(counter_ptr, splits)


@triton.jit
def sum_of_parts(parts_ptr, places, inside, rows, N, splits, AT_ONCE: tl.constexpr):
    """Return a tile's sums of all parts, fp32; 0 where they do not exist. AT_ONCE: see `parts_at_once`."""
    total = tl.zeros(places.shape, tl.float32)
    for first in range(0, splits, AT_ONCE):
        for each in tl.static_range(AT_ONCE):
            # Other programs have just written the parts, so they are in L2 and not in this processor's L1.
            part_ptr = parts_ptr + (first + each) * (tl.cast(rows, tl.int64) * N)
            total += tl.load(part_ptr + places, mask=inside, other=0.0, cache_modifier=".cg")
    return total


class Product(ABC):
    """y [M, N] = x W^T + b, before the launch. Its inputs must not change until one of its methods computes it."""

    __slots__ = ()
    x: Tensor  # [M, K]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @abstractmethod
    def whole(self, out: Tensor | None = None) -> Tensor:
        """Return y, in `out` [M, N] and its dtype if given."""

    @abstractmethod
    def gated(self, activation: str) -> Tensor | None:
        """Return act(gate) * up [M, N / 2] where y is [gate; up]; None if that takes a kernel of its own (gated.py)."""

    def add_and_norm(self, residual: Tensor, weight: Tensor, eps: float) -> PendingNorm | None:
        """Add y to residual [M, N], contiguous, in place, and return the norm of the sum; None if that takes a kernel
        of its own (rms_norm.py). weight [N] fp32."""
        return None


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """An RMSNorm of a stream [T, H] whose rows are not yet divided by their root mean square.

    A product is linear, so that it may divide its own sums instead: rms_norm(x) W^T = (x * weight) W^T / rms(x).
    """

    stream: Tensor  # [T, H], unchanged until the norm has been read
    weight: Tensor  # [H] fp32
    eps: float
    scaled: Tensor  # [T, H] = stream * weight
    squares: Tensor  # [T, P] fp32: a row's add up to the sum of the stream's squares

    @property
    def shape(self) -> torch.Size:
        return self.scaled.shape

    @property
    def device(self) -> torch.device:
        return self.scaled.device


Unfinished = Tensor | Product


def whole(y: Unfinished, out: Tensor | None = None) -> Tensor:
    """Return y [M, N]: a tensor unchanged, otherwise computed, in `out` [M, N] and its dtype if given."""
    return y if isinstance(y, Tensor) else y.whole(out)
