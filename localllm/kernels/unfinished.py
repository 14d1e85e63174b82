"""Matrix products whose last work is left to their reader, so that it costs no kernel of its own.

A `Product` is not launched yet: its reader tells the kernel what to do with the sums before it writes them. Any other
reader calls `whole`. A row's y has the same bits in every way.

Products also finish what they read: `PendingNorm` is an RMSNorm without its division. Any other reader calls `normed`
(rms_norm.py).
Does not know: how a product is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


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
