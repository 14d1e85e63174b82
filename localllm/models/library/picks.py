"""Which of the suggested models fit this machine, the best first: the name to type, its size, context and speed.

The memory plan decides by the sizes in the list, without asking the hub and without torch. A model that fits a CPU but
would write more slowly than people read is left out.
Does not know: the network, what is installed, how a suggestion is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import LocalLLMError
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.library.pick_list import Pick, read_picks
from localllm.models.library.pick_sizes import GPU, cpu_read_bytes, cpu_speed, tokens_per_s

USEFUL_CONTEXT = 4096
READING_SPEED = 5.0  # tokens/s, about 230 English words a minute
CPU_BYTES_PER_CORE = 10**9
"""Most weight bytes per token and core where the bandwidth is unknown: a core reads and multiplies about this much ten
times a second."""


@dataclass(frozen=True, slots=True)
class FittingPick:
    """An entry of the list that fits this machine."""

    pick: Pick
    plan: MemoryPlan
    tokens_per_s: tuple[float, float] | None  # least and most of one answer with a short context; None: unknown
    gpus: str = ""  # a sentence on which of several GPUs it uses; empty: there are not several

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
        if self.tokens_per_s is None:
            return ""
        least, most = (f"{round_speed(each):,g}" for each in self.tokens_per_s)
        return f"about {least} tokens/s" if least == most else f"{least} to {most} tokens/s"


def fitting_picks(
    hardware: Hardware, settings: Settings, cpu_bandwidth: float | None, count: int = 3
) -> list[FittingPick]:
    """Return the entries that fit this machine with a useful context, the best first.

    cpu_bandwidth: bytes/s, from machine/bandwidth.py; None: unknown, and so are speeds on the CPU. Raises `ConfigError`
    for a wrong list of one's own.
    """
    config = settings.of_model("").engine
    found: list[FittingPick] = []
    for pick in read_picks(settings.picks).picks:
        if len(found) == count:
            break
        try:
            plan = pick.plan(config, hardware)
        except LocalLLMError:
            continue
        speed = _speed(pick, plan, hardware, config, cpu_bandwidth)
        if plan.max_model_len >= USEFUL_CONTEXT and _is_quick(pick, plan, hardware, speed):
            found.append(FittingPick(pick, plan, speed, _gpus_in_words(plan, hardware)))
    return found


def round_speed(speed: float) -> float:
    """Return tokens/s with two significant digits, since more would claim too much."""
    return float(f"{speed:.2g}")


def _is_quick(pick: Pick, plan: MemoryPlan, hardware: Hardware, speed: tuple[float, float] | None) -> bool:
    if plan.device != "cpu":
        return True
    if speed is None:
        return pick.bytes_per_token <= CPU_BYTES_PER_CORE * hardware.cpu_cores
    return sum(speed) / 2 >= READING_SPEED


def _speed(
    pick: Pick, plan: MemoryPlan, hardware: Hardware, config: EngineConfig, cpu_bandwidth: float | None
) -> tuple[float, float] | None:
    """Return tokens/s; None without a bandwidth, and for several ranks, whose exchange has not been measured."""
    is_mixture = pick.spec.mixture is not None
    if plan.ranks:
        return None
    if plan.device == "cpu":
        if cpu_bandwidth is None:
            return None
        sizes = pick.name, pick.bytes, pick.parameters, pick.bytes_per_token
        return tokens_per_s(
            cpu_read_bytes(*sizes, config, plan.dtype), cpu_bandwidth, cpu_speed(), is_mixture=is_mixture
        )
    gpu = next(gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == plan.device)
    bandwidth = gpu.place.bandwidth
    return None if bandwidth is None else tokens_per_s(pick.bytes_per_token, bandwidth, GPU, is_mixture=is_mixture)


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
