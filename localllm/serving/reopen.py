"""Replace a model's engine while its weights stay in memory.

`close_engine` ends an engine and frees its KV cache, graphs and buffers. `open_engine` runs the last phases of build.py
again, with other settings: fit, weights, memory, engine. This takes milliseconds on a CPU and seconds on a GPU, while a
load from disk takes much longer. Waking a model (sleep.py) and tuning trials (tuning/trial.py) use it.
Does not know: why another engine is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from localllm.config.settings import EngineConfig
from localllm.serving.build import capacity, engine_parts, require_context
from localllm.serving.compute import start_torch
from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.machine.hardware import Hardware
    from localllm.models.fit import MemoryPlan
    from localllm.runner.host_steps import ReopenableModel


@dataclass
class BareModel:
    """A model's weights, and the former `served` model, whose engine has ended, to open an engine from."""

    model: ReopenableModel
    served: ServedModel

    @cached_property
    def _fixed_bytes(self) -> int:
        """Bytes that do not depend on the context length."""
        from localllm.models.weights.parameters import held_bytes

        return held_bytes(self.model) - self.model.table_bytes(self.model.max_model_len)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights now, including the tables of the last context length."""
        return self._fixed_bytes + self.model.table_bytes(self.model.max_model_len)

    def plan(self, config: EngineConfig, hardware: Hardware) -> MemoryPlan:
        """Plan the memory of an engine with these settings. `hardware` must count the weights as free memory. Raises
        `DoesNotFit`.

        Device and dtype stay as before, since the weights are laid out for them.
        """
        from localllm.models.fit import plan_memory

        def resident_bytes(device: str, dtype: str, max_model_len: int, quantization: str | None) -> int:
            return self._fixed_bytes + self.model.table_bytes(max_model_len)

        served = self.served
        config = replace(config, device=served.plan.device, dtype=served.plan.dtype)
        plan = plan_memory(config, served.spec, self.weights_bytes, hardware, resident_bytes=resident_bytes)
        return replace(plan, notes=served.plan.notes)

    def as_if_not_loaded(self, hardware: Hardware) -> Hardware:
        """Return the hardware with the weights' memory counted as free, as if they were not loaded."""
        weights = self.weights_bytes
        if self.served.plan.device == "cpu":
            return replace(hardware, ram_available_bytes=hardware.ram_available_bytes + weights)
        gpus = tuple(
            replace(gpu, free_bytes=gpu.free_bytes + weights) if f"cuda:{gpu.index}" == self.served.plan.device else gpu
            for gpu in hardware.gpus
        )
        return replace(hardware, gpus=gpus)


def close_engine(served: ServedModel) -> BareModel:
    """End the engine (its requests get an error) and keep the weights."""
    from localllm.runner.runner import TorchRunner

    served.loop.stop()
    runner = served.loop.runner
    assert isinstance(runner, TorchRunner), "only a model with weights can be opened again"
    model = runner.model
    served.close()
    return BareModel(cast("ReopenableModel", model), served)  # as the loader left it


def open_engine(
    bare: BareModel,
    config: EngineConfig,
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
    *,
    bring: Callable[[], None] | None = None,
) -> ServedModel:
    """Open an engine on the weights, not started. bring: moves the weights to their device; None: no move is needed.

    Raises `DoesNotFit` and `ConfigError` like a load; the memory taken so far is freed.
    """
    import torch

    from localllm.runner.device_memory import make_current
    from localllm.runner.opening import open_runner

    served, model, spec = bare.served, bare.model, bare.served.spec
    with ExitStack() as undo:
        hardware = start_torch(on_phase, limits)
        weights = bare.weights_bytes
        if bring is None:
            hardware = bare.as_if_not_loaded(hardware)
        with report_phase("fit", on_phase) as report:
            plan = bare.plan(config, hardware)
            report(f"{plan.device} · KV {format_bytes(plan.kv_bytes)}")
        require_context(plan, spec, config, limits)
        make_current(torch.device(plan.device))
        held_before = 0
        if plan.device != "cpu":
            held_before = torch.cuda.memory_allocated(torch.device(plan.device)) - (weights if bring is None else 0)
        with report_phase("weights", on_phase) as report:
            if bring is not None:
                bring()
            model.serve_context(plan.max_model_len)
            report(format_bytes(weights))
        with report_phase("memory", on_phase) as report:
            runner, plan = open_runner(model, spec, config, plan, hardware, report, max(0, held_before))
            report(f"{plan.num_blocks - 1} blocks of {plan.block_size} tokens")
        undo.callback(runner.close)
        with report_phase("engine", on_phase) as report:
            loop, admission, client = engine_parts(
                config, plan, served.path, spec, served.tokenizer, served.answers, runner
            )
            report(capacity(plan))
        undo.pop_all()
    return replace(served, plan=plan, memory=None, loop=loop, admission=admission, client=client)
