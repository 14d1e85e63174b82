"""A rank process whose model is made of memory, and what goes wrong in it on request.

`python -m tests.ranks.fakes` runs the real main of a rank with `FakeShare`. What it does comes from the path that the
server opens: JSON with the fault, the rank and the step. Nothing here imports torch, so such a rank starts quickly.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.engine.step import RunnerStats, StepPlan, TokenMasks
from localllm.errors import DoesNotFit, ModelNotFound
from localllm.ranks.messages import Connect, Connected, Loaded, Measured, PutAdapter, Report
from localllm.ranks.rank import Agree, Tell, main
from localllm.ranks.wire import decode
from tests.fake_runner import FakeRunner

COMMAND = (sys.executable, "-m", "tests.ranks.fakes")
BLOCK_SIZE, VOCAB_SIZE = 4, 32


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank does wrong: kill, stop, exit, raise or hang, in a phase or before a step."""

    what: str
    rank: int = 1
    at: str = "forward"  # hello, connect, load, open_runner, forward, sample
    step: int = 3

    def happen(self) -> None:
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.what == "exit":
            os._exit(3)
        elif self.what == "hang":
            time.sleep(3600)
        elif self.what == "refuse":
            raise DoesNotFit("Rank 1 has no memory.", "It has 1 byte.", "-pp 2")
        else:
            raise RuntimeError("asked to fail")


class FakeOpen(msgspec.Struct):
    """The part of `Open` that a fake reads."""

    path: str


class FakeOpenRunner(msgspec.Struct):
    """The part of `OpenRunner` that a fake reads and changes."""

    plan: dict[str, Any]


class FakeShare:
    """A rank's share that is a `FakeRunner`. Every rank computes everything, so each one checks all records."""

    def __init__(self) -> None:
        self.samples = self.answers_later = False
        self._rank, self._is_alone = 0, False
        self.thread: threading.Thread | None = None  # that waits for results, if results come later
        self._fault: Fault | None = None
        self._options: dict[str, Any] = {}

    def connect(self, rank: int, asked: Connect) -> Connected:
        self._rank, self._is_alone = rank, len(asked.devices) == 1
        self.samples = rank == len(asked.devices) - asked.shards
        self.answers_later = asked.backend == "later"
        return Connected(1e-6 * (rank + 1), "gloo")

    def enter_thread(self) -> None:
        self.thread = threading.current_thread()

    def fingerprint(self, path: str) -> dict[str, str]:
        return {"fake": "same"}

    def load(self, asked: bytes, tell: Tell) -> Loaded:
        logging.getLogger(__name__).info("rank %d loads its share", self._rank)
        self._options = json.loads(decode(asked, FakeOpen).path)
        fault = self._options.get("fault")
        self._fault = Fault(**fault) if fault and fault["rank"] == self._rank else None
        tell(Report("", 5, 10))
        self._happen("load")
        return Loaded(100, 0.5, max_loras=2)

    def open_runner(self, asked: bytes, agree: Agree, tell: Tell) -> tuple[FaultyRunner, object]:
        self._happen("open_runner")
        assert decode(asked, FakeOpenRunner).plan["num_blocks"]
        plan = decode(agree(Measured()), dict)
        tell(Report("opened"))
        runner = FaultyRunner(tuple(plan["num_blocks"]), self._fault, self._options, self.samples)
        sizes = {"num_blocks": runner.num_blocks, "block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE}
        sizes["drafts"] = runner.drafts
        return runner, {"plan": plan, **sizes, "block_bytes": runner.block_bytes if self._is_alone else ()}

    def waited_ns(self) -> int:
        return 0

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def put_adapter(self, asked: PutAdapter) -> None:
        if asked.path == "missing" and self._rank == 1:
            raise ModelNotFound("There is no such adapter.")

    def close(self) -> None:
        pass

    def _happen(self, at: str) -> None:
        if self._fault is not None and self._fault.at == at:
            self._fault.happen()


class FaultyRunner(FakeRunner):
    """A fake runner with a fault in one step. One that draws nothing cannot check what it reads back under masks."""

    def __init__(
        self, num_blocks: tuple[int, ...], fault: Fault | None, options: dict[str, Any], samples: bool
    ) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE, check=not options.get("unchecked"))
        self._fault, self._sleep_s, self._samples = fault, options.get("sleep_s", 0.0), samples
        self._steps = 0

    def forward(self, plan: StepPlan) -> None:
        self._steps += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._happen("forward")
        super().forward(plan)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> Any:
        self._happen("sample")
        assert masks is None or self._samples, "only the rank that draws gets masks"
        return super().sample(plan, masks)

    def stats(self) -> RunnerStats:
        return RunnerStats(launched_steps=self._steps)

    def _happen(self, at: str) -> None:
        if self._fault is not None and self._fault.at == at and self._steps == self._fault.step:
            self._fault.happen()


if __name__ == "__main__":
    if os.environ.get("FAKE_RANK_HANGS") == sys.argv[4]:
        time.sleep(3600)
    main(FakeShare)
