"""Random walks of an engine in which any call may raise; after each, no request or block is lost, doubled or wrong.

    python -m tests.engine.injected_faults --walks 100000

A fault is raised by a call that the engine makes (runner, grammar, adapter, `deliver`, statistics), before or after the
call has done its work, or it is a row without a usable result. Most walks call `step` themselves, so that each can be
repeated by its number; every twentieth uses the engine's own thread. The runner is the fake model, whose KV cache can
also be poisoned here, like by NaN.
"""

import argparse
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.engine.adapter import Adapter
from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.engine.step import RowResult, StepPlan, StepResult, TokenMasks
from localllm.errors import (
    DeviceLost,
    EngineCrashed,
    EngineStopped,
    InvalidParameter,
    KVCacheExhausted,
    LocalLLMError,
    QueueFull,
    StepFailed,
)
from tests.engine.harness import EveryOther, check_invariants, check_states, make_engine, make_request
from tests.fake_runner import CorruptKV, FakeRunner, expected_output

VOCAB = 4
THREADED = 20  # one of so many walks uses the engine's thread
POISON = (-2, -2)  # a token and a crc that cannot occur otherwise
POISONED_STATE = -2


class ForeignError(Exception):
    """An exception of an unknown library."""


FAULTS: tuple[Callable[[str], BaseException], ...] = (
    ValueError, ZeroDivisionError, MemoryError, RecursionError, AssertionError, StopIteration, ForeignError, StepFailed,
    InvalidParameter,
)  # fmt: skip
ENDS: tuple[Callable[[str], BaseException], ...] = (KeyboardInterrupt, SystemExit, DeviceLost)
"""Exceptions that end the engine's thread, or its step and all requests."""


@dataclass
class Faults:
    """Decides when a fault is raised. `rate`: share of the calls."""

    dice: random.Random
    rate: float
    armed: bool = True
    raised: Counter[str] = field(default_factory=Counter)

    def fires(self, where: str) -> bool:
        if not self.armed or self.dice.random() >= self.rate:
            return False
        self.raised[where] += 1
        return True

    def throw(self, owner: str = "") -> None:
        """Raise a fault. owner: the only request that may fail because of it."""
        if self.dice.random() < 0.1:
            raise self.dice.choice(ENDS)("injected")
        raise self.dice.choice(FAULTS)(f"injected in {owner}" if owner else "injected")

    def around(
        self, where: str, call: Callable[..., Any], *, after: bool = True, before: bool = True, owner: str = ""
    ) -> Any:
        """Return a function like `call` that may raise before or after its work."""

        def called(*given: Any, **named: Any) -> Any:
            fires = self.fires(where)
            done_first = not before or (after and self.dice.random() < 0.5)
            if fires and not done_first:
                self.throw(owner)
            told = call(*given, **named)
            if fires:
                self.throw(owner)
            return told

        return called


class FaultyGrammar(EveryOther):
    def __init__(self, length: int, faults: Faults, owner: str) -> None:
        super().__init__(length)
        for name in ("fill", "accept", "may_forbid"):
            setattr(self, name, faults.around(f"grammar.{name}", getattr(super(), name), owner=owner))
        self._faults, self._owner = faults, owner

    @property
    def is_over(self) -> bool:
        if self._faults.fires("grammar.is_over"):
            self._faults.throw(self._owner)
        return super().is_over


class FaultyRunner(FakeRunner):
    """A runner whose rows may have no result. A row with NaN also poisons what it writes for later readers.

    Rows that do not sample cannot report NaN, so they are never poisoned.
    """

    faults: Faults

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> Any:
        for row in plan.rows:
            if row.samples and self.faults.fires("row: NaN"):
                slot = self._slots[row.slot]
                end = row.num_computed_tokens + row.num_scheduled_tokens
                for position in range(row.num_computed_tokens, end):
                    self._memory[0, self._cache_slot(slot, 0, position)] = POISON
                if row.state is not None:
                    self._states[row.state.write] = self._states[row.state.save] = POISONED_STATE
        pending = super().sample(plan, masks)
        if self.faults.fires("rows: too few"):
            return Told(StepResult(plan.step_id, pending.step.rows[1:]), self.faults)
        return Told(pending.step, self.faults)

    def _state_after(self, row: Any) -> int:
        """Return a state that stays NaN where the one that it comes from is."""
        if row.state.read != -1 and self._states.get(row.state.read) == POISONED_STATE:
            return POISONED_STATE
        return super()._state_after(row)

    def _answer(self, slot: Any, row: Any, bits: Any) -> RowResult:
        is_poisoned = row.state is not None and self._states[row.state.write] == POISONED_STATE
        try:
            if is_poisoned and row.samples:
                raise CorruptKV("the row's state is NaN")
            told = super()._answer(slot, row, bits)
        except CorruptKV:
            read = (self._memory.get((0, self._cache_slot(slot, 0, p))) for p in range(row.num_computed_tokens + 1))
            if not is_poisoned and POISON not in read:
                raise
            slot.token_ids.append(0)  # the device continues with some token
            self._extend_crcs(slot)
            return RowResult(error="injected NaN", fault="model")
        if row.samples and self.faults.fires("row: error"):
            error = f"injected in {slot.request_id}"
            return RowResult(error=error, fault=self.faults.dice.choice(("step", "request")))
        if row.samples and self.faults.fires("row: no token"):
            return RowResult()
        return told


@dataclass
class Told:
    """A `PendingStep` whose result may raise."""

    step: StepResult
    faults: Faults

    def result(self) -> StepResult:
        if self.faults.fires("runner.result"):
            self.faults.throw()
        return self.step


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    length: int | None  # of the grammar
    may_be_cut: bool = False  # the request is cancelled


class Walk:
    """One random walk. `number` decides everything but the scheduling of threads."""

    def __init__(self, number: int, rate: float = 0.02) -> None:
        self.dice = dice = random.Random(number)
        self.faults = Faults(random.Random(number + 1), rate=dice.choice((0.0, rate / 4, rate, rate * 4)))
        self.threaded = number % THREADED == 0
        self.engine = make_engine(
            depth=dice.randint(1, 3), num_stages=dice.choice((1, 1, 2, 3)), num_blocks=dice.choice((9, 14, 40)),
            vocab_size=VOCAB, max_num_seqs=4, max_num_batched_tokens=dice.choice((5, 16, 64)), max_num_queued_reqs=6,
            policy=dice.choice(("fcfs", "priority")), enable_prefix_caching=dice.random() < 0.8,
            fail_when=lambda plan: False, num_places=dice.choice((0, 5, 6, 9)), state_interval=dice.choice((4, 8)),
        )  # fmt: skip
        self.adapters = [Adapter("a", 0, "x"), Adapter("b", 1, "y")]
        self.asked: dict[str, Asked] = {}
        self.engine.endings, self.engine.tokens = {}, {}
        self._news, self._has_ended = threading.Condition(), False
        self._arm()

    def _arm(self) -> None:
        """Wrap everything that the engine calls in faults."""
        engine, around = self.engine, self.faults.around
        runner, scheduler, loop = engine.loop.runner, engine.scheduler, engine.loop
        engine.runner.__class__ = FaultyRunner
        engine.runner.faults = self.faults  # type: ignore[attr-defined]
        for name in ("forward", "sample", "stats", "use_idle_time"):
            setattr(runner, name, around(f"runner.{name}", getattr(runner, name)))
        runner.reset = around("runner.reset", runner.reset)  # type: ignore[method-assign]
        for name in ("on_admission", "on_step", "on_settled", "on_tokens", "on_finish", "snapshot"):
            setattr(scheduler.recorder, name, around(f"recorder.{name}", getattr(scheduler.recorder, name)))
        loop.deliver = around("deliver", self._receive, after=False)
        loop.on_ended = self._end

    def _receive(self, outputs: list[EngineOutput]) -> None:
        with self._news:
            self.engine.receive(outputs)
            self._news.notify()

    def _end(self) -> None:
        with self._news:
            self._has_ended = True
            self._news.notify()

    # -- what happens

    def run(self) -> Counter[str]:
        if self.threaded:
            self.engine.loop.start()
        self._begin()
        self._finish()
        self._check()
        self._check_next()
        return self.faults.raised

    def _begin(self) -> None:
        for _ in range(self.dice.randint(3, 16)):
            what = self.dice.random()
            if what < 0.4:
                self._add()
            elif what < 0.5 and self.asked:
                name = self.dice.choice(sorted(self.asked))
                self.asked[name].may_be_cut = True
                self.engine.loop.cancel(name)
            elif what < 0.55 and not self.threaded and not self.engine.scheduler.has_work:
                self._interruptible(self.engine.loop._use_idle_time)
            else:
                self._step()

    def _add(self) -> None:
        dice, name = self.dice, f"r{len(self.asked)}"
        prompt = [dice.randrange(VOCAB) for _ in range(dice.choice((1, 3, 8, 13)))]
        if dice.random() < 0.6:
            prompt = [0, 1, 2, 3, 3, 2, 1, 0, 1, 1][: dice.randint(4, 10)] + prompt
        asked = Asked(prompt, dice.randint(1, 9), dice.choice((None, None, 2, 5)))
        grammar = None if asked.length is None else FaultyGrammar(asked.length, self.faults, name)
        request = make_request(name, prompt, max_tokens=asked.max_tokens, priority=dice.randint(0, 2), grammar=grammar)
        adapter = dice.choice((None, None, *self.adapters))
        self.asked[name] = asked
        if not self._submit(request, adapter):
            del self.asked[name]

    def _submit(self, request: Request, adapter: Adapter | None) -> bool:
        """Submit a request. An adapter that fails to begin has not begun; one that fails to end has ended."""
        if adapter is not None:
            faulty = FaultyAdapter(adapter, self.faults)
            request.options = replace(request.options, adapter=faulty)  # type: ignore[arg-type]
            request.cache_extras = (adapter.cache_extra,)
        try:
            self.engine.loop.submit(request)
        except BaseException as error:
            self._expect(error)
            return False
        return True

    def _step(self) -> None:
        if self.threaded:
            time.sleep(0)
        else:
            self._interruptible(self.engine.loop.step)
            if self.engine.loop.why_ended is None and self.dice.random() < 0.25:
                armed, self.faults.armed = self.faults.armed, False
                check_invariants(self.engine)
                self.faults.armed = armed

    def _interruptible(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            raise AssertionError("a step raised") from error
        except BaseException as error:  # like Ctrl-C in a script
            self._expect(error)

    def _finish(self) -> None:
        """Run some more steps with faults, then without."""
        if self.threaded:
            self._wait()
            return
        for step in range(600):
            if step == 40:
                self.faults.armed = False
            if len(self.engine.endings) == len(self.asked) and not self._is_busy():
                break
            self._step()
        self.faults.armed = False

    def _wait(self) -> None:
        loop = self.engine.loop
        with self._news:
            done = self._news.wait_for(lambda: self._all_ended() or self._has_ended or not loop.is_running, 20)
        assert done, f"somebody waits for ever: {self.asked.keys() - self.engine.endings.keys()}"
        if loop.why_ended is not None:
            loop._thread.join(10)  # type: ignore[union-attr]
        assert self._all_ended(), f"no end for {self.asked.keys() - self.engine.endings.keys()}: {loop.why_ended}"

    def _all_ended(self) -> bool:
        """Return whether all requests have ended. After the thread's end, undelivered outputs count as errors."""
        left = self.engine.loop.outbox._outputs if not self.engine.loop.is_running else []
        told = self.engine.endings.keys() | {output.request_id for output in left if output.finish_reason}
        return self.asked.keys() <= told

    def _is_busy(self) -> bool:
        loop = self.engine.loop
        return bool(self.engine.scheduler.has_work or loop._inbox or loop.outbox._outputs or loop.outbox._left)

    # -- what holds

    def _check(self) -> None:
        loop = self.engine.loop
        assert self._all_ended(), f"no end for {self.asked.keys() - self.engine.endings.keys()}"
        for name, (ending,) in self.engine.endings.items():
            self._check_answer(name, ending)
        if loop.why_ended is not None:
            self._expect(loop.why_ended)
            assert isinstance(loop.why_ended, DeviceLost | EngineCrashed)
        self._settled()
        self._between_steps(self._check_held)

    def _check_held(self) -> None:
        loop, scheduler = self.engine.loop, self.engine.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.launched
        assert not len(scheduler.waiting)
        assert not loop.outbox._open
        assert not loop._pending
        assert scheduler.ledger.main_pool.num_free == scheduler.ledger.main_pool.capacity
        check_states(scheduler)
        assert sorted(scheduler.table.free_slots) == list(range(4))
        assert [adapter.num_requests for adapter in self.adapters] == [0, 0]

    def _between_steps(self, check: Callable[[], None]) -> None:
        """Run a check where the engine changes nothing meanwhile: on its thread, or after that thread's end. A fault in
        idle time drops the names of one pool after the other."""
        loop = self.engine.loop
        if loop.is_running:
            try:
                loop.call(check).result(20)
                return
            except LocalLLMError as error:  # it ended before the check began
                self._expect(error)
                loop._thread.join(10)  # type: ignore[union-attr]
        check()

    def _settled(self) -> None:
        """Wait until the thread is idle: it may still be after its last delivery."""
        give_up_s = time.monotonic() + 20
        while self.threaded and self.engine.loop.is_running and (self._is_busy() or self.engine.loop._pending):
            assert time.monotonic() < give_up_s, "the thread does not come to rest"
            time.sleep(0.0005)

    def _check_answer(self, name: str, ending: EngineOutput) -> None:
        asked, got = self.asked[name], self.engine.tokens[name]
        grammar = None if asked.length is None else EveryOther(asked.length)
        whole = expected_output(asked.prompt, asked.max_tokens, VOCAB, grammar)
        assert got == whole[: len(got)], (name, got, whole)
        if ending.finish_reason in ("stop", "length"):
            assert got == whole, (name, got, whole)
        elif ending.finish_reason == "abort":
            assert asked.may_be_cut
        else:
            assert ending.finish_reason == "error"
            assert ending.error is not None
            self._expect(ending.error)
            owner = re.search(r"injected in (\w+)", str(ending.error))
            assert owner is None or owner[1] == name, f"{name} bears what is of {owner[1]}"

    def _check_next(self) -> None:
        """Check one more request: a live engine answers normally, also from its prefix cache; an ended one refuses."""
        self.faults.armed = False
        loop = self.engine.loop
        prompts = [[0, 1, 2, 3, 3, 2, 1, 0, 1, 1], *[asked.prompt for asked in self.asked.values()][-1:]]
        for index, prompt in enumerate(prompts):
            name = f"next-{index}"
            try:
                loop.submit(make_request(name, prompt, max_tokens=5))
            except EngineStopped:
                assert loop.why_ended is not None
                return
            assert self.threaded or loop.why_ended is None
            self.asked[name] = Asked(prompt, 5, None)
            if self.threaded:
                self._wait()
                self._settled()
                if loop.why_ended is not None:  # its idle thread met the last fault while the request came
                    self._expect(loop.why_ended)
                    assert self.engine.endings[name][0].error is loop.why_ended
                    return
            else:
                for _ in range(200):
                    self.engine.loop.step()
                    if not self._is_busy():
                        break
                check_invariants(self.engine)
            assert self.engine.endings[name][0].finish_reason == "length", self.engine.endings[name]
            assert self.engine.tokens[name] == expected_output(prompt, 5, VOCAB)
        loop.stop()

    def _expect(self, error: BaseException) -> None:
        known = isinstance(error, KVCacheExhausted | QueueFull | EngineStopped)
        known = known or "no token" in str(error) or "results for" in str(error)
        if known or "injected" in f"{error} {error.why if isinstance(error, LocalLLMError) else ''}":
            return
        raise AssertionError(f"nobody injected this: {error!r}") from error


class FaultyAdapter:
    """An adapter whose count stays right even if it raises."""

    def __init__(self, adapter: Adapter, faults: Faults) -> None:
        self.name, self.slot = adapter.name, adapter.slot
        self.begin = faults.around("adapter.begin", adapter.begin, after=False)
        self.end = faults.around("adapter.end", adapter.end, before=False)


def run_walks(numbers: range, rate: float = 0.02) -> Counter[str]:
    """Run walks; an assertion names the failing walk. Return how often each place raised."""
    raised: Counter[str] = Counter()
    for number in numbers:
        try:
            raised += Walk(number, rate).run()
        except BaseException as error:
            error.add_note(f"walk {number}: python -m tests.engine.injected_faults --first {number} --walks 1")
            raise
    return raised


def main() -> None:
    parser = argparse.ArgumentParser(description="Random walks of an engine in which any call may raise anything.")
    parser.add_argument("--walks", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first walk")
    parser.add_argument("--rate", type=float, default=0.02, help="of calls that raise")
    parser.add_argument("--log", action="store_true", help="what the engine logs")
    asked = parser.parse_args()
    if not asked.log:
        logging.disable(logging.CRITICAL)
    started_s = time.perf_counter()
    raised = run_walks(range(asked.first, asked.first + asked.walks), asked.rate)
    seconds = time.perf_counter() - started_s
    print(
        f"{asked.walks} walks in {seconds:.0f} s, {raised.total()} faults: every request ended once, nothing was held"
    )
    for where, count in raised.most_common():
        print(f"{count:9d}  {where}")


if __name__ == "__main__":
    main()
