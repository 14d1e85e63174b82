"""Import torch, set its threads, read the hardware that a load may use, and free what an ended engine held.

Does not know: models, plans.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.machine.bandwidth import probed, with_kept_speeds
from localllm.machine.memory import paused_collection, permanent_objects
from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.served import LoadLimits

if TYPE_CHECKING:
    from localllm.machine.hardware import Hardware


log = logging.getLogger(__name__)


def importing_torch() -> AbstractContextManager[None]:
    """Return the block in which torch is imported: what the first import makes lives as long as the process."""
    return paused_collection() if "torch" in sys.modules else permanent_objects()


def start_torch(on_phase: OnPhase, limits: LoadLimits) -> Hardware:
    """Import torch and return the hardware with the memory that is free for this model. The import takes seconds on a
    cold disk, so it is a phase of its own."""
    from localllm.machine.hardware import read_hardware

    with report_phase("torch", on_phase) as report:
        if "torch" not in sys.modules:
            report("importing torch")
        with importing_torch():
            import torch

            from localllm.runner.device_memory import empty_cache

        empty_cache()  # return memory freed by an unloaded model to the device
        hardware = read_hardware()
        available = max(0, hardware.ram_available_bytes - limits.reserved_bytes)
        hardware = replace(hardware, ram_available_bytes=available)
        if hardware.gpus:
            from localllm.kernels.cpu.native_product import product_speeds

            report("measuring the memory's speed")
            hardware = probed(hardware, product_speeds)  # where the model runs may depend on it
        else:
            hardware = with_kept_speeds(hardware)
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


def release_cached_memory() -> None:
    """Return freed memory to the device and the system; otherwise both allocators would keep it. Does nothing in a
    process that has not imported torch, which has held no model.
    """
    if "torch" not in sys.modules:
        return
    from localllm.models.loader import trim_heap
    from localllm.runner.device_memory import empty_cache

    empty_cache()
    trim_heap()


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the frames of a stored error's traceback, as they would hold the weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
