"""A few models to begin with, for a machine that has none: those of picks.toml that fit it, the largest first.

The memory plan decides with the sizes of the list, as it does with a checkpoint's headers; the hub is not asked. A
model that fits a CPU and would write slower than people read is left out.
Does not know: the network, what is installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localllm.config import EngineConfig
from localllm.errors import LocalLLMError
from localllm.hardware import Hardware
from localllm.models.fit.plan import MemoryPlan, make_plan
from localllm.models.spec import ModelSpec, spec_of_config

LIST = Path(__file__).with_name("picks.toml")
USEFUL_CONTEXT = 4096
CPU_BYTES_PER_CORE = 10**9
"""Of weights that a token may read: some ten times a second a core reads so much, and computes with it."""

_SHARED: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
"""What a config says where the list does not."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One line of the list."""

    name: str  # as `pull` takes it
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
        """Raises `DoesNotFit`, and what a flag raises that this model cannot honour."""

        def resident(device: str, dtype: str, max_model_len: int, quantization: str | None) -> int:
            return self.cpu_bytes if device == "cpu" else self.bytes

        return make_plan(config, self.spec, self.bytes, hardware, resident_bytes=resident)


@cache
def read_picks() -> tuple[Pick, ...]:
    """The whole list, in its order."""
    return tuple(Pick(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["pick"])


def picks_for(hardware: Hardware, config: EngineConfig, count: int = 3) -> list[tuple[Pick, MemoryPlan]]:
    """The first of the list that fit with a context worth having, each with its plan."""
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
