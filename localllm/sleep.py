"""A model that sleeps keeps its weights, in host memory, and nothing else.

`put_to_sleep` drops the KV cache with its prefixes, the CUDA graphs and the engine, and brings the weights to the
host: page-locked copies of what was on a GPU; on a CPU they stay where they are. `wake_up` is the end of the road that
build.py describes: fit, weights, memory, engine. The graphs are recorded anew, the KV cache may have another size.
Does not know: when a model should sleep (manager/).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.build import capacity, engine_parts, phase_of, require_context, start_torch
from localllm.config import EngineConfig, Settings
from localllm.served import ALONE, Beside, OnPhase, ServedModel
from localllm.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.hardware import Hardware
    from localllm.models.fit import MemoryPlan
    from localllm.runner.host_steps import Model

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SleepingModel:
    """The weights of a model, in host memory, and what is needed to serve it again."""

    model: Model
    served: ServedModel  # its engine has ended and its runner holds nothing


def put_to_sleep(served: ServedModel) -> SleepingModel:
    """End the engine (its requests get an error), drop the KV cache and the graphs, bring the weights to the host."""
    from localllm.runner.runner import TorchRunner

    served.loop.stop()
    runner = served.loop.runner
    assert isinstance(runner, TorchRunner), "only a model with weights can sleep"
    model = runner.model
    if served.plan.device != "cpu":
        _move(model, _to_host)
    served.close()
    give_back_memory()
    return SleepingModel(model, served)


def wake_up(
    asleep: SleepingModel, settings: Settings, on_phase: OnPhase = lambda phase: None, beside: Beside = ALONE
) -> ServedModel:
    """An engine around the weights of a sleeping model; after an error they are asleep as before."""
    import torch

    from localllm.models.parameters import held_bytes
    from localllm.runner.opening import open_runner

    served, model, spec = asleep.served, asleep.model, asleep.served.spec
    # The same device and type as before: the weights are laid out for them. Nor a longer context than the tables have.
    config = replace(settings.engine, device=served.plan.device, dtype=served.plan.dtype)
    on_host = served.plan.device == "cpu"
    with ExitStack() as undo:
        hardware = start_torch(on_phase, beside)
        weights = held_bytes(model)
        if on_host:  # they are there already: what is free does not have to hold them
            hardware = replace(hardware, ram_available_bytes=hardware.ram_available_bytes + weights)
        with phase_of("fit", on_phase) as tell:
            plan = _plan_awake(config, served, hardware, weights)
            tell(f"{plan.device} · KV {format_bytes(plan.kv_bytes)}")
        require_context(plan, spec, config, beside)
        device = torch.device(plan.device)
        held_before = 0 if on_host else torch.cuda.memory_allocated(device)
        with phase_of("weights", on_phase) as tell:
            if not on_host:
                undo.callback(_move, model, _to_host)
                _move(model, lambda tensor: tensor.to(device, non_blocking=True))
                torch.cuda.synchronize(device)
            tell(format_bytes(weights))
        with phase_of("memory", on_phase) as tell:
            runner, plan = open_runner(model, spec, config, plan, hardware, tell, held_before)
            tell(f"{plan.num_blocks - 1} blocks of {plan.block_size} tokens")
        undo.callback(runner.close)
        with phase_of("engine", on_phase) as tell:
            loop, admission, client = engine_parts(config, plan, served.path, spec, served.tokenizer, runner)
            tell(capacity(plan))
        undo.pop_all()
    return replace(served, plan=plan, memory=None, loop=loop, admission=admission, client=client)


def _plan_awake(config: EngineConfig, served: ServedModel, hardware: Hardware, weights_bytes: int) -> MemoryPlan:
    from localllm.models.fit import plan_memory

    limited = replace(served.spec, max_position=min(served.spec.max_position, served.plan.max_model_len))
    plan = plan_memory(config, limited, weights_bytes, hardware, resident_bytes=lambda *asked: weights_bytes)
    return replace(plan, notes=served.plan.notes)


def _move(model: Model, change: Callable[[Tensor], Tensor]) -> None:
    import torch

    from localllm.models.parameters import replace_tensors

    with torch.inference_mode():
        replace_tensors(model, change)


def _to_host(tensor: Tensor) -> Tensor:
    """Page-locked where the system allows it: the way back is then several times faster."""
    import torch

    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        log.warning("weights sleep in pageable memory reason=%r", str(error).splitlines()[0])
        host = torch.empty_like(tensor, device="cpu")
    return host.copy_(tensor)


def give_back_memory() -> None:
    """What was freed goes back to the device and to the system: both allocators keep it otherwise."""
    import torch

    from localllm.models.loader import trim_heap

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()
