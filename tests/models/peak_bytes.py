"""A meter of the memory that tensors hold, on any device. Packed weights are not counted."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):  # made of others, which are seen
            with self:
                return func.decompose(*args, **(kwargs or {}))
        given = {
            id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and not each.is_mkldnn
        }
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not each.is_mkldnn and id_of(each) not in given | self._held.keys():
                storage = each.untyped_storage()
                self._held[id_of(each)] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._drop, id_of(each))
        self.peak = max(self.peak, self._now)
        return out

    def _drop(self, key: int) -> None:
        self._now -= self._held.pop(key, 0)


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
