"""Copies small arrays to and from the device without making the host wait.

On CUDA an array is copied through pinned memory. torch's pinned allocator reuses a buffer only after the copies that
read it are done, so a second step in flight cannot overwrite the first one's inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`.
    On the CPU it shares memory with a contiguous array: do not write to it again."""
    tensor = pinned(array, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a host tensor from which `device` can copy asynchronously."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_host(tensor: Tensor) -> Tensor:
    """Return a host copy, complete once the device's stream has reached this point. The original may be overwritten."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def parts_to_host(*tensors: Tensor) -> list[Tensor]:
    """Return host copies, as `to_host`. Contiguous parts of one allocation share one copy, of all of it."""
    storage = tensors[0].untyped_storage()
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        return [to_host(tensor) for tensor in tensors]
    whole = to_host(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return [_part_of(whole, tensor) for tensor in tensors]


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the bytes of a copy of like's allocation [n] uint8 that hold `like`, which is contiguous."""
    first = like.storage_offset() * like.element_size()
    return whole[first : first + like.nbytes].view(like.dtype).view(like.shape)


def all_to_device(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy flat arrays of one dtype to the device; on CUDA they share one copy."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    return list(to_device(np.concatenate(arrays), device).split([len(array) for array in arrays]))


def warm_pinned(most_bytes: int, device: torch.device) -> None:
    """Let torch's pinned allocator hold two buffers of each of its sizes, since a driver allocation stops the device.

    Its sizes are powers of two; a step and the one in flight before it hold a buffer each.
    """
    if device.type == "cuda":
        sizes = [1 << i for i in range(9, max(1, most_bytes - 1).bit_length() + 1)]
        held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(2)]
        del held
