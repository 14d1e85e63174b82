"""The fields of the records besides steps, and of their answers.

Does not know: how records travel, what is done with them.
"""

from __future__ import annotations

import traceback

import msgspec

from localllm import errors
from localllm.config.settings import EngineConfig
from localllm.engine.step import DraftSupport, RunnerStats
from localllm.errors import LocalLLMError
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard


class Connect(msgspec.Struct, frozen=True):
    """CONNECT: meet the other ranks. Answered with `Connected`."""

    store: str  # path of the memory in which the ranks find each other, or tcp://HOST:PORT between machines
    timeout_s: float  # of every collective
    shards: int  # per stage: rank = stage * shards + shard
    stages: int
    devices: list[str]  # by rank: cpu, cuda:0, ...
    backend: str = ""  # gloo: where several ranks use one GPU; empty: the best one for the device


class Connected(msgspec.Struct, frozen=True):
    """The rank has met the others."""

    all_reduce_s: float  # of one small all-reduce
    transport: str  # what carries it: gloo, or NCCL with its version and settings


class Open(msgspec.Struct, frozen=True):
    """OPEN: load this rank's share. Answered with `Loaded`."""

    path: str
    spec: ModelSpec
    config: EngineConfig
    plan: MemoryPlan
    shard: Shard


class Loaded(msgspec.Struct, frozen=True):
    """Bytes of a rank's weights: without rotary tables, and those tables per token of the context."""

    fixed_bytes: int
    table_bytes_per_token: float
    unused_tensors: frozenset[str] = frozenset()  # of the checkpoint; another rank may use them
    max_loras: int | None = None  # None: loaded without memory for adapters


class Measured(msgspec.Struct, frozen=True):
    """MEASURED: memory of a rank's weights, and of its largest step besides the KV cache; on a CPU None and 0."""

    weights_bytes: int | None = None
    activation_bytes: int = 0
    comm_bytes: int | None = None


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


class PutAdapter(msgspec.Struct, frozen=True):
    """ADAPTER: load an adapter's slices into a slot."""

    slot: int
    path: str


class Idle(msgspec.Struct, frozen=True):
    """The answer to IDLE: whether more idle work is left, and the runner's counts."""

    more: bool
    stats: RunnerStats


class Report(msgspec.Struct, frozen=True):
    """REPORT: progress of a long record. loaded and total: bytes of the weights, if it loads."""

    text: str
    loaded: int = 0
    total: int = 0


class Log(msgspec.Struct, frozen=True):
    """LOG: one log record of a rank."""

    level: int
    logger: str
    text: str


class Failure(msgspec.Struct, frozen=True):
    """FAILED: an error. is_fatal: the rank has left a step, and the whole group with it."""

    name: str
    what: str
    why: str
    hint: str
    is_fatal: bool
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, *, is_fatal: bool) -> Failure:
        """Return the failure that describes an error."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, LocalLLMError):
            return cls(type(error).__name__, error.what, error.why, error.hint, is_fatal, trace)
        first = (str(error).splitlines() or [""])[0]
        return cls("", f"{type(error).__name__}: {first}", "", "", is_fatal, trace)

    def as_error(self) -> LocalLLMError:
        """Return the error as one of this package's own, of the same class where there is one."""
        kind = getattr(errors, self.name, None) if self.name else None
        if not (isinstance(kind, type) and issubclass(kind, LocalLLMError)):
            kind = errors.EngineError
        return kind(self.what, self.why, self.hint)
