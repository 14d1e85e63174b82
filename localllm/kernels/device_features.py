"""Features of the device that kernels are launched on."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from localllm.kernels.launch import INTERPRETED


class DeviceFeatures(NamedTuple):
    """Features of the device that kernels may use."""

    arch: int  # compute capability as 75, 80, 90; 80 for other vendors
    tma: bool  # also: programmatic dependent launch
    ptx: bool


@cache
def device_features(device: torch.device) -> DeviceFeatures:
    if INTERPRETED or torch.version.hip is not None:
        return DeviceFeatures(80, False, False)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFeatures(10 * major + minor, major >= 9, True)
