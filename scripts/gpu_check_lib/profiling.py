"""The time of a decode step by kernel: launches per step, mean duration, mean gap before each.

profile-NAME.json holds every kernel, as the basis for optimisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from scripts.gpu_check_lib.activity import Activity, record
from scripts.gpu_check_lib.engine import Options, RandomEngine
from scripts.gpu_check_lib.figures import dtype_of, require_memory
from scripts.gpu_check_lib.roofline import work_of
from scripts.gpu_check_lib.stages import Context, Found, Skip
from scripts.random_weights import WeightFormat, shape_spec

STEPS = 20
CONTEXT = 1024
SHOWN = 6  # kernels in the printed text
MODELS: Sequence[tuple[str, WeightFormat, tuple[int, ...]]] = (
    ("llama-3.1-8b", "16-bit", (1, 64)), ("qwen2.5-0.5b", "16-bit", (1,)), ("llama-3.1-8b", "int4", (1,)),
)  # fmt: skip
"""(shape, weights, batches)"""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel's use in a mean step."""

    name: str
    launches: float  # per step
    us: float  # mean of one launch
    gap_us: float  # mean idle time of the device before one launch

    @property
    def step_us(self) -> float:
        return self.launches * (self.us + self.gap_us)


def profile_steps(context: Context) -> Iterator[Found]:
    device = torch.device(context.device)
    for shape, weights, batches in MODELS:
        spec = shape_spec(shape)
        length = CONTEXT + 2 * STEPS + 64
        options = Options(device, dtype_of(device), max_num_seqs=max(batches), max_model_len=length,
                          num_kv_tokens=max(batches) * length, weights=weights)  # fmt: skip
        try:
            require_memory(spec, options, work_of(spec), weights)
        except Skip as reason:
            yield f"{shape} {weights}", "skipped", str(reason)
            continue
        engine = RandomEngine(spec, options)
        for batch in batches:
            seen: list[Activity] = []
            then = lambda step, into=seen: into.extend(record(step, STEPS))  # noqa: E731
            times = engine.decode(batch, CONTEXT, STEPS, then=then)
            yield told(context, f"{shape} {weights} batch {batch}", times.median_s * 1e6, seen)
        engine.close()


def told(context: Context, name: str, unwatched_us: float, activities: Sequence[Activity]) -> Found:
    """Report a profile. unwatched_us: a step's duration without the profiler, which slows the host."""
    if not activities:
        return name, "skipped", "torch's profiler shows no GPU activity here."
    uses = by_kernel(activities, STEPS)
    step_us = sum(use.step_us for use in uses)
    rows = [{**asdict(use), "step_us": use.step_us} for use in uses]
    content = {"steps": STEPS, "step_us": step_us, "unwatched_us": unwatched_us, "kernels": rows}
    context.leave(f"profile-{name.replace(' ', '-')}", content)
    gaps = sum(use.launches * use.gap_us for use in uses)
    launches = sum(use.launches for use in uses)
    largest = "; ".join(f"{use.name[:28]} {use.launches:.0f} x {use.us:.1f} us" for use in uses[:SHOWN])
    text = f"{unwatched_us / 1e3:.3f} ms ({step_us / 1e3:.3f} profiled), {launches:.0f} launches, "
    text += f"{gaps / step_us:.1%} gaps: {largest}"
    return name, "note", text, {"step_us": step_us, "unwatched_us": unwatched_us, "launches": launches, "gaps_us": gaps}


def by_kernel(activities: Sequence[Activity], steps: int) -> list[KernelUse]:
    """Sum up by name, the most expensive first. A kernel that overlaps the previous one has no gap."""
    durations: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, float] = defaultdict(float)
    free_us: float | None = None
    for name, start_us, end_us in sorted(activities, key=lambda activity: activity.start_us):
        durations[name].append(end_us - start_us)
        gaps[name] += 0.0 if free_us is None else max(0.0, start_us - free_us)
        free_us = end_us if free_us is None else max(free_us, end_us)
    uses = [
        KernelUse(name, len(each) / steps, sum(each) / len(each), gaps[name] / len(each))
        for name, each in durations.items()
    ]
    return sorted(uses, key=lambda use: -use.step_us)
