"""The engine's `Runner` whose steps run in the processes of a group of ranks.

A step is two records, as the engine makes two calls: the plan, and the order to sample, in which only the rank that
draws gets the masks. Both go to all ranks; the result comes from the rank that draws.
Does not know: scheduling, how ranks are started.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from localllm.engine.step import DraftSupport, RankStats, RunnerStats, StepPlan, StepResult, TokenMasks
from localllm.errors import RanksLost
from localllm.ranks.links import Links
from localllm.ranks.messages import Idle
from localllm.ranks.states import InFlight
from localllm.ranks.wire import Answer, BadRecord, Kind, decode, decode_blocks, encode_plan, encode_sample

SLOW = 20
"""Times the slowest step so far that a step may take, if that is longer than the group's timeout."""

QUIET_S = 0.05  # without a step before idle time is used: requests often arrive in groups
PAUSE_S = 0.001  # that an arriving request may have to wait meanwhile


class RunnerSizes(Protocol):
    """The sizes of an open runner, and its drafts (`messages.Opened`)."""

    @property
    def num_blocks(self) -> tuple[int, ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def drafts(self) -> DraftSupport: ...
    @property
    def block_bytes(self) -> tuple[int, ...]: ...


class RankRunner:
    """Implements `engine.step.Runner`. Not thread-safe: the engine loop is the only caller."""

    profiler = None  # the steps run in other processes

    def __init__(
        self, links: Links, opened: RunnerSizes, *, num_stages: int, sampling_rank: int, timeout_s: float,
        read_ranks: Callable[[], tuple[RankStats, ...]] = tuple, in_flight: InFlight | None = None,
    ) -> None:  # fmt: skip
        """read_ranks: returns the state of the ranks, from any thread, without asking them. in_flight: the clock to run
        while steps are in flight."""
        self.num_blocks, self.block_size, self.vocab_size = opened.num_blocks, opened.block_size, opened.vocab_size
        self.num_stages, self.drafts = num_stages, opened.drafts
        self.block_bytes = opened.block_bytes  # (): the blocks of several ranks do not move
        self._links, self._timeout_s, self._read_ranks = links, timeout_s, read_ranks
        self._sampling_rank = sampling_rank
        self._in_flight = InFlight() if in_flight is None else in_flight
        self._slowest_s, self._last_step_s = 0.0, -math.inf
        self._stats = RunnerStats()
        self._open: set[int] = set()  # records of steps whose results were not read yet
        self._closed = False

    def forward(self, plan: StepPlan) -> None:
        self._last_step_s = time.monotonic()
        self._in_flight.begin()
        self._links.post(Kind.FORWARD, [encode_plan(plan)])

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingRankStep:
        payloads = [encode_sample(plan)]
        if masks is not None:
            payloads *= self._links.size
            payloads[self._sampling_rank] = encode_sample(plan, masks)
        seq = self._links.post(Kind.SAMPLE, payloads, (self._sampling_rank,))
        self._open.add(seq)
        return PendingRankStep(self, plan, seq)

    def settle(self, plan: StepPlan, seq: int) -> StepResult:
        """Wait for the result of a step, and for the blocks that it copied out. Raises `RanksLost`."""
        begun, step_id = time.monotonic(), plan.step_id
        limit = max(self._timeout_s, SLOW * self._slowest_s)
        records = self._links.wait(seq, limit, f"step {step_id}")
        self._open.discard(seq)
        if not self._open:
            self._in_flight.end()
        self._slowest_s = max(self._slowest_s, time.monotonic() - begun)
        answer = decode(records[0].payload, Answer)
        if answer.stats is not None:
            self._stats = answer.stats
        if answer.result.step_id != step_id:
            raise BadRecord(f"step {answer.result.step_id} was answered instead of {step_id}")
        for move, rows in zip([each for each in plan.moves if not each.is_load], answer.moved, strict=True):
            move.host.result = decode_blocks(rows).result
        return answer.result

    def use_idle_time(self) -> bool:
        """Have all ranks do one piece of idle work. The server decides when: ranks that exchange tensors must agree."""
        if time.monotonic() - self._last_step_s < QUIET_S:
            time.sleep(PAUSE_S)
            return True
        answers = self._links.call(Kind.IDLE, None, Idle, self._timeout_s)
        self._stats = answers[self._sampling_rank].stats
        return any(answer.more for answer in answers)

    def stats(self) -> RunnerStats:
        """Return the counts that came with the last result: asking for them would wait for the step that runs."""
        return self._stats._replace(ranks=self._read_ranks())

    def reset(self) -> None:
        self._links.forget(self._open)
        self._open.clear()
        self._in_flight.end()
        self._links.call(Kind.RESET, None, type(None), self._timeout_s)

    def close(self) -> None:
        """Close the runners of all ranks. Idempotent; does nothing if the ranks are lost."""
        if self._closed:
            return
        self._closed = True
        try:
            self._links.call(Kind.CLOSE_RUNNER, None, type(None), self._timeout_s)
        except RanksLost:
            pass  # their runners ended with them


class PendingRankStep:
    """A step that the ranks were told to run."""

    def __init__(self, runner: RankRunner, plan: StepPlan, seq: int) -> None:
        self._runner, self._plan, self._seq = runner, plan, seq

    def result(self) -> StepResult:
        return self._runner.settle(self._plan, self._seq)
