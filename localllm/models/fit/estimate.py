"""The memory and context that a model would get on each device of a machine, for `localllm fit` and the pages.

Does not know: torch, files, how it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit
from localllm.machine.hardware import Hardware
from localllm.models.fit.devices import gpus_of
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.need import Need
from localllm.models.fit.need import needs as one_request
from localllm.models.fit.options import FitOption, fit_options
from localllm.models.fit.parallel import asked_division
from localllm.models.fit.plan import make_plan
from localllm.models.fit.rank import ResidentBytes
from localllm.models.fit.request_cost import RequestCost, request_cost
from localllm.models.spec.model_spec import ModelSpec

LENGTHS = (4096, 8192, 32_768)
"""Context lengths for which the number of concurrent requests is shown."""

Verdict = Literal["fits", "fits with a shorter context", "does not fit"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one device."""

    device: str  # cpu, cuda:0, cuda:0 + cuda:1
    name: str  # name of the GPU, or CPU
    plan: MemoryPlan | None  # None: it does not fit
    needs: MemoryPlan  # the plan, or the refused plan with a short context
    error: DoesNotFit | None
    cost: RequestCost  # memory of one request
    wanted: int  # the requested context, else the model's own
    options: tuple[FitOption, ...]  # alternatives if the wanted context does not fit
    is_chosen: bool  # `up` with the same flags would choose this device
    one_request: tuple[Need, ...] = ()  # the memory of one conversation at a usual and the longest length, if it fits

    @property
    def verdict(self) -> Verdict:
        if self.plan is None:
            return "does not fit"
        return "fits" if self.plan.max_model_len >= self.wanted else "fits with a shorter context"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token position over all layers."""
        return self.cost.token_bytes

    @property
    def request_bytes(self) -> dict[int, int]:
        """Length -> bytes of one request of that length, up to the model's own context."""
        lengths = [length for length in LENGTHS if length <= self.wanted] or [self.wanted]
        return {length: self.cost.of(length, self.needs.block_size) for length in lengths}

    @property
    def concurrency(self) -> dict[int, int]:
        """Length -> concurrent requests of that length; 0: longer than the context."""
        return {length: self.plan.concurrency(length) if self.plan else 0 for length in LENGTHS}


def estimate(
    config: EngineConfig, spec: ModelSpec, weights_bytes: int, hardware: Hardware, resident_bytes: ResidentBytes | None
) -> list[Estimate]:
    """Estimate every usable GPU and the CPU, or only the device in `config`; the device that a load would choose comes
    first.

    Raises `ConfigError` and `UnsupportedOption` for settings that are not possible on that first device.
    """

    def plan(config: EngineConfig) -> MemoryPlan:
        return make_plan(config, spec, weights_bytes, hardware, resident_bytes=resident_bytes)

    def of_config(here: EngineConfig, is_chosen: bool) -> Estimate:
        made, error = None, None
        try:
            needs = made = plan(here)
        except DoesNotFit as caught:
            error, needs = caught, _needs(plan, here, caught)
        wanted = config.max_model_len or spec.max_position
        fits = made is not None and made.max_model_len >= wanted
        here = here if needs.ranks else replace(here, device=needs.device, device_ids=())
        options = () if fits else fit_options(here, spec, hardware, plan, made)
        cost = request_cost(spec, needs.dtype, needs.kv_dtype)
        devices = list(dict.fromkeys(rank.device for rank in needs.ranks)) or [needs.device]
        names = {f"cuda:{gpu.index}": gpu.name for gpu in hardware.gpus}
        name = ", ".join(dict.fromkeys(names.get(device, "CPU") for device in devices))
        device = " + ".join(devices)
        alone = one_request(plan, here, spec, made.max_model_len) if made is not None else ()
        return Estimate(device, name, made, needs, error, cost, wanted, options, is_chosen, alone)

    found = [of_config(config, True)]
    first = found[0].needs
    if first.ranks and asked_division(config) is not None:
        return found
    gpus = [f"cuda:{gpu.index}" for gpu in gpus_of(config, hardware) if gpu.is_supported]
    for device in (*gpus, "cpu") if config.device == "auto" else ():
        if first.ranks or device != first.device:
            try:
                found.append(of_config(_on_one_device(config, device), False))
            except ConfigError:  # a flag that this device does not support
                continue
    return found


def _on_one_device(config: EngineConfig, device: str) -> EngineConfig:
    return replace(config, device=device, device_ids=(), tensor_parallel_size=None, pipeline_parallel_size=None)


def _needs(plan: Callable[[EngineConfig], MemoryPlan], config: EngineConfig, error: DoesNotFit) -> MemoryPlan:
    """Return the refused plan, or, if the requested KV cache was too large, the plan without that request."""
    if error.plan is None:
        try:
            return plan(replace(config, kv_cache_memory_bytes=None))
        except DoesNotFit as other:
            error = other
    made: MemoryPlan = error.plan
    return made
