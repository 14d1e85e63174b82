"""Sleep and wake-up: a sleeping model keeps only its weights, in host memory.

`put_to_sleep` drops the KV cache with its prefixes, the CUDA graphs and the engine. Weights on a GPU are copied to
page-locked host memory; on a CPU they stay where they are. `wake_up` opens an engine on the weights again (reopen.py):
CUDA graphs are captured again, and the KV cache may have another size.
Does not know: when a model should sleep (manager.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from localllm.config.settings import Settings
from localllm.serving.compute import release_cached_memory
from localllm.serving.phases import OnPhase
from localllm.serving.reopen import BareModel, close_engine, open_engine
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel


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
