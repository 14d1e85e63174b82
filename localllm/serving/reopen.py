"""Replace a model's engine while its weights stay in memory, or drop it while the model sleeps.

`close_engine` ends an engine and frees its KV cache, graphs and buffers. `open_engine` runs the last phases of build.py
again, with other settings: fit, weights, memory, engine. This takes milliseconds on a CPU and seconds on a GPU, while a
load from disk takes much longer. Tuning trials (tuning/trial.py) use it. `load_again` is for settings that put experts
elsewhere, which the weights in memory do not move to.

A sleeping model keeps only its weights, in host memory. `put_to_sleep` drops the KV cache with its prefixes, the CUDA
graphs and the engine. Weights on a GPU are copied to page-locked host memory; on a CPU they stay where they are.
`wake_up` opens an engine on the weights again: CUDA graphs are captured again, and the KV cache may have another size.
Does not know: why another engine is needed, when a model should sleep (manager.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.config.settings import EngineConfig, Settings
from localllm.serving.build import build_engine, capacity, engine_parts, plan_again, require_context
from localllm.serving.compute import release_cached_memory, start_torch
from localllm.serving.phases import OnPhase, report_phase
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.machine.hardware import Hardware
    from localllm.models.fit import MemoryPlan
    from localllm.runner.executor import Executor


@dataclass
class BareModel:
    """A model's weights, and the former `served` model, whose engine has ended, to open an engine from."""

    executor: Executor
    served: ServedModel

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights now, including the tables of the last context length."""
        return self.executor.weights_bytes

    def plan(self, config: EngineConfig, hardware: Hardware) -> MemoryPlan:
        """Plan the memory of an engine with these settings. `hardware` must count the weights as free memory. Raises
        `DoesNotFit`.

        Device and dtype stay as before, since the weights are laid out for them.
        """
        served = self.served
        plan = plan_again(self.executor, served.spec, served.plan, config, hardware)
        return replace(plan, notes=served.plan.notes)

    def has_placed(self, config: EngineConfig) -> bool:
        """Return whether the experts are where these settings put them."""
        return self.served.placement == config.placement

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self.executor.close()


def load_again(
    bare: BareModel, settings: Settings, on_phase: OnPhase = lambda phase: None, limits: LoadLimits = NO_LIMITS
) -> None:
    """Load the weights once more, for settings that put experts elsewhere.

    The weights in memory are freed first, since memory may not hold both. Raises what a load and `on_phase` raise; then
    there are no weights until another call succeeds.
    """
    bare.close()
    bare.served = replace(bare.served, placement=())
    gc.collect()  # an engine and its callbacks refer to each other
    release_cached_memory()
    loaded = close_engine(build_engine(settings, on_phase, limits))
    bare.executor, bare.served = loaded.executor, loaded.served


def close_engine(served: ServedModel) -> BareModel:
    """End the engine (its requests get an error) and keep the weights."""
    assert served.executor is not None, "only a model that generates text can be opened again"
    served.close_engine()
    return BareModel(served.executor, served)


def open_engine(
    bare: BareModel,
    config: EngineConfig,
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
    *,
    bring: Callable[[], None] = lambda: None,
) -> ServedModel:
    """Open an engine on the weights, not started. bring: moves the weights to their device.

    Raises `DoesNotFit` and `ConfigError` like a load; the memory taken so far is freed.
    """
    served, executor, spec = bare.served, bare.executor, bare.served.spec
    assert bare.has_placed(config), "load_again moves experts"
    with ExitStack() as undo:
        hardware = executor.as_if_not_loaded(start_torch(on_phase, limits))
        with report_phase("fit", on_phase) as report:
            plan = bare.plan(config, hardware)
            report(f"{plan.place} · KV {format_bytes(plan.kv_bytes)}")
        require_context(plan, spec, config, limits)
        with report_phase("weights", on_phase) as report:
            bring()
            report(format_bytes(bare.weights_bytes))
        with report_phase("memory", on_phase) as report:
            runner, plan = executor.open_runner(config, plan, hardware, report)
            report(f"blocks: {plan.blocks_in_words}")
        undo.callback(runner.close)
        with report_phase("engine", on_phase) as report:
            loop, admission, client = engine_parts(
                config, plan, served.path, spec, served.tokenizer, served.answers, runner
            )
            executor.when_lost(loop.lose)
            report(capacity(plan))
        undo.pop_all()
    return replace(served, plan=plan, memory=None, loop=loop, admission=admission, client=client)


class SleepingModel(BareModel):
    """A bare model whose weights are in host memory."""


def put_to_sleep(served: ServedModel) -> SleepingModel:
    """End the engine (its requests get an error), drop the KV cache and graphs, move the weights to host memory."""
    bare = close_engine(served)
    bare.executor.move_to_host()
    release_cached_memory()
    return SleepingModel(bare.executor, served)


def wake_up(
    asleep: SleepingModel, settings: Settings, on_phase: OnPhase = lambda phase: None, limits: LoadLimits = NO_LIMITS
) -> ServedModel:
    """Open an engine on the weights of a sleeping model; after an error the model is still asleep."""
    with ExitStack() as undo:

        def bring() -> None:
            undo.callback(asleep.executor.move_to_host)
            asleep.executor.move_to_device()

        config = replace(settings.engine, **asleep.served.tuned)
        served = open_engine(asleep, config, on_phase, limits, bring=bring)
        undo.pop_all()
    return served
