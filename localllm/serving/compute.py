"""Import torch, set its threads, and read the hardware that a load may use.

Does not know: models, plans.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.served import LoadLimits

if TYPE_CHECKING:
    from localllm.machine.hardware import Hardware

log = logging.getLogger(__name__)


def start_torch(on_phase: OnPhase, limits: LoadLimits) -> Hardware:
    """Import torch and return the hardware with the memory that is free for this model. The import takes seconds on a
    cold disk, so it is a phase of its own."""
    from localllm.machine.hardware import read_hardware

    with report_phase("torch", on_phase) as report:
        if "torch" not in sys.modules:
            report("importing torch")
        import torch

        from localllm.runner.device_memory import empty_cache

        empty_cache()  # return memory freed by an unloaded model to the device
        hardware = read_hardware()
        available = max(0, hardware.ram_available_bytes - limits.reserved_bytes)
        hardware = replace(hardware, ram_available_bytes=available)
        if hardware.gpus:
            from localllm.kernels.tuned import ensure_triton_cache

            ensure_triton_cache()
        set_compute_threads(hardware)
        report(f"torch {torch.__version__} · {torch.get_num_threads()} compute threads")
    return hardware


def set_compute_threads(hardware: Hardware) -> None:
    """Use one compute thread per physical core: two threads on one core share its vector units and only interfere.

    A user's OMP_NUM_THREADS stays in force; torch has already read it.
    """
    import torch

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(hardware.cpu_cores)
    log.info("compute threads=%d physical_cores=%d", torch.get_num_threads(), hardware.cpu_cores)
