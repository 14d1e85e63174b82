"""Find every tensor that a model holds by walking its plain objects, to count or to move them.

Does not know: what a tensor means, where it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from localllm.kernels.quantized_weight import MetaWeight
from localllm.models.layers.embedding import RamTable
from localllm.models.layers.far import FarExperts

PartT = TypeVar("PartT")


def held_bytes(model: object) -> int:
    """Return the bytes of all distinct tensors, and of weights whose sizes alone are known."""
    sizes: dict[object, int] = {}
    for part in _leaves(model):
        if isinstance(part, MetaWeight):
            sizes[id(part)] = part.nbytes
        else:
            opaque = part.is_mkldnn or part.is_meta  # no address to recognise shared tensors by
            sizes[id(part) if opaque else (part.data_ptr(), part.shape)] = _bytes(part)
    return sum(sizes.values())


def far_bytes(model: object) -> int:
    """Return the bytes of the experts and tables that are in RAM while the model is on a device, and of the cache of
    the experts that are on disk."""
    crossing = getattr(model, "crossing", None)
    cache, arena = getattr(crossing, "cache", None), getattr(crossing, "arena", None)
    own = sum(held_bytes(part.experts) for part in parts_of_kind(model, FarExperts) if part.records is None)
    own += sum(table.nbytes for table in parts_of_kind(model, RamTable))
    return own + (0 if cache is None else cache.ram_bytes) + (0 if arena is None else arena.used_bytes)


def held_memory(model: object) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of each tensor, once if it is shared. All tensors are in this machine's memory."""
    spans = {}
    for tensor in _leaves(model):
        if isinstance(tensor, Tensor):
            if tensor.is_mkldnn:
                spans[torch.ops.mkldnn.data_ptr(tensor)] = int(torch.ops.mkldnn._nbytes(tensor))
            else:
                spans[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    yield from spans.items()


def has_only_float32(model: object) -> bool:
    """Return whether no tensor has numbers of fewer bits: products then differ in their last bits at most, however many
    rows they have."""
    wide = (torch.float32, torch.float64, torch.int64, torch.bool)
    return all(isinstance(part, Tensor) and part.dtype in wide for part in _leaves(model))


def _bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes; oneDNN's int8 layout includes padding to whole blocks and sums."""
    if tensor.is_mkldnn and tensor.dtype == torch.int8:
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.numel() * tensor.dtype.itemsize


def replace_tensors(model: object, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor by change(tensor), in place. A shared tensor is changed once and stays shared."""
    changed: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old tensor too, so that its id is not reused

    def new(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in changed:
                changed[id(value)] = (value, change(value))
            return changed[id(value)][1]
        if isinstance(value, list | tuple):
            items = [new(item) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: new(item) for key, item in value.items()}
        return value

    for owner in _objects(model):
        for name, value in () if stays_in_ram(owner) else list(_attributes(owner)):
            replaced = new(value)
            if replaced is not value:
                object.__setattr__(owner, name, replaced)  # also in frozen objects: their values stay equal


def parts_of_kind(model: object, kind: type[PartT]) -> Iterator[PartT]:
    """Yield each part of a model that has this type."""
    yield from (part for part in _objects(model) if isinstance(part, kind))


def _leaves(model: object) -> Iterator[Tensor | MetaWeight]:
    for owner in _objects(model):
        for _, value in () if stays_in_ram(owner) else _attributes(owner):
            yield from _tensors_in(value)
        if isinstance(owner, MetaWeight):
            yield owner


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _objects(root: object) -> Iterator[object]:
    """Yield each of our own objects reachable from `root` once. Parts that stay in RAM while the model is on a device
    (layers/far.py) are yielded, and what they hold is left out."""
    stack, seen = [root], set()
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
        elif _is_walked(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            stack += [] if stays_in_ram(value) else [each for _, each in _attributes(value)]


def stays_in_ram(part: object) -> bool:
    """Return whether a part of a model keeps its tensors in RAM while the model is on a device."""
    return getattr(type(part), "stays_in_ram", False)


def _is_walked(value: object) -> bool:
    ours = type(value).__module__.startswith("localllm.") and not isinstance(value, type)
    return ours or isinstance(value, nn.Module)


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    for kind in type(owner).__mro__:
        names = getattr(kind, "__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(owner, name):
                yield name, getattr(owner, name)
    yield from getattr(owner, "__dict__", {}).items()
