"""Turn a reading of the machine into its tile; GPUs are shown side by side.

Does not know: HTTP, templates, how the machine is read.
"""

from __future__ import annotations

from localllm.units import format_bytes
from localllm.web.pages.dashboard.machine import GPUReading, MachineReading
from localllm.web.pages.dashboard.views import GPUUse, MachineUse
from localllm.web.pages.frame.bars import stacked
from localllm.web.pages.frame.views import Fact, Gauge


def machine_use(machine: MachineReading) -> MachineUse:
    gauges = (
        Gauge("CPU", machine.cpu, f"{machine.cpu:.0%} of {machine.cores} cores"),
        _memory_gauge("Memory", machine.memory_used_bytes, machine.memory_total_bytes),
    )
    facts = (Fact("This server", format_bytes(machine.process_bytes), "resident memory"),)
    return MachineUse(gauges, facts, tuple(_gpu(index, gpu) for index, gpu in enumerate(machine.gpus)))


def _gpu(index: int, gpu: GPUReading) -> GPUUse:
    others = max(0, gpu.used_bytes - gpu.process_bytes)
    parts = (
        ("This server", "used", gpu.process_bytes),
        ("Others", "queue", others),
        ("Free", "idle", max(0, gpu.total_bytes - gpu.process_bytes - others)),
    )
    facts = (
        ("Clock", f"{gpu.sm_clock_mhz} MHz" if gpu.sm_clock_mhz is not None else ""),
        ("Temperature", f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else ""),
        ("Power", f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""),
    )
    return GPUUse(
        index=index,
        name=gpu.name,
        utilization=Gauge("Busy", gpu.utilization, f"{gpu.utilization:.0%}"),
        memory=stacked([(name, kind, size, format_bytes(size)) for name, kind, size in parts]),
        facts=tuple(Fact(name, value) for name, value in facts if value),
    )


def _memory_gauge(name: str, used: int, total: int) -> Gauge:
    return Gauge(name, used / total if total else 0.0, f"{format_bytes(used)} of {format_bytes(total)}")
