"""The suggested models that fit this machine: the one to take, a larger one, then the others, the best first.

The memory plan decides by the sizes in the list, without asking the hub and without torch. A model that fits a CPU but
would write more slowly than people read is left out. Every page and every verb names the first of `fitting_picks`.
Does not know: the network, what is installed, how a suggestion is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit.conversation_bytes import Need, needs
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.speed import SpeedRange, predict, speed_in_words
from localllm.models.library.pick_list import Pick, read_picks

USEFUL_CONTEXT = 4096
READING_SPEED = 4.0  # tokens/s, about 180 English words a minute
STEP_BYTES = 256 * 1024**2
QUICK_SPEED = 10.0  # tokens/s at least, of the model to take
CPU_BYTES_PER_CORE = 10**9
"""Most weight bytes per token and core where the bandwidth is unknown: a core reads and multiplies about this much ten
times a second."""


@dataclass(frozen=True, slots=True)
class FittingPick:
    """An entry of the list that fits this machine."""

    pick: Pick
    plan: MemoryPlan
    tokens_per_s: SpeedRange | None  # None: unknown
    gpus: str = ""  # a sentence on which of several GPUs it uses; empty: there are not several
    needs: tuple[Need, ...] = ()  # memory of one conversation, at a usual length and at the longest that fits

    @property
    def name(self) -> str:
        """The name to type: `localllm up NAME`."""
        return self.pick.name

    @property
    def bytes(self) -> int:
        """Bytes to download."""
        return self.pick.bytes

    @property
    def max_model_len(self) -> int:
        """Tokens of context that fit."""
        return self.plan.max_model_len

    @property
    def speed(self) -> str:
        """The speed for display, "" if unknown: `11 to 24 tokens/s`."""
        return speed_in_words(self.tokens_per_s)

    @property
    def least_speed(self) -> float:
        """The least tokens per second; infinite if unknown."""
        return math.inf if self.tokens_per_s is None else self.tokens_per_s[0]


def fitting_picks(
    hardware: Hardware, settings: Settings, cpu_bandwidth: float | None, count: int = 3
) -> list[FittingPick]:
    """Return the entries that fit this machine with a useful context.

    The first is the best that answers at ten tokens per second or more and leaves half of the machine's memory free; if
    none does, the quickest. If a better one fits, it is second. The others follow: first those with ten tokens per
    second, of them first those after the suggested one.
    cpu_bandwidth: bytes/s, from machine/bandwidth.py; None: unknown, and so are speeds on the CPU. Raises `ConfigError`
    for a wrong list of one's own.
    """
    config, hardware = settings.of_model("").engine, rounded(hardware)
    hardware = replace(hardware, speeds=hardware.speeds._replace(ram=cpu_bandwidth))
    found: list[FittingPick] = []
    for pick in read_picks(settings.picks).picks:
        try:
            plan = pick.plan(config, hardware)
        except LocalLLMError:
            continue
        found_speed = predict(plan, hardware)
        speed = None if found_speed is None else found_speed.decode
        if plan.max_model_len >= USEFUL_CONTEXT and _is_quick(pick, plan, hardware, speed):
            alone = needs(partial(pick.plan, hardware=hardware), config, pick.spec, plan.max_model_len)
            found.append(FittingPick(pick, plan, speed, _gpus_in_words(plan, hardware), alone))
    able = (each for each in found if each.least_speed >= QUICK_SPEED and _leaves_half(each, hardware))
    first = next(able, None) or max(found, key=lambda each: each.least_speed, default=None)
    at = found.index(first) if first is not None else 0
    others = sorted([*found[at + 1 :], *found[1:at]], key=lambda each: each.least_speed < QUICK_SPEED)
    return [*found[at : at + 1], *found[: min(1, at)], *others][:count]


def rounded(hardware: Hardware) -> Hardware:
    """Return the hardware with its free memory rounded down: a smaller change of it changes no suggestion."""
    gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes // STEP_BYTES * STEP_BYTES) for gpu in hardware.gpus)
    free = hardware.ram_available_bytes // STEP_BYTES * STEP_BYTES
    return replace(hardware, gpus=gpus, ram_available_bytes=free)


def _leaves_half(found: FittingPick, hardware: Hardware) -> bool:
    """Return whether a conversation of usual length leaves half of the machine's memory to other programs. A GPU's
    memory is for the model: what the weights leave is its KV cache.
    """
    plan = found.plan
    if plan.far is not None:
        return 2 * plan.far.ram_bytes <= hardware.ram_total_bytes
    if plan.device == "cpu" and hardware.gpus:  # a smaller one fits the GPU
        return False
    used = found.needs[0].total_bytes if found.needs else plan.weights_bytes
    return plan.device != "cpu" or 2 * used <= hardware.ram_total_bytes


def _is_quick(pick: Pick, plan: MemoryPlan, hardware: Hardware, speed: SpeedRange | None) -> bool:
    if plan.device != "cpu" and (plan.far is None or not plan.far.layers):
        return True
    if speed is None and hardware.gpus:  # the GPU does not hold it
        return False
    if speed is None:
        return pick.bytes_per_token <= CPU_BYTES_PER_CORE * hardware.cpu_cores
    return speed[0] >= READING_SPEED


def _gpus_in_words(plan: MemoryPlan, hardware: Hardware) -> str:
    """Say which GPUs the model uses, and which stay free for another one."""
    usable = [gpu for gpu in hardware.gpus if gpu.is_supported]
    if len(usable) < 2 or plan.device == "cpu":
        return ""
    devices = {rank.device for rank in plan.ranks} or {plan.device}
    used = [gpu for gpu in usable if f"cuda:{gpu.index}" in devices]
    free = [gpu for gpu in usable if gpu not in used]
    words = f"Runs on {_names(used)}"
    return f"{words}; {_names(free)} {'stays' if len(free) == 1 else 'stay'} free." if free else f"{words}."


def _names(gpus: list[Gpu]) -> str:
    return " and ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
