"""The server's side of fake ranks: their executor, or the links to ranks on threads."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from localllm.config.settings import EngineConfig
from localllm.engine.step import DraftSupport
from localllm.models.fit import MemoryPlan, RankPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.shard import even_heads, shards_of
from localllm.ranks.channel import Channel
from localllm.ranks.executor import RankExecutor
from localllm.ranks.links import Links, Loss
from localllm.ranks.messages import Connect, Connected, Loaded, Measured
from localllm.ranks.progress import ProgressTable, shared_memory
from localllm.ranks.rank import LINGER_S, Rank, Tell
from localllm.ranks.remote import RankRunner
from localllm.ranks.supervisor import TICK_S
from localllm.ranks.wire import BadRecord, Kind, Record, encode
from tests.ranks.fakes import BLOCK_SIZE, COMMAND, VOCAB_SIZE, FakeShare, Fault

NUM_BLOCKS = (64,)

SPEC = ModelSpec("Fake", 2, 64, 96, 8, 4, 8, VOCAB_SIZE * 64, 512, "silu", True, "float32", RopeSpec(10000.0))


def fake_plan(size: int) -> MemoryPlan:
    shards = shards_of(SPEC, even_heads(SPEC, size) or [])
    return MemoryPlan(
        "cpu", "float32", "float32", 512, 8, 64, 32, NUM_BLOCKS, BLOCK_SIZE, 100 * size, 64 * size, 10, 0, 1000, 2,
        ranks=tuple(RankPlan("cpu", "CPU", 0, shard, 100, 64, 10, 0, 0, 1000, 0) for shard in shards),
    )  # fmt: skip


def fake_executor(
    size: int = 2,
    fault: Fault | None = None,
    *,
    rank_timeout: int = 60,
    tick_s: float = TICK_S,
    report: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda loaded, total: None,
    **options: Any,
) -> RankExecutor:
    """Start ranks of the fake model. options: for the fakes."""
    if fault is not None:
        options["fault"] = {name: getattr(fault, name) for name in Fault.__slots__}
    config, path = EngineConfig(rank_timeout=rank_timeout), Path(json.dumps(options))
    return RankExecutor.load(path, SPEC, config, fake_plan(size), progress, report, command=COMMAND, tick_s=tick_s)


class ThreadRank(Rank):
    """A rank on a thread of this process. It dies before record `dies_at`, as if it had been killed."""

    dies_at = -1

    def _do(self, record: Record) -> None:
        if record.seq == self.dies_at:
            self._channel.socket.shutdown(socket.SHUT_RDWR)
            raise SystemExit
        super()._do(record)

    def _beat(self) -> None:
        """Do nothing: nobody watches."""


class ThreadGroup:
    """Ranks of the fake model on threads, and the links to them: the real records, without processes."""

    def __init__(
        self, size: int, *, dying_rank: int = 0, dies_at: int = -1, checks_all: bool = True, backend: str = ""
    ) -> None:  # fmt: skip
        """backend: later: results come from a thread of their own, as on a GPU."""
        self._backend = backend
        self.loss = Loss()
        self._fd = shared_memory(size)
        self.table = ProgressTable(self._fd, size)
        pairs = [socket.socketpair() for _ in range(size)]
        self.links = Links(
            [Channel(ours) for ours, _ in pairs], self.loss, [f"Rank {n}" for n in range(size)], self.loss.declare
        )
        self.ends = [Channel(theirs) for _, theirs in pairs]
        self.ranks = [
            ThreadRank(n, end, self.table, partial(ThreadShare, checks_all), self._end(n))
            for n, end in enumerate(self.ends)
        ]
        self.ranks[dying_rank].dies_at = dies_at
        self._threads = [threading.Thread(target=rank.run, daemon=True) for rank in self.ranks]
        for thread in self._threads:
            thread.start()

    def _end(self, rank: int) -> Callable[[int], None]:
        """Return what ends a rank's thread, in place of `os._exit`."""
        return lambda code: self.ranks[rank]._records.put(BadRecord("the end"))

    def open(self) -> RankRunner:
        """Take the model through its phases, as the executor does."""
        size = self.links.size
        self.links.answers(0, int, 5, "start")
        self.links.call(Kind.CONNECT, Connect("", 5, size, 1, ["cpu"] * size, self._backend), Connected, 5)
        self.links.answers(self.links.ask(Kind.OPEN, [encode({"path": "{}"})]), Loaded, 5, "load")
        seq = self.links.ask(Kind.OPEN_RUNNER, [encode({"plan": {"num_blocks": NUM_BLOCKS}})])
        self.links.answers(seq, Measured, 5, "measure")
        self.links.expect(seq)
        self.links.post(Kind.ALLOCATE, [encode({"num_blocks": NUM_BLOCKS})])
        opened = self.links.answers(seq, FakeOpened, 5, "open")
        return RankRunner(self.links, opened[0], num_stages=1, sampling_rank=0, timeout_s=10)

    def close(self) -> None:
        for channel in self.links._channels:
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LINGER_S + 1)
        self.loss.close()
        self.links.close()
        for channel in self.ends:
            channel.close()
        self.table.close()
        os.close(self._fd)


class FakeOpened(msgspec.Struct):
    """`Opened` without its plan."""

    num_blocks: tuple[int, ...]
    block_size: int
    vocab_size: int
    drafts: DraftSupport
    block_bytes: tuple[int, ...] = ()


class ThreadShare(FakeShare):
    """A fake share. checks_all: ranks that draw nothing check their memory too, which only works without masks."""

    def __init__(self, checks_all: bool) -> None:
        super().__init__()
        self._checks_all = checks_all

    def load(self, asked: bytes, tell: Tell) -> Loaded:
        loaded = super().load(asked, tell)
        self._options["unchecked"] = not self._checks_all and not self.samples
        return loaded
