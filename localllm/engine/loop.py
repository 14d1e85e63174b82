"""The engine's main loop: receive requests, schedule a step, launch it, settle the oldest one.

`submit` and `cancel` may be called from any thread. Everything else runs on the engine's thread (`start`), or on the
caller's thread (`step`, used by the offline API). With depth two, step t+1 is scheduled and launched before the result
of step t is read. With a model in pipeline stages, one step per cohort is in flight (scheduler.py).
Outputs leave through one callback per step, while the device computes the next step. No other thread therefore takes
the interpreter from this one while it has a step to launch.
Does not know: asyncio, text, torch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from localllm.engine.outbox import Deliver, Outbox, begin_use
from localllm.engine.prompt_history import CacheMiss
from localllm.engine.pulse import Pulse, pulse_of
from localllm.engine.recorder import now_s
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.settle import as_localllm_error
from localllm.engine.stats import EngineStats, RequestTimeline
from localllm.engine.step import GaveWay, PendingStep, Runner, StepPlan, TokenMasks
from localllm.errors import DeviceLost, EngineCrashed, EngineError, EngineStopped, LocalLLMError, RanksLost
from localllm.text.grammar import fill_along
from localllm.version import __version__

log = logging.getLogger(__name__)
T = TypeVar("T")

SNAPSHOT_INTERVAL_S = 0.1
SWITCH_INTERVAL_S = 1e-4
"""Seconds that another thread may keep the interpreter while this one wants it. A step asks for the interpreter
hundreds of times; with Python's default of 5 ms, one busy thread would stretch a 5 ms step to 50 ms."""

TIER_WAIT_S = 0.05
"""Longest sleep while blocks are read or written: loads that are late are ended after it."""

MOST_FAILURES = 3
"""Failures in a row after which the engine ends:
outputs that `deliver` refuses, or failed steps that end no request."""

Drafter = Callable[[Request], tuple[int, ...]]
"""Function that guesses the tokens that follow a request's known ones (speculative decoding)."""


class _Cancel(NamedTuple):
    request_id: str
    reason: str


class _Errand(NamedTuple):
    """Work for the engine's thread, and the future that has its result."""

    work: Callable[[], Any]
    answer: Future[Any]


class EngineLoop:
    """Runs the engine's steps. `depth`: steps in flight without a pipeline.
    `deliver` receives each step's outputs, on the thread that ran the step.

    Each request that `submit` accepted gets exactly one output with a finish reason, whatever is raised in between.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int = 1,
        deliver: Deliver | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        config = scheduler.config
        assert config.num_stages == runner.num_stages, (config.num_stages, runner.num_stages)
        self.scheduler, self.runner = scheduler, runner
        self.depth = config.num_cohorts if config.num_stages > 1 else depth
        self.deliver: Deliver = deliver or (lambda outputs: None)
        self.outbox = Outbox()
        self.on_ended: Callable[[], None] = lambda: None  # called last on the thread, if the engine ended by itself
        self.why_ended: EngineError | None = None  # None while it runs, and after `stop`
        self._drafter = drafter
        self._pending: deque[PendingStep] = deque()
        self._inbox: deque[Request | _Cancel | RequestTimeline | _Errand] = deque()
        self._wake = threading.Condition()
        self._has_urgent = threading.Event()  # a request in the inbox before which background requests give way
        self._stopping = False
        self._uses_idle_time = True
        self._num_fruitless = 0  # failures in a row
        self._thread: threading.Thread | None = None
        self._stats = scheduler.stats(depth, runner.stats())
        self._stats_failed = False
        if scheduler.cache.tiers is not None:
            scheduler.cache.tiers.transfers.on_news = self.wake

    # From any thread --------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue all requests in order, or none.
        Raises `EngineStopped`, `RanksLost`, or `ModelNotFound` if an adapter was unloaded."""
        with self._wake:
            self._refuse_when_ended()
            begin_use([adapter for request in requests if (adapter := request.options.adapter) is not None])
            self._inbox.extend(requests)
            if not all(request.options.is_background for request in requests):
                self._has_urgent.set()
            self._wake.notify()

    def _refuse_when_ended(self) -> None:
        if self.why_ended is not None:
            raise _refusal(self.why_ended)
        if self._stopping or (self._thread is not None and not self._thread.is_alive()):
            raise EngineStopped("The engine is shutting down.", hint="Retry when the server is running again.")

    def cancel(self, request_id: str, reason: str = "abort") -> None:
        """End a request before the next step. An unknown id is ignored, since the request may have ended already.

        reason: finish reason in the statistics; "stop" if the answer is complete.
        """
        with self._wake:
            self._inbox.append(_Cancel(request_id, reason))
            self._wake.notify()

    def report(self, search: RequestTimeline) -> None:
        """Count a beam search that has ended, whose parts were submitted as requests, as one request."""
        with self._wake:
            self._inbox.append(search)
            self._wake.notify()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` between two steps, on the thread that runs them, at once if the engine is idle.

        The future has its result or its error, or the engine's if the engine ends first. Raises as `submit`.
        """
        answer: Future[T] = Future()
        with self._wake:
            self._refuse_when_ended()
            self._inbox.append(_Errand(work, answer))
            self._wake.notify()
        return answer

    def stats(self) -> EngineStats:
        """Return the latest snapshot: at most 100 ms old while the engine works, exact while it is idle.

        The state of ranks is always that of now: a rank may be lost while the engine is idle or waits for a step.
        """
        stats = self._stats.as_of(now_s())
        return replace(stats, runner=self.runner.stats()) if stats.runner.ranks else stats

    def cache_miss(self, request_id: str, owner: str) -> CacheMiss | None:
        """Return why a recent request of this owner was not found in the prefix cache; None: not known, or it was."""
        return self.scheduler.table.history.miss_of(request_id, owner)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def pulse(self) -> Pulse:
        recorder = self.scheduler.recorder
        progress = recorder.num_steps + recorder.num_failed_steps + recorder.generation_tokens
        has_work = bool(self._inbox) or self.scheduler.has_work
        return pulse_of(self._thread, has_work=has_work, progress=progress)

    # The thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)
        self._thread.start()
        if (tiers := self.scheduler.cache.tiers) is not None:
            tiers.transfers.start()

    def stop(self) -> None:
        """End every request with an `EngineStopped` error, then end the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if (tiers := self.scheduler.cache.tiers) is not None:
            tiers.transfers.close()

    def lose(self, error: DeviceLost) -> None:
        """End the engine, from any thread, because its device is lost: while idle it calls nothing that would raise."""
        with self._wake:
            self.why_ended = self.why_ended or error
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            log.critical("the engine's thread ended; please report this: localllm %s", __version__, exc_info=error)
            self.why_ended = self.why_ended or _crashed(f"{type(error).__name__}: {error}")
        finally:
            self._end_everything()
            if self.why_ended is not None:
                self.on_ended()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do. Return False once the engine has to end."""
        while self._uses_idle_time and self._may_rest() and self._use_idle_time():
            pass
        with self._wake:
            while self._may_rest():
                self._wake.wait()
            return not self._stopping and self.why_ended is None

    def _use_idle_time(self) -> bool:
        try:
            return self.runner.use_idle_time()
        except Exception as error:
            self._uses_idle_time = False  # the next idle period would fail the same way
            self._recover(error)
            return False

    def _may_rest(self) -> bool:
        return not (self._stopping or self.why_ended or self._inbox or self.outbox or self.scheduler.has_work)

    def _end_everything(self) -> None:
        """End every open request with an output, even if the scheduler's state is broken."""
        with self._wake:
            self._stopping = True
        error = self.why_ended or EngineStopped("The engine has stopped.", hint="Start it again with: localllm up")
        self._pending.clear()
        acts: list[Callable[[], None]] = [
            partial(self._fail_all, error), partial(self.outbox.fail_open, error), partial(self._refuse_inbox, error),
            partial(self._refresh_stats, 0.0), self._hand_over,
        ]  # fmt: skip
        if self.runner.profiler is not None:
            acts.append(self.runner.profiler.drop)
        for act in acts:
            try:
                act()
            except BaseException:
                log.exception("shutdown of the engine failed in part")

    def _fail_all(self, error: LocalLLMError) -> None:
        """End all requests. An interrupt may come in between: each attempt ends at least one more of them."""
        for _ in range(1 + len(self.scheduler.requests)):
            try:
                self.scheduler.fail_step(error, everyone=True)
                break
            except BaseException:
                log.exception("requests were ended in part left=%d", len(self.scheduler.requests))
        self.outbox.add(self.scheduler.take_outputs())

    def _refuse_inbox(self, error: LocalLLMError) -> None:
        """Refuse what was not taken in. An interrupt may come in between: the rest is refused all the same."""
        while self._inbox:
            item = self._inbox.popleft()
            try:
                if isinstance(item, Request):
                    self.outbox.open(item)
                    self.outbox.fail(item.request_id, error)
                elif isinstance(item, _Errand) and item.answer.set_running_or_notify_cancel():
                    item.answer.set_exception(error)
            except BaseException:
                log.exception("the inbox was refused in part left=%d", len(self._inbox))

    # One step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launch the next step if there is one, then settle the oldest step if enough are in flight.

        Never raises an `Exception`. A BaseException such as KeyboardInterrupt passes through: by then every request has
        ended with an error, and the next call starts from a clean state.
        """
        if self.why_ended is not None:
            self._end_everything()
            return
        with self._recovering():
            self._receive()
            launched = self._launch()
            if self.depth > 1:
                self._tell()  # outputs of the previous step
            if self._pending and (len(self._pending) >= self.depth or not launched):
                self._settle()
            elif not launched and self.scheduler.waits_for_tier:
                self._wait_for_tier()
        with self._recovering():
            self.outbox.add(self.scheduler.take_outputs())
            if self.depth == 1 or not self.scheduler.has_work:  # at depth one a launch may last a whole step
                self._tell()

    def _wait_for_tier(self) -> None:
        """Wait for a block that another thread reads or writes, or for a request; a late one is noticed, too."""
        with self._wake:
            if not self._inbox and not self._stopping and self.scheduler.waits_for_tier:
                self._wake.wait(TIER_WAIT_S)

    def wake(self) -> None:
        """Let the engine's thread look for work, from any thread."""
        with self._wake:
            self._wake.notify()

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _receive(self) -> None:
        self._has_urgent.clear()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Cancel):
                self.scheduler.abort(item.request_id, item.reason)
                self.outbox.add(self.scheduler.take_outputs())  # at once: the next item may reuse the id
            elif isinstance(item, RequestTimeline):
                try:
                    self.scheduler.recorder.on_search(item)
                except Exception:
                    log.exception("statistics of a search were not recorded id=%s", item.request_id)
            elif isinstance(item, _Errand):
                _run_errand(item)
            else:
                self._take_in(item)

    def _take_in(self, request: Request) -> None:
        self.outbox.open(request)
        if self._drafter is not None and request.grammar is None:
            request.most_unseen = 0  # guesses extend tokens that the host has seen
        try:
            self.scheduler.add(request)
        except Exception as error:
            self.outbox.fail(request.request_id, as_localllm_error(error, request))

    def _launch(self) -> bool:
        if self._drafter is not None:
            self._draft(self._drafter)
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        requests = self.scheduler.launched[-1].requests
        rows = [
            i for i, request in enumerate(requests) if plan.rows[i].samples and _may_forbid(self.scheduler, request)
        ]
        plan = plan if plan.is_unmasked or rows else replace(plan, is_unmasked=True)
        if self.scheduler.can_take_back():
            plan = replace(plan, gives_way=self._has_urgent.is_set)
        try:
            self.runner.forward(plan)
        except GaveWay:
            self.scheduler.take_back()
            return True
        masks = self._masks(plan, requests, rows) if rows else None
        self._pending.append(self.runner.sample(plan, masks))
        return True

    def _masks(self, plan: StepPlan, requests: Sequence[Request], rows: Sequence[int]) -> TokenMasks:
        """Return the allowed tokens of rows whose grammar may forbid one in this step. Runs while the forward runs.

        A grammar needs all previous tokens of its request, so the earlier steps that contain it are settled first. The
        next forward waits for nothing; only the host waits, for one step instead of two. The drafts that the forward
        verifies are known then, too: each has a mask, from a copy of the grammar that follows them.
        """
        while self._pending and any(_has_unseen_tokens(requests[i]) for i in rows):
            self._settle()
        places: list[tuple[int, int]] = []  # (row, which of its draws)
        filled = []
        for row in rows:
            bits = _allowed_tokens(self.scheduler, requests[row], plan.rows[row].num_drafts, self.runner.vocab_size)
            places += [(row, place) for place in range(len(bits))]
            filled.append(bits)
        return TokenMasks(tuple([row for row, _ in places]), np.concatenate(filled), tuple([at for _, at in places]))

    def _draft(self, drafter: Drafter) -> None:
        for request in self.scheduler.running:
            is_seen = request.num_output_placeholders == 0
            if is_seen and request.num_wanted_tokens == 1 and request.grammar is None:
                try:
                    self.scheduler.set_drafts(request, drafter(request))
                except Exception:
                    log.exception("draft failed request id=%s", request.request_id)

    def _settle(self) -> None:
        self.outbox.add(self.scheduler.update(self._pending.popleft().result()))
        self._num_fruitless = 0

    def _recover(self, error: BaseException) -> None:
        """Recover after a step raised: end the requests of the step and keep the model loaded.

        If failures continue without ending any request, all requests are ended; if that does not help, the engine ends.
        """
        running, launched = len(self.scheduler.running), len(self.scheduler.launched)
        log.error("step failed running=%d launched=%d", running, launched, exc_info=error)
        self._pending.clear()
        self.scheduler.recorder.num_failed_steps += 1
        told, interrupt = as_localllm_error(error), None
        if not isinstance(told, DeviceLost | EngineCrashed):  # after these the device cannot be used at all
            try:
                self.runner.reset()
            except DeviceLost as lost:
                told = lost
            except BaseException as failure:
                log.exception("reset failed")
                told = _crashed(f"The runner could not be reset. {type(failure).__name__}: {failure}")
                interrupt = None if isinstance(failure, Exception) else failure
        if self._num_fruitless >= MOST_FAILURES:
            told = _crashed(f"{self._num_fruitless} steps in a row failed. {told}")
        if isinstance(told, DeviceLost | EngineCrashed):
            self.why_ended = told
        everyone = not isinstance(error, Exception) or self._num_fruitless > 0
        try:
            ended = self.scheduler.fail_step(told, everyone=everyone)
            self._num_fruitless = 0 if ended else self._num_fruitless + 1
        finally:  # an interrupt may arrive here, too
            outputs = self.scheduler.take_outputs()
            self.outbox.add_with_lost(outputs, self.scheduler.requests, told)
        if interrupt is not None:
            raise interrupt

    def _tell(self) -> None:
        self._refresh_stats(SNAPSHOT_INTERVAL_S)  # before any client can see that a request has ended
        self._hand_over()

    def _hand_over(self) -> None:
        try:
            self.outbox.hand_over(self.deliver)
        except Exception as error:
            log.exception("outputs were not delivered")
            if self.outbox.num_refused >= MOST_FAILURES:
                raise _crashed(f"Outputs were not delivered. {type(error).__name__}: {error}") from error

    def _refresh_stats(self, interval_s: float) -> None:
        if now_s() - self._stats.taken_s < interval_s and self.scheduler.has_work:
            return
        try:
            self._stats = self.scheduler.stats(self.depth, self.runner.stats())
            self._stats_failed = False
        except Exception:
            if not self._stats_failed:  # once, not with every step
                log.exception("statistics could not be taken")
            self._stats_failed = True


def _has_unseen_tokens(request: Request) -> bool:
    """Return whether a token of the request is in an earlier step than the one being launched."""
    return not request.is_finished and request.num_output_placeholders > 1


def _allowed_tokens(scheduler: Scheduler, request: Request, num_drafts: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the allowed tokens of one row's draws; all, if its result will be dropped anyway. A grammar that fails
    ends its request."""
    drafts = request.proposed[:num_drafts]
    bits = np.full((1 + len(drafts), -(-vocab_size // 32)), -1, np.int32)
    if request.grammar is None or request.is_finished or request.is_redrawn:
        return bits[:1]
    try:
        return bits[: fill_along(request.grammar, drafts, bits)]
    except Exception as error:
        bits[:] = -1
        scheduler.fail(request, as_localllm_error(error, request))
        return bits[:1]


def _may_forbid(scheduler: Scheduler, request: Request) -> bool:
    """Return whether the grammar may forbid a token in this step. The first of the newest placeholders is what the
    step being launched draws; hence minus one. The others are its drafts, and the draws of earlier steps."""
    if request.grammar is None or request.is_finished:
        return False
    try:
        return request.grammar.may_forbid(request.num_output_placeholders - 1)
    except Exception as error:
        scheduler.fail(request, as_localllm_error(error, request))
        return False


def _refusal(why: EngineError) -> EngineError:
    """Return the error of a request that comes after the end. Lost ranks come back: the client may send it again."""
    if isinstance(why, RanksLost):
        return RanksLost(why.what, why.why, why.hint)
    return EngineStopped(f"The engine has ended: {why.what}", why.why, why.hint)


def _crashed(why: str) -> EngineCrashed:
    return EngineCrashed("The engine crashed.", why, "Send the request again. The log has the details for a report.")


def _run_errand(errand: _Errand) -> None:
    if errand.answer.set_running_or_notify_cancel():
        try:
            errand.answer.set_result(errand.work())
        except Exception as error:
            errand.answer.set_exception(error)
