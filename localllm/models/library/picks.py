"""Suggested models for a machine without any: those of picks.toml that fit, largest first.

The memory plan decides by the sizes in the list, without asking the hub. A model that fits a CPU but would write more
slowly than people read is left out.
Does not know: the network, what is installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import LocalLLMError
from localllm.machine.hardware import Hardware
from localllm.models.architectures.read_spec import spec_of_config
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.plan import make_plan
from localllm.models.fit.shares import count_shard
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard

LIST = Path(__file__).with_name("picks.toml")
USEFUL_CONTEXT = 4096
CPU_BYTES_PER_CORE = 10**9
"""Most weight bytes per token and core: a core reads and multiplies about this much ten times a second."""

_SHARED: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
"""Config fields that the list leaves out."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One entry of the list."""

    name: str  # the name for `pull`
    title: str
    says: str  # what it is good for
    parameters: int
    license: str
    bytes: int
    cpu_bytes: int
    bytes_per_token: int
    config: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return spec_of_config({**_SHARED, **self.config})

    def plan(self, config: EngineConfig, hardware: Hardware) -> MemoryPlan:
        """Plan the model. Raises `DoesNotFit`, and the errors of settings that this model does not support."""

        def resident(
            device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None
        ) -> int:
            whole = self.cpu_bytes if device == "cpu" else self.bytes
            return whole if shard is None else count_shard(self.spec, shard, whole, dtype)

        return make_plan(config, self.spec, self.bytes, hardware, resident_bytes=resident)


@cache
def read_picks() -> tuple[Pick, ...]:
    """Return the whole list, in its order."""
    return tuple(Pick(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["pick"])


@dataclass(frozen=True, slots=True)
class FittingPick:
    """An entry of the list that fits this machine."""

    pick: Pick
    plan: MemoryPlan
    tokens_per_s: tuple[float, float] | None  # least and most of one answer with a short context; None: unknown

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


def fitting_picks(
    hardware: Hardware, settings: Settings, cpu_bandwidth: float | None, count: int = 3
) -> list[FittingPick]:
    """Return the entries that fit this machine with a useful context, the best first.

    cpu_bandwidth: bytes/s, from machine/bandwidth.py; None: unknown, and so are speeds on the CPU.
    """
    found = picks_for(hardware, settings.of_model("").engine, count)
    return [FittingPick(pick, plan, None) for pick, plan in found]


def picks_for(hardware: Hardware, config: EngineConfig, count: int = 3) -> list[tuple[Pick, MemoryPlan]]:
    """Return the first entries that fit with a useful context, each with its plan."""
    found: list[tuple[Pick, MemoryPlan]] = []
    for pick in read_picks():
        try:
            plan = pick.plan(config, hardware)
        except LocalLLMError:
            continue
        quick = plan.device != "cpu" or pick.bytes_per_token <= CPU_BYTES_PER_CORE * hardware.cpu_cores
        if quick and plan.max_model_len >= USEFUL_CONTEXT:
            found.append((pick, plan))
        if len(found) == count:
            break
    return found
