"""What the device did while some steps ran, as torch's profiler saw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SMALLEST_GAP_US = 5.0  # between two kernels of one step there is always a little


class Activity(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start_us: float
    end_us: float


def record(step: Callable[[], None], steps: int) -> list[Activity]:
    """Run `steps` steps under the profiler; empty where there is no GPU, or the profiler sees none."""
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
    """Share of the time from the first start to the last end in gaps of at least `smallest_gap` without activity."""
    ordered = sorted(activities, key=lambda activity: activity.start_us)
    first, last = ordered[0].start_us, ordered[0].end_us
    idle = 0.0
    for _, start, end in ordered[1:]:
        idle += start - last if start - last >= smallest_gap else 0.0
        last = max(last, end)
    return idle / max(last - first, 1e-9)
