"""The shards of a tensor-parallel model in one process, a thread each: a `Group` that adds up in the shards' order.

Does not know: models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Threads:
    """`size` shards. Each call checks that all shards make the same call with the same shape."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._calls: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self.num_calls = 0  # of all kinds, counted once per group

    def members(self) -> list[Member]:
        return [Member(self, index) for index in range(self.size)]

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return what the calls return, one per shard. An exception in one of them ends the others, and is raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run_one(index: int, call: Callable[[], T]) -> None:
            try:
                results[index] = call()
            except threading.BrokenBarrierError:
                pass  # another shard has failed
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_one, args=each) for each in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._barrier.broken:
            self._barrier.reset()
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(calls))]

    def exchange(self, index: int, kind: str, x: Tensor, make: Callable[[list[Tensor]], T]) -> T:
        """Return `make` of all shards' tensors, which no shard changes before all have called it."""
        self._calls[index] = (kind, x)
        if self._barrier.wait() == 0:
            self.num_calls += 1
        kinds = {(other, tensor.dtype, tensor.shape[:-1]) for other, tensor in self._calls}
        assert len(kinds) == 1, f"shards disagree: {kinds}"
        made = make([tensor for _, tensor in self._calls])
        self._barrier.wait()
        return made


class Member:
    """One shard's view of the group: models/layers/group.py."""

    def __init__(self, threads: Threads, index: int) -> None:
        self._threads, self.size, self.index = threads, threads.size, index

    def sum_(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange("sum", x, _sum))

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert x.shape[-1] == sizes[self.index], (x.shape, sizes)
        return self._exchange("gather", x, lambda all: torch.cat(all, -1))

    def gather_to_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        whole = self.gather(x, sizes)
        return whole if self.index == 0 else None

    def broadcast_(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange("broadcast", x, lambda all: all[0].clone()))

    def _exchange(self, kind: str, x: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return self._threads.exchange(self.index, kind, x, make)


def _sum(tensors: list[Tensor]) -> Tensor:
    assert len({tensor.shape for tensor in tensors}) == 1, [tensor.shape for tensor in tensors]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
