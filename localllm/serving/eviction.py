"""The order in which models are evicted, and the memory they may still claim.

Does not know: how a model is unloaded (manager.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil

from localllm.machine.hardware import Hardware
from localllm.serving.entry import Kept
from localllm.serving.served import ServedModel


def ready(models: Sequence[Kept]) -> list[ServedModel]:
    return [kept.served for kept in models if kept.state == "ready" and kept.served is not None]


def candidates(kept: Kept, models: Sequence[Kept]) -> list[Kept]:
    """Return the models that could be evicted for `kept`, in order: those without requests first, then by LRU."""
    others = [each for each in models if each is not kept and not each.pinned and each.settings is not None]
    on_gpu = _wants_gpu(kept, models)
    awake = [
        each for each in others
        if each.state == "ready" and each.served and (each.served.plan.device != "cpu") == on_gpu
    ]  # fmt: skip
    asleep = [] if on_gpu else [each for each in others if each.state == "sleeping" and not each.is_coming]
    return sorted([*awake, *asleep], key=lambda each: (each.num_leases > 0, each.last_used_s))


def _wants_gpu(kept: Kept, models: Sequence[Kept]) -> bool:
    assert kept.settings is not None
    device = kept.settings.engine.device
    if device == "auto":
        return any(model.plan.device != "cpu" for model in ready(models))
    return device != "cpu"


def has_room_on_host(kept: Kept) -> bool:
    """Whether a GPU model should sleep instead of being unloaded: copying back from RAM is faster than loading."""
    plan = kept.served.plan if kept.served is not None else None
    if plan is None or plan.device == "cpu" or not can_sleep(kept):
        return False
    memory = psutil.virtual_memory()
    return bool(memory.available - plan.weights_bytes > 0.1 * memory.total)


def can_sleep(kept: Kept) -> bool:
    return kept.served is not None and kept.served.spec.task == "generate"


def promised_bytes(models: Sequence[Kept], bare_bytes: int | None) -> int:
    """Return the RAM that the loaded CPU models may still claim: the pages of a KV cache are allocated as they are
    written.

    bare_bytes: RSS of this process without any model; None: unknown.
    """
    plans = [model.plan for model in ready(models) if model.plan.device == "cpu"]
    promised = sum(plan.kv_bytes + plan.activation_bytes for plan in plans)
    if not promised or bare_bytes is None:
        return promised
    weights = sum(plan.weights_bytes for plan in plans)
    weights += sum(kept.card.plan.weights_bytes for kept in models if kept.asleep is not None and kept.card)
    touched = psutil.Process().memory_info().rss - bare_bytes - weights
    return int(max(0, promised - max(0, touched)))


def hardware_once_free(hardware: Hardware, models: Sequence[Kept]) -> Hardware:
    """Return the hardware as the next load could find it: memory of unpinned models counts as free."""
    plans = [kept.served.plan for kept in models if kept.served is not None and not kept.pinned]
    ram = hardware.ram_available_bytes + sum(plan.weights_bytes for plan in plans if plan.device == "cpu")
    gpus = []
    for gpu in hardware.gpus:
        held = sum(plan.total_bytes for plan in plans if plan.device == f"cuda:{gpu.index}")
        gpus.append(replace(gpu, free_bytes=min(gpu.total_bytes, gpu.free_bytes + held)))
    return replace(hardware, gpus=tuple(gpus), ram_available_bytes=min(hardware.ram_total_bytes, ram))
