"""The device's activity during some steps, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SMALLEST_GAP_US = 5.0  # smaller gaps between the kernels of one step are normal


class Activity(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start_us: float
    end_us: float


def record(step: Callable[[], None], steps: int) -> list[Activity]:
    """Run `steps` steps under the profiler; empty without a GPU, or if the profiler records none."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        Activity(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def idle_share(activities: Sequence[Activity], smallest_gap: float = SMALLEST_GAP_US) -> float:
    """Return the share of the time from first start to last end that lies in gaps of at least `smallest_gap`."""
    ordered = sorted(activities, key=lambda activity: activity.start_us)
    first, last = ordered[0].start_us, ordered[0].end_us
    idle = 0.0
    for _, start, end in ordered[1:]:
        idle += start - last if start - last >= smallest_gap else 0.0
        last = max(last, end)
    return idle / max(last - first, 1e-9)
