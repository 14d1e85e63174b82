"""The fields of the records that open a model and its runner, apart from the others because they import torch.

Does not know: how records travel, what is done with them.
"""

from __future__ import annotations

import msgspec

from localllm.config.settings import EngineConfig
from localllm.engine.step import DraftSupport
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard


class Open(msgspec.Struct, frozen=True):
    """OPEN: load this rank's share. Answered with `Loaded`."""

    path: str
    spec: ModelSpec
    config: EngineConfig
    plan: MemoryPlan
    shard: Shard


class OpenRunner(msgspec.Struct, frozen=True):
    """OPEN_RUNNER: answer with `Measured`. ALLOCATE follows with a plan, and the second answer is `Opened`."""

    config: EngineConfig
    plan: MemoryPlan


class Opened(msgspec.Struct, frozen=True):
    """An open runner: its sizes, the plan it was built with, and the drafts that its steps may have."""

    plan: MemoryPlan
    num_blocks: tuple[int, ...]
    block_size: int
    vocab_size: int
    drafts: DraftSupport
    block_bytes: tuple[int, ...] = ()  # of one block of each KV group; (): its blocks do not move
