"""The engine's heartbeat: receive, schedule, launch, settle.

`submit` and `cancel` may be called from any thread; everything else runs on the engine's thread (`start`), or in the
caller's (`step`, as the offline API does). With depth two, step t+1 is scheduled and launched before step t is read.
Results leave through one callback per step, while the device works on the next one: nobody wakes up to take the
interpreter from the thread that has a step to launch.
Does not know: asyncio, text, torch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from localllm.engine.adapter import Adapter
from localllm.engine.outputs import EngineOutput
from localllm.engine.recorder import now_s
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.stats import EngineStats
from localllm.engine.step import PendingStep, Runner, StepPlan, TokenMasks
from localllm.errors import DeviceLost, EngineStopped, LocalLLMError, StepFailed

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 0.1
SWITCH_INTERVAL_S = 1e-4
"""How long another thread may keep the interpreter while this one wants it: a step asks for it hundreds of times, and
with Python's default of 5 ms one busy neighbour would make a 5 ms step take fifty."""

Deliver = Callable[[list[EngineOutput]], None]
Drafter = Callable[[Request], tuple[int, ...]]
"""Guesses the tokens that follow a request's known ones."""


class EngineLoop:
    """`depth`: steps in flight. `deliver` receives each step's outputs, on the thread that ran the step."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int = 1,
        deliver: Deliver | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.deliver: Deliver = deliver or (lambda outputs: None)
        self.on_lost: Callable[[], None] = lambda: None
        self._drafter = drafter
        self._pending: deque[PendingStep] = deque()
        self._outputs: list[EngineOutput] = []  # of this step, not yet delivered
        self._inbox: deque[Request | str] = deque()  # a request to add, or an id to abort
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.lost: DeviceLost | None = None  # why the thread ended by itself
        self._stats = scheduler.stats(depth, runner.stats())

    # From any thread --------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue requests in order, or none. Raises `EngineStopped`, `ModelNotFound` where an adapter has gone."""
        with self._wake:
            if self._stopping:
                raise EngineStopped("The engine is shutting down.", hint="Retry once the server is back.")
            _begin([request.adapter for request in requests if request.adapter is not None])
            self._inbox.extend(requests)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request before the next step. Unknown ids are ignored: it may have ended by itself."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """The latest snapshot: at most 100 ms old while the engine works, exact when it rests."""
        return self._stats.as_of(now_s())

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # The thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End every request with an `EngineStopped` error, then the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            while self._may_rest() and self.runner.use_idle_time():
                pass
            with self._wake:
                while self._may_rest():
                    self._wake.wait()
                if self._stopping:
                    break
            self.step()
            if self.lost is not None:
                break
        self._end_everything()
        if self.lost is not None:
            self.on_lost()

    def _may_rest(self) -> bool:
        return not (self._stopping or self._inbox or self.scheduler.has_work)

    def _end_everything(self) -> None:
        self._stopping = True
        error = self.lost or EngineStopped("The engine has stopped.", hint="Start it again with: localllm up")
        self._receive()
        self._pending.clear()
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id, "error")
        self._outputs += [output._replace(error=error) for output in self.scheduler.take_outputs()]
        self._refresh_stats(0.0)
        self._hand_over()

    # One step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Launch the next step if there is one, then settle the oldest if enough are in flight."""
        self._receive()
        try:
            depth = self._depth_now()
            launched = self._launch()
            if self.depth > 1:
                self._tell()  # of the step before
            while self._pending and (len(self._pending) >= depth or not launched):
                self._settle()
        except Exception as error:
            self._recover(error)
        self._outputs += self.scheduler.take_outputs()
        if self.depth == 1 or not self.scheduler.has_work:  # at depth one a launch may last as long as the step
            self._tell()

    def _receive(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self.scheduler.abort(item)
                continue
            try:
                item.needs_host_tokens = self.runner.needs_host_tokens(item.params)
                self.scheduler.add(item)
            except LocalLLMError as error:
                if item.adapter is not None:
                    item.adapter.end()
                self._outputs.append(EngineOutput(item.request_id, finish_reason="error", error=error))

    def _depth_now(self) -> int:
        """One, when a running request cannot go on before the host has seen its last token."""
        if self.depth == 1 or not (self._drafter or any(r.needs_host_tokens for r in self.scheduler.running)):
            return self.depth
        while self._pending:
            self._settle()
        self.scheduler.recorder.degraded_steps += 1
        return 1

    def _launch(self) -> bool:
        if self._drafter is not None:
            self._draft(self._drafter)
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.runner.forward(plan)
        masks = self._masks(plan, self.scheduler.launched[-1].requests)
        self._pending.append(self.runner.sample(plan, masks))
        return True

    def _masks(self, plan: StepPlan, requests: Sequence[Request]) -> TokenMasks | None:
        """What may come in rows under a grammar that has a say now, made while the forward runs.

        Only the tokens before can tell, so the steps before this one are settled first: the next forward waits for no
        one, the host waits for one step instead of two.
        """
        rows = [i for i, request in enumerate(requests) if plan.rows[i].samples and _may_forbid(request)]
        if not rows:
            return None
        while self._pending:
            self._settle()
        bits = np.full((len(rows), -(-self.runner.vocab_size // 32)), -1, np.int32)
        for row, allowed in zip(rows, bits, strict=True):
            request = requests[row]
            if request.grammar is None or request.is_finished:  # what comes for it is dropped
                continue
            try:
                request.grammar.fill(allowed)
            except LocalLLMError as error:
                self.scheduler.fail(request, error)
        return TokenMasks(tuple(rows), bits)

    def _draft(self, drafter: Drafter) -> None:
        for request in self.scheduler.running:
            if request.num_wanted_tokens == 1 and request.grammar is None:
                self.scheduler.set_drafts(request, drafter(request))

    def _settle(self) -> None:
        self._outputs += self.scheduler.update(self._pending.popleft().result())

    def _recover(self, error: Exception) -> None:
        """A step raised: its requests hear about it, the engine goes on with the same model."""
        log.exception("step failed running=%d launched=%d", len(self.scheduler.running), len(self.scheduler.launched))
        if not isinstance(error, LocalLLMError):
            error = StepFailed(
                "The step that carried this request failed.",
                f"{type(error).__name__}: {error}",
                "The engine has restarted; send the request again. The log has the details.",
            )
        self._pending.clear()
        self.scheduler.fail_step(error)
        if isinstance(error, DeviceLost):
            self.lost = error  # nothing can be called on the device again, not even to tidy up
        else:
            self.runner.reset()

    def _tell(self) -> None:
        self._refresh_stats(SNAPSHOT_INTERVAL_S)  # before anyone can hear that a request has ended
        self._hand_over()

    def _hand_over(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self.deliver(outputs)

    def _refresh_stats(self, interval_s: float) -> None:
        if now_s() - self._stats.taken_s >= interval_s or not self.scheduler.has_work:
            self._stats = self.scheduler.stats(self.depth, self.runner.stats())


def _may_forbid(request: Request) -> bool:
    """Of its outputs that are launched the last one is what the step makes that is being launched."""
    return request.grammar is not None and request.grammar.may_forbid(request.num_output_placeholders - 1)


def _begin(adapters: list[Adapter]) -> None:
    """Count a request for each, or none for any."""
    begun: list[Adapter] = []
    try:
        for adapter in adapters:
            adapter.begin()
            begun.append(adapter)
    except LocalLLMError:
        for adapter in begun:
            adapter.end()
        raise
