"""Owns a model's weights and opens runners on them.

`Executor` is what serving/ knows of the place where a model's weights are. `LocalExecutor` holds them in this process,
on one device. One runner is open at a time; between two runners the weights stay, and may move to host memory.
Does not know: requests, why a runner is opened again, names of models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self, cast

import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.engine.step import RankStats, Runner
from localllm.errors import DeviceLost, DoesNotFit
from localllm.kernels.launch import launching_with
from localllm.machine.hardware import Hardware, available_ram
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.drafters.opening import open_drafter
from localllm.models.encoders.source import SourceEncoder, load_encoder
from localllm.models.fit import MemoryPlan
from localllm.models.fit.checkpoint import lora_limits
from localllm.models.layers.group import Group
from localllm.models.layers.lora import LoraBank
from localllm.models.loader import DiskExperts, load_model
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from localllm.models.vision.tower import Towers, load_towers, tower_dtype
from localllm.models.weights.lora import LoraFile, put_lora
from localllm.models.weights.parameters import far_bytes, held_bytes, replace_tensors
from localllm.models.weights.source import Progress
from localllm.runner.device_errors import loading_weights
from localllm.runner.device_memory import make_current
from localllm.runner.host_steps import ReopenableModel
from localllm.runner.opening import ReportDetail, close_tables, launch_options_of, open_runner
from localllm.runner.runner import crossing_of
from localllm.units import format_bytes

log = logging.getLogger(__name__)

CHECKED_BYTES = 256 * 2**20  # of a checkpoint, that are loaded between two looks at the free RAM


class AdapterSlots(Protocol):
    """The memory of a model for LoRA adapters."""

    @property
    def max_loras(self) -> int: ...

    def put(self, slot: int, lora: LoraFile) -> None:
        """Load an adapter into a slot that no request uses. Raises `UnsupportedModel`, `CorruptModel`."""
        ...


class Executor(Protocol):
    """The owner of a model's weights. Not thread-safe."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights now, with the rotary tables of the last context length."""
        ...

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """Slots for adapters; None: the model was loaded without memory for them."""
        ...

    def resident_bytes(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        """Return the bytes of the weights with the tables of another context length, for models/fit. shard: of which
        rank; None: of all."""
        ...

    def as_if_not_loaded(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the memory of the weights counted as free."""
        ...

    def open_runner(
        self, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, report: ReportDetail
    ) -> tuple[Runner, MemoryPlan]:
        """Return a runner, warmed up, and the plan it was built with, which may have fewer KV blocks than `plan`.

        hardware: with the memory of the weights counted as free. Raises `DoesNotFit`.
        """
        ...

    def move_to_host(self) -> None:
        """Move the weights to host memory. No runner may be open."""
        ...

    def move_to_device(self) -> None: ...

    def continue_from(self, lost: Sequence[RankStats]) -> None:
        """Count the losses of the ranks that held the model before, by rank, in the runner's statistics."""
        ...

    def when_lost(self, act: Callable[[DeviceLost], None]) -> None:
        """Have `act` called from another thread when the weights are lost, at once if they are."""
        ...

    def close(self) -> None:
        """Free the weights. The runner must be closed. Idempotent."""
        ...


class LocalExecutor:
    """A model on one device, in this process."""

    def __init__(
        self, model: ReopenableModel, spec: ModelSpec, device: torch.device, allocated_before: int = 0,
        drafter: Drafter | None = None, tower: Towers | SourceEncoder | None = None,
    ) -> None:  # fmt: skip
        """allocated_before: bytes that torch had allocated on a GPU before the model was loaded."""
        self._model: ReopenableModel | None = model
        self._spec, self._device, self._drafter, self._tower = spec, device, drafter, tower
        self._far_bytes = far_bytes(model)
        self._fixed_bytes = held_bytes([model, drafter]) - model.table_bytes(model.max_model_len)
        self._allocated_bytes = self._allocated() - allocated_before - model.table_bytes(model.max_model_len)
        self._is_on_host = False

    @classmethod
    def load(
        cls, path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, progress: Progress,
        shard: Shard | None = None, group: Group | None = None,
    ) -> Self:  # fmt: skip
        """Load the checkpoint, or one shard of it, onto the plan's device. Raises what `load_model` raises, and
        `DoesNotFit`."""
        device = torch.device(plan.device)
        make_current(device)  # the transformers backend runs the model while it loads
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with loading_weights(plan.weights_bytes, plan.device), launching_with(launch_options_of(config, device)):
            model = load_model(
                path, spec, device, getattr(torch, plan.dtype), _while_ram_lasts(plan, progress),
                max_model_len=plan.max_model_len, quantization=config.quantization, verify=config.verify,
                lora=lora_limits(config), cpu_weights=config.cpu_weights,
                half_weights=config.keeps_half_weights, shard=shard, group=group,
                far_layers=() if plan.far is None else plan.far.layers,
                far_tables=() if plan.far is None else [each.name for each in plan.far.tables], disk=_disk_of(plan),
            )  # fmt: skip
            drafter = _load_drafter(spec, model, device, config, plan, shard)
            tower: Towers | SourceEncoder | None = None
            if plan.pictures is not None or plan.sounds is not None:
                tower = load_towers(
                    path, None if plan.pictures is None else spec.vision, None if plan.sounds is None else spec.hearing,
                    device, tower_dtype(getattr(torch, plan.dtype)),
                )  # fmt: skip
            if plan.sources is not None:
                tower = load_encoder(path, device, getattr(torch, plan.dtype))
        return cls(cast("ReopenableModel", model), spec, device, before, drafter, tower)

    @property
    def model(self) -> ReopenableModel:
        """The model, until the executor is closed."""
        assert self._model is not None, "the executor is closed"
        return self._model

    @property
    def drafter(self) -> Drafter | None:
        """The drafter with weights, or the rank's share of it; None: another stage holds it, or there is none."""
        return self._drafter

    @property
    def tower(self) -> Towers | SourceEncoder | None:
        """The parts that read pictures and sound, or the prompts of an encoder-decoder; None: they are not loaded."""
        return self._tower

    @property
    def weights_bytes(self) -> int:
        tower = 0 if self._tower is None else self._tower.bytes_held
        return self._fixed_bytes + tower + self.model.table_bytes(self.model.max_model_len)

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        bank = getattr(self.model, "lora", None)
        return None if bank is None else BankSlots(bank)

    def resident_bytes(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        return self._fixed_bytes + self.model.table_bytes(max_model_len)

    def as_if_not_loaded(self, hardware: Hardware) -> Hardware:
        weights = self.weights_bytes
        hardware = replace(hardware, ram_available_bytes=hardware.ram_available_bytes + self._far_bytes)
        if self._device.type == "cpu":
            return replace(hardware, ram_available_bytes=hardware.ram_available_bytes + weights)
        if self._is_on_host:
            return hardware
        index = self._device.index or 0
        gpus = (replace(g, free_bytes=g.free_bytes + weights) if g.index == index else g for g in hardware.gpus)
        return replace(hardware, gpus=tuple(gpus))

    def open_runner(
        self, config: EngineConfig, plan: MemoryPlan, hardware: Hardware, report: ReportDetail
    ) -> tuple[Runner, MemoryPlan]:
        make_current(self._device)
        self._forget_stream()
        self.serve_context(plan.max_model_len)
        others = self._allocated() - self._allocated_bytes - self.model.table_bytes(plan.max_model_len)
        return open_runner(
            self.model, self._spec, config, plan, hardware, report, max(0, others), self._drafter, self._tower
        )

    def serve_context(self, max_model_len: int) -> None:
        """Resize the rotary tables of the model and its drafter. No runner may be open."""
        self.model.serve_context(max_model_len)
        if self._drafter is not None:
            self._drafter.serve_context(min(max_model_len, self._drafter.spec.max_position))

    def move_to_host(self) -> None:
        if self._device.type == "cpu":
            return
        self._is_on_host = True
        self._forget_stream()
        with torch.inference_mode():
            replace_tensors([self.model, self._drafter, self._tower], _to_host)

    def move_to_device(self) -> None:
        if self._device.type == "cpu":
            return
        with torch.inference_mode():
            held = [self.model, self._drafter, self._tower]
            replace_tensors(held, lambda tensor: tensor.to(self._device, non_blocking=True))
        torch.cuda.synchronize(self._device)
        release_pinned_memory()
        self._is_on_host = False

    def continue_from(self, lost: Sequence[RankStats]) -> None:
        """Do nothing: this process is the only rank."""

    def when_lost(self, act: Callable[[DeviceLost], None]) -> None:
        """Do nothing: a lost device shows in the next step."""

    def _forget_stream(self) -> None:
        """Free the device's buffers for experts in RAM. The next runner opens them again."""
        if (crossing := crossing_of(self.model)) is not None:
            crossing.stream = None

    def close(self) -> None:
        arena = None if self._model is None or (crossing := crossing_of(self._model)) is None else crossing.arena
        if arena is not None:
            arena.close()
        if self._model is not None:
            close_tables(self._model)
        self._model = self._drafter = self._tower = None
        if self._is_on_host:
            release_pinned_memory()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


class BankSlots:
    """The slots of a model in this process."""

    def __init__(self, bank: LoraBank) -> None:
        self._bank = bank
        self.max_loras = bank.max_loras

    def put(self, slot: int, lora: LoraFile) -> None:
        put_lora(lora, self._bank, slot)


def _while_ram_lasts(plan: MemoryPlan, progress: Progress) -> Progress:
    """Return `progress` with a look at RAM for every CHECKED_BYTES of a load into it: `DoesNotFit` is raised if what is
    still to be loaded is more than what is free, since the system would end a process instead."""
    needed = plan.weights_bytes if plan.device == "cpu" else 0
    needed += 0 if plan.far is None or plan.far.disk is not None else plan.far.ram_bytes
    next_look = CHECKED_BYTES

    def checked(loaded: int, total: int) -> None:
        nonlocal next_look
        progress(loaded, total)
        if not needed or loaded < next_look or loaded >= total:
            return
        next_look = loaded + CHECKED_BYTES
        rest, free = needed * (total - loaded) // total, available_ram()
        if free < rest:
            raise DoesNotFit(
                "Other programs have taken RAM while the model was loaded.",
                f"{format_bytes(rest)} of its weights were still to be loaded, and {format_bytes(free)} are free; "
                f"{format_bytes(plan.free_bytes if plan.device == 'cpu' else needed)} were counted on.",
                "Close other programs and start again, or see localllm fit for what fits now.",
            )  # fmt: skip

    return checked


def _disk_of(plan: MemoryPlan) -> DiskExperts | None:
    """Return what is read from disk, bounded by what is free now besides the plan's reserve."""
    if plan.far is None or plan.far.disk is None:
        return None
    reserve = plan.reserve_bytes if plan.device == "cpu" else 0
    return DiskExperts(plan.far.disk.cache_bytes, lambda: available_ram() - reserve)


def _load_drafter(
    spec: ModelSpec, model: object, device: torch.device, config: EngineConfig, plan: MemoryPlan, shard: Shard | None
) -> Drafter | None:
    """Load the drafter of a model that has one, onto the model's device. Of a pipeline the last stage holds it."""
    if spec.drafter is None or (shard is not None and shard.layers.stop < spec.num_layers):
        return None
    assert isinstance(model, DecoderModel), "plan_drafter refuses other code"
    length = min(plan.max_model_len, spec.drafter.spec.max_position)
    return open_drafter(
        spec.drafter, model, device, getattr(torch, plan.dtype), max_model_len=length, num_layers=spec.num_layers,
        target_shard=shard, cpu_weights=config.cpu_weights, half_weights=config.keeps_half_weights,
    )  # fmt: skip


def release_pinned_memory() -> None:
    """Return the page-locked memory of weights that slept to the system: torch's allocator would keep it, locked."""
    empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    if empty is not None:  # torch 2.13 and later
        empty()


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, page-locked if the system allows it: waking up is then several times faster."""
    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("weights sleep in pageable memory reason=%r", str(error).splitlines()[0])
        host = torch.empty_like(tensor, device="cpu")
    return host.copy_(tensor)
