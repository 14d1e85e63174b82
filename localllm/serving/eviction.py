"""The order in which models are evicted, and the memory they may still claim.

Does not know: how a model is unloaded (manager.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from localllm.machine.hardware import Hardware, process_bytes
from localllm.models.fit import MemoryPlan, RankPlan
from localllm.serving.entry import ModelEntry
from localllm.serving.served import ServedModel


def ready(models: Sequence[ModelEntry]) -> list[ServedModel]:
    return [entry.served for entry in models if entry.state == "ready" and entry.served is not None]


def candidates(entry: ModelEntry, models: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Return the models that could be evicted for `entry`, in order: those without requests first, then by LRU."""
    if entry.is_beside:
        return []
    others = [each for each in models if each is not entry and not each.pinned and each.settings is not None]
    wanted = _wanted_devices(entry, models)
    awake = [
        each for each in others
        if each.state == "ready" and each.served and not wanted.isdisjoint(devices_of(each.served.plan))
    ]  # fmt: skip
    asleep = (
        [] if "cpu" not in wanted else [each for each in others if each.state == "sleeping" and not each.is_loading]
    )
    return sorted([*awake, *asleep], key=lambda each: (each.num_leases > 0, each.last_used_s))


def devices_of(plan: MemoryPlan) -> frozenset[str]:
    """Return the devices that a model is on: cpu, cuda:0, ..."""
    return frozenset(rank.device for rank in plan.ranks) or frozenset((plan.device,))


def _wanted_devices(entry: ModelEntry, models: Sequence[ModelEntry]) -> frozenset[str]:
    """Return the devices that `entry` may be loaded to, among those that models are on."""
    assert entry.settings is not None
    engine = entry.settings.engine
    gpus = frozenset().union(*(devices_of(model.plan) for model in ready(models))) - {"cpu"}
    if engine.device == "cpu" or (engine.device == "auto" and not gpus):
        return frozenset(("cpu",))
    if engine.device_ids and all(name.isdigit() for name in engine.device_ids):  # a UUID may be that of any
        return frozenset(f"cuda:{name}" for name in engine.device_ids)
    return frozenset((engine.device,)) if engine.device.startswith("cuda:") else gpus


def has_room_on_host(entry: ModelEntry) -> bool:
    """Return whether a GPU model should sleep instead of being unloaded: a copy from RAM is faster than a load."""
    plan = entry.served.plan if entry.served is not None else None
    if plan is None or "cpu" in devices_of(plan) or not can_sleep(entry):
        return False
    memory = psutil.virtual_memory()
    return bool(memory.available - plan.weights_bytes > 0.1 * memory.total)


def can_sleep(entry: ModelEntry) -> bool:
    """Return whether a loaded model may sleep: one that generates text, in one replica."""
    return entry.served is not None and entry.served.spec.task == "generate" and not entry.has_replicas


def reserved_bytes(models: Sequence[ModelEntry], baseline_bytes: int | None) -> int:
    """Return the RAM that the loaded CPU models may still claim: the pages of a KV cache are allocated as they are
    written.

    baseline_bytes: RSS of this process without any model; None: unknown.
    """
    on_cpu = [model for model in ready(models) if model.plan.device == "cpu"]
    in_ranks = sum(_reserved_by_ranks(model) for model in on_cpu if model.plan.ranks)
    return in_ranks + _reserved_here([model.plan for model in on_cpu if not model.plan.ranks], models, baseline_bytes)


def _reserved_by_ranks(model: ServedModel) -> int:
    """Return the RAM that the processes of a model's ranks may still claim."""
    plan = model.plan
    ranks = model.engine[0].runner.stats().ranks
    held = sum(process_bytes(Path(f"/proc/{rank.pid}/status")) for rank in ranks if rank.is_up)
    touched = held - plan.weights_bytes - plan.comm_bytes
    return max(0, plan.kv_bytes + plan.activation_bytes - max(0, touched))


def _reserved_here(plans: Sequence[MemoryPlan], models: Sequence[ModelEntry], baseline_bytes: int | None) -> int:
    """Return the RAM that the models in this process may still claim."""
    reserved = sum(plan.kv_bytes + plan.state_bytes + plan.activation_bytes for plan in plans)
    if not reserved or baseline_bytes is None:
        return reserved
    weights = sum(plan.weights_bytes for plan in plans)
    asleep = [entry.card.plan for entry in models if entry.asleep is not None and entry.card]
    weights += sum(plan.weights_bytes for plan in asleep if not plan.ranks)
    touched = psutil.Process().memory_info().rss - baseline_bytes - weights
    return int(max(0, reserved - max(0, touched)))


def hardware_once_free(hardware: Hardware, models: Sequence[ModelEntry]) -> Hardware:
    """Return the hardware as the next load could find it: memory of unpinned models counts as free."""
    plans = [entry.served.plan for entry in models if entry.served is not None and not entry.pinned]
    parts: list[MemoryPlan | RankPlan] = [part for plan in plans for part in plan.ranks or (plan,)]
    ram = hardware.ram_available_bytes
    ram += sum(part.weights_bytes + part.comm_bytes for part in parts if part.device == "cpu")
    ram += sum(plan.far.ram_bytes for plan in plans if plan.far is not None)
    gpus = []
    for gpu in hardware.gpus:
        held = sum(part.total_bytes for part in parts if part.device == f"cuda:{gpu.index}")
        gpus.append(replace(gpu, free_bytes=min(gpu.total_bytes, gpu.free_bytes + held)))
    return replace(hardware, gpus=tuple(gpus), ram_available_bytes=min(hardware.ram_total_bytes, ram))
