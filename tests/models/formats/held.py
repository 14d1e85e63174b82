"""A checkpoint in memory, a count of what is read of it, and what predicted and real weights have in common."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from localllm.kernels.cpu.stored_blocks import GGUFBlocks
from localllm.kernels.linear import StackedWeight
from localllm.models.formats.checkpoint import TensorInfo

NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.int8: "I8",
         torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # fmt: skip


class Held:
    """A checkpoint in memory."""

    path = Path("memory")

    def __init__(self, tensors: Mapping[str, Tensor], described: Mapping[str, TensorInfo] | None = None) -> None:
        self.held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.tensors: Mapping[str, TensorInfo] = described or {
            name: TensorInfo(self.path, NAMES[t.dtype], tuple(t.shape), t.nbytes) for name, t in self.held.items()
        }

    def tensor(self, name: str) -> Tensor:
        return self.held[name][...]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view of the checkpoint."""
        return tensor.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in self.held.values()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


class ReadBytes(TorchFunctionMode):
    """Counts the bytes of a checkpoint's tensors that operations read, each once. Views read nothing."""

    def __init__(self, checkpoint: Held) -> None:
        super().__init__()
        storages = [tensor.untyped_storage() for tensor in checkpoint.held.values()]
        self.read = {each.data_ptr(): torch.zeros(each.nbytes(), dtype=torch.bool) for each in storages}

    @property
    def count(self) -> int:
        return sum(int(read.sum()) for read in self.read.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_copy = isinstance(out, Tensor) and not self._is_stored(out)
        if is_copy or func.__name__ in ("numpy", "tolist"):
            for each in [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])]:
                if isinstance(each, Tensor) and self._is_stored(each):
                    self._mark(each, args[1] if func is Tensor.__getitem__ and each is args[0] else ())
        return out

    def _is_stored(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.read

    def _mark(self, tensor: Tensor, index: Any) -> None:
        size, read = tensor.dtype.itemsize, self.read[tensor.untyped_storage().data_ptr()]
        strides = [stride * size for stride in tensor.stride()]
        marks = read.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)
        marks[index] = True


def described(weight: Any) -> object:
    """What predicted and real weights have in common: kinds, shapes and types."""
    if isinstance(weight, Tensor):
        return tuple(weight.shape), weight.dtype
    if isinstance(weight, StackedWeight):
        return [described(part) for part in weight.parts]
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    if isinstance(weight, GGUFBlocks):
        values["pieces"] = [described(piece) for piece in weight.pieces]
    return type(weight), {n: described(v) if isinstance(v, Tensor) else v for n, v in values.items() if n != "table"}
