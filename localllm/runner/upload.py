"""Small arrays from the host to the device, and back, without making the host wait.

On CUDA an array goes through pinned memory; torch's pinned allocator hands a buffer out again only after the copies
that read it are done, so a second step in flight cannot overwrite the first one's inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`. On the CPU it shares memory with a contiguous array: do not write it again."""
    tensor = pinned(array, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the host from which `device` can copy by itself."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, there once the device's stream has come this far; the original may be written again."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def all_to_device(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Flat arrays of one dtype; on CUDA they travel in one copy."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    return list(to_device(np.concatenate(arrays), device).split([len(array) for array in arrays]))
