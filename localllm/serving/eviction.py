"""The order in which models are evicted, and the memory they may still claim.

Does not know: how a model is unloaded (manager.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil

from localllm.machine.hardware import Hardware
from localllm.serving.entry import ModelEntry
from localllm.serving.served import ServedModel


def ready(models: Sequence[ModelEntry]) -> list[ServedModel]:
    return [entry.served for entry in models if entry.state == "ready" and entry.served is not None]


def candidates(entry: ModelEntry, models: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Return the models that could be evicted for `entry`, in order: those without requests first, then by LRU."""
    others = [each for each in models if each is not entry and not each.pinned and each.settings is not None]
    on_gpu = _wants_gpu(entry, models)
    awake = [
        each for each in others
        if each.state == "ready" and each.served and (each.served.plan.device != "cpu") == on_gpu
    ]  # fmt: skip
    asleep = [] if on_gpu else [each for each in others if each.state == "sleeping" and not each.is_loading]
    return sorted([*awake, *asleep], key=lambda each: (each.num_leases > 0, each.last_used_s))


def _wants_gpu(entry: ModelEntry, models: Sequence[ModelEntry]) -> bool:
    assert entry.settings is not None
    device = entry.settings.engine.device
    if device == "auto":
        return any(model.plan.device != "cpu" for model in ready(models))
    return device != "cpu"


def has_room_on_host(entry: ModelEntry) -> bool:
    """Return whether a GPU model should sleep instead of being unloaded: a copy from RAM is faster than a load."""
    plan = entry.served.plan if entry.served is not None else None
    if plan is None or plan.device == "cpu" or not can_sleep(entry):
        return False
    memory = psutil.virtual_memory()
    return bool(memory.available - plan.weights_bytes > 0.1 * memory.total)


def can_sleep(entry: ModelEntry) -> bool:
    return entry.served is not None and entry.served.spec.task == "generate"


def reserved_bytes(models: Sequence[ModelEntry], baseline_bytes: int | None) -> int:
    """Return the RAM that the loaded CPU models may still claim: the pages of a KV cache are allocated as they are
    written.

    bare_bytes: RSS of this process without any model; None: unknown.
    """
    plans = [model.plan for model in ready(models) if model.plan.device == "cpu"]
    reserved = sum(plan.kv_bytes + plan.activation_bytes for plan in plans)
    if not reserved or baseline_bytes is None:
        return reserved
    weights = sum(plan.weights_bytes for plan in plans)
    weights += sum(entry.card.plan.weights_bytes for entry in models if entry.asleep is not None and entry.card)
    touched = psutil.Process().memory_info().rss - baseline_bytes - weights
    return int(max(0, reserved - max(0, touched)))


def hardware_once_free(hardware: Hardware, models: Sequence[ModelEntry]) -> Hardware:
    """Return the hardware as the next load could find it: memory of unpinned models counts as free."""
    plans = [entry.served.plan for entry in models if entry.served is not None and not entry.pinned]
    ram = hardware.ram_available_bytes + sum(plan.weights_bytes for plan in plans if plan.device == "cpu")
    gpus = []
    for gpu in hardware.gpus:
        held = sum(plan.total_bytes for plan in plans if plan.device == f"cuda:{gpu.index}")
        gpus.append(replace(gpu, free_bytes=min(gpu.total_bytes, gpu.free_bytes + held)))
    return replace(hardware, gpus=tuple(gpus), ram_available_bytes=min(hardware.ram_total_bytes, ram))
