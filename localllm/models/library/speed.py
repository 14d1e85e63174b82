"""The speed at which a model would generate on this machine, from the memory bandwidth: a range, before any load.

Does not know: how the bandwidth was measured (machine/bandwidth.py), the bytes of a suggested model (pick_sizes.py).
"""

from __future__ import annotations

from localllm.machine.hardware import Hardware
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.library.pick_sizes import GPU, cpu_speed, tokens_per_s
from localllm.models.spec.model_spec import ModelSpec

SpeedRange = tuple[float, float]
"""Least and most tokens per second of one answer with a short context."""


def speed_range(
    read_bytes: float, plan: MemoryPlan, hardware: Hardware, cpu_bandwidth: float | None, *, is_mixture: bool
) -> SpeedRange | None:
    """Return the speed if each token reads so many bytes; None without a bandwidth, and for several ranks, whose
    exchange has not been measured. cpu_bandwidth: bytes/s; None: unknown.
    """
    if plan.ranks:
        return None
    if plan.device == "cpu":
        bandwidth, speed = cpu_bandwidth, cpu_speed()
    else:
        gpu = next(gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == plan.device)
        bandwidth, speed = gpu.place.bandwidth, GPU
    return None if bandwidth is None else tokens_per_s(read_bytes, bandwidth, speed, is_mixture=is_mixture)


def checkpoint_speed(
    spec: ModelSpec, plan: MemoryPlan, hardware: Hardware, cpu_bandwidth: float | None
) -> SpeedRange | None:
    """Return the speed of a checkpoint, of which each token reads all weights; None for a mixture of experts, of which
    it reads a part that the plan does not tell, and for a model that does not generate text.
    """
    if spec.mixture is not None or spec.task != "generate":
        return None
    return speed_range(plan.weights_bytes, plan, hardware, cpu_bandwidth, is_mixture=False)


def speed_in_words(speed: SpeedRange | None) -> str:
    """Return the range for display, "" if unknown: `11 to 24 tokens/s`."""
    if speed is None:
        return ""
    least, most = (f"{round_speed(each):,g}" for each in speed)
    return f"about {least} tokens/s" if least == most else f"{least} to {most} tokens/s"


def round_speed(speed: float) -> float:
    """Return tokens/s with two significant digits, since more would claim too much."""
    return float(f"{speed:.2g}")
