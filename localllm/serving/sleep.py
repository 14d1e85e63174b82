"""Sleep and wake-up: a sleeping model keeps only its weights, in host memory.

`put_to_sleep` drops the KV cache with its prefixes, the CUDA graphs and the engine. Weights on a GPU are copied to
page-locked host memory; on a CPU they stay where they are. `wake_up` opens an engine on the weights again (reopen.py):
CUDA graphs are captured again, and the KV cache may have another size.
Does not know: when a model should sleep (manager.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.config.settings import Settings
from localllm.serving.free_memory import release_cached_memory
from localllm.serving.phases import OnPhase
from localllm.serving.reopen import BareModel, close_engine, open_engine
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.models.inputs import CausalModel

log = logging.getLogger(__name__)


class SleepingModel(BareModel):
    """A bare model whose weights are in host memory."""


def put_to_sleep(served: ServedModel) -> SleepingModel:
    """End the engine (its requests get an error), drop the KV cache and graphs, move the weights to host memory."""
    bare = close_engine(served)
    if served.plan.device != "cpu":
        _move(bare.model, _to_host)
    release_cached_memory()
    return SleepingModel(bare.model, served)


def wake_up(
    asleep: SleepingModel, settings: Settings, on_phase: OnPhase = lambda phase: None, limits: LoadLimits = NO_LIMITS
) -> ServedModel:
    """Open an engine on the weights of a sleeping model; after an error the model is still asleep."""
    import torch

    device = torch.device(asleep.served.plan.device)
    with ExitStack() as undo:

        def bring() -> None:
            undo.callback(_move, asleep.model, _to_host)
            _move(asleep.model, lambda tensor: tensor.to(device, non_blocking=True))
            torch.cuda.synchronize(device)

        on_host = device.type == "cpu"  # already on the device
        config = replace(settings.engine, **asleep.served.tuned)
        served = open_engine(asleep, config, on_phase, limits, bring=None if on_host else bring)
        undo.pop_all()
    return served


def _move(model: CausalModel, change: Callable[[Tensor], Tensor]) -> None:
    import torch

    from localllm.models.weights.parameters import replace_tensors

    with torch.inference_mode():
        replace_tensors(model, change)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, page-locked if the system allows it: waking up is then several times faster."""
    import torch

    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("weights sleep in pageable memory reason=%r", str(error).splitlines()[0])
        host = torch.empty_like(tensor, device="cpu")
    return host.copy_(tensor)
