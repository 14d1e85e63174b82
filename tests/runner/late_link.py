"""The simulated device's ways to and from RAM: copies that take effect only when somebody waits for them; and small
experts for it."""

from collections.abc import Callable, Iterable
from random import Random

import torch
from torch import Tensor

from localllm.models.layers.far import PLACES, RamLink
from localllm.models.layers.moe import Experts


class LateLink(RamLink):
    """Copies to RAM take effect in `wait`; until then the target is NaN, or ids that no layer has.

    A copy ahead takes effect at once, or when the device waits for it, or in between, as `times` draws. Until then
    the buffer is full of bytes that are NaN in every type. It is an error to begin one into a buffer that the device
    has not released, and to wait for one that nobody began.
    """

    __slots__ = ("ahead", "buffers", "copies", "num_ahead", "reading", "times")

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.buffers: list[Tensor] = []
        self.copies: list[Callable[[], object]] = []
        self.times = Random(seed)
        self.ahead: dict[int, Callable[[], object] | None] = {}  # of each place; None: it has taken effect
        self.reading: set[int] = set()  # places that the device has waited for and not released
        self.num_ahead = 0

    def buffer(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        self.buffers.append(super().buffer(rows, width, dtype))
        return self.buffers[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        if any(target.data_ptr() == buffer.data_ptr() for buffer in self.buffers):
            kept = source.clone()
            target.fill_(torch.nan if target.is_floating_point() else 2**30)
            self.copies.append(lambda: target.copy_(kept))
        else:
            target.copy_(source)

    def wait(self) -> None:
        for copy in self.copies:
            copy()
        self.copies.clear()

    def copy_ahead(self, place: int, target: Tensor, pieces: Iterable[tuple[Tensor, bool]]) -> None:
        assert place not in self.reading, "a buffer is overwritten while the device reads it"
        assert 0 <= place < PLACES
        self.some_take_effect()
        whole = torch.cat([piece for piece, _ in pieces])
        assert len(whole) == len(target)
        target.fill_(0xFF)
        self.ahead[place] = lambda: target.copy_(whole)
        self.num_ahead += 1
        self.some_take_effect()

    def finish_copies(self) -> None:
        for place in self.ahead:
            self.await_copy(place)
            self.release(place)

    def await_copy(self, place: int) -> None:
        self.some_take_effect()
        if (copy := self.ahead[place]) is not None:
            copy()
        self.ahead[place] = None
        self.reading.add(place)

    def release(self, place: int) -> None:
        self.reading.remove(place)

    def some_take_effect(self) -> None:
        """The device's other stream goes on: its copies are done in their order."""
        for place, copy in self.ahead.items():
            if copy is not None and self.times.random() < 0.3:
                copy()
                self.ahead[place] = None


def experts_of(count: int = 6, hidden: int = 32, width: int = 24) -> Experts:
    torch.manual_seed(0)
    return Experts(torch.randn(count, 2 * width, hidden) * 0.3, torch.randn(count, hidden, width) * 0.3, "silu")


def chosen(rows: int, count: int = 6, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).int()
    return torch.randn(rows, 32), ids, torch.rand(rows, top_k)
