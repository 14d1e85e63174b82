"""The simulated device's way to RAM: copies that take effect only when the host waits for them."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.models.layers.far import RamLink


class LateLink(RamLink):
    """Copies to RAM take effect in `wait`; until then the target is NaN, or ids that no layer has."""

    __slots__ = ("buffers", "copies")

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.buffers: list[Tensor] = []
        self.copies: list[Callable[[], object]] = []

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
