"""Counts the engine's events and freezes the counts into an `EngineStats` on request.

The scheduler and the loop call the `on_*` methods on the engine thread; `snapshot` runs there too.
Does not know: who reads the snapshot.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import islice
from statistics import median

from localllm.engine.memory.ledger import Ledger
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.outputs import HANDED_OVER
from localllm.engine.request import Request
from localllm.engine.stats import (
    NO_SPECULATION,
    NO_TIERS,
    EngineStats,
    Histogram,
    RequestTimeline,
    SpeculationStats,
    StepComposition,
    TierStats,
)
from localllm.engine.step import Row, RunnerStats, StepTimings

_EPOCH = time.time() - time.perf_counter()
RATE_WINDOW_S = 5.0
RECENT_REQUESTS = 50
RECENT_STEPS = 60
LONE_STEPS = 200  # with one token of one answer, whose median is the measured speed of an answer
MEASURED_TOKENS = 16
"""Prompt tokens of a step whose time tells what one costs: fewer take almost as long."""
SHOWN_WAITING = 50
"""Waiting requests with a timeline in a snapshot, which is made ten times a second however long the queue is."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
            20.0, 40.0, 80.0, 160.0, 640.0)  # fmt: skip
_LENGTHS = tuple(float(2**k) for k in range(18))


def now_s() -> float:
    """Return the seconds since 1970 by a clock that never jumps."""
    return _EPOCH + time.perf_counter()


def _median(values: Collection[float]) -> float:
    """Return the median; 0 of nothing."""
    return median(values) if values else 0.0


class _Counts:
    """A histogram under construction."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def freeze(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.total)


class StatsRecorder:
    """Totals since the start, histograms, and the rates of the last few seconds.

    Tokens of every request count. Of a beam search, `on_search` counts one request, and its parts are not counted.
    """

    def __init__(self) -> None:
        self.started_s = now_s()
        self.num_steps = self.num_preemptions = self.num_failed_steps = self.degraded_steps = 0
        self.corrupted_requests = self.scheduled_requests = self.recomputed_tokens = 0
        self.prompt_tokens = self.prompt_tokens_cached = self.generation_tokens = 0
        self.prefix_cache_queries = self.prefix_cache_hits = self.prefix_cache_lacks_state = 0
        self.finished: Counter[str] = Counter()
        self.steps: deque[StepComposition] = deque(maxlen=RECENT_STEPS)
        self._launched: deque[StepComposition] = deque()
        self.recent: deque[RequestTimeline] = deque(maxlen=RECENT_REQUESTS)
        self._window: deque[tuple[float, int, int]] = deque()  # (time, prefill tokens, decode tokens) per step
        self._token_s: deque[float] = deque(maxlen=5)  # seconds of a prompt token, of the last steps
        self._row_s: deque[float] = deque(maxlen=5)  # seconds to encode a row of a picture
        self._lone_s: deque[float] = deque(maxlen=LONE_STEPS)  # seconds of steps with one token of one answer
        self._lone_at_s = 0.0  # when the last of them settled; 0: another step came after it
        self._ttft, self._tpot, self._inter_token = _Counts(_SECONDS), _Counts(_SECONDS), _Counts(_SECONDS)
        self._e2e, self._queue = _Counts(_SECONDS), _Counts(_SECONDS)
        self._prefill, self._decode, self._inference = _Counts(_SECONDS), _Counts(_SECONDS), _Counts(_SECONDS)
        self._prompt_len, self._generation_len, self._iteration = (
            _Counts(_LENGTHS),
            _Counts(_LENGTHS),
            _Counts(_LENGTHS),
        )

    def on_admission(self, request: Request, num_kv_tokens: int) -> None:
        """Record an admission. Prefix statistics count once per request, at its first admission:
        a readmission finds the request's own blocks. num_kv_tokens: prompt tokens whose KV was known."""
        if request.scheduled_s is None:
            request.scheduled_s = now_s()
            if not request.options.part_of:
                self._queue.observe(request.scheduled_s - request.arrived_s)
            self.prefix_cache_queries += request.prompt_len
            self.prefix_cache_hits += request.num_cached_tokens
            self.prefix_cache_lacks_state += num_kv_tokens - request.num_cached_tokens
            self.prompt_tokens_cached += request.num_cached_tokens

    def on_plan(
        self,
        step_id: int,
        rows: Iterable[tuple[Request, Row]],
        num_tokens: int,
        budget_tokens: int,
        schedule_s: float,
    ) -> None:
        """Record a launched step by its rows, whose requests have been advanced."""
        decode_tokens = decode_requests = num_rows = prompt_tokens = recomputed_tokens = 0
        for request, row in rows:
            num_rows += 1
            if row.num_scheduled_tokens == 1 + row.num_drafts and row.samples:
                decode_requests += 1
                decode_tokens += row.num_scheduled_tokens
            if (first := max(row.num_computed_tokens, request.num_lost_tokens)) < request.prompt_len:
                prompt_tokens += max(0, min(request.num_computed_tokens, request.prompt_len) - first)
            if row.num_computed_tokens < request.num_lost_tokens:
                recomputed_tokens += min(request.num_computed_tokens, request.num_lost_tokens) - row.num_computed_tokens
        self.on_step(
            StepComposition(
                step_id=step_id,
                prefill_tokens=num_tokens - decode_tokens,
                decode_tokens=decode_tokens,
                prefill_requests=num_rows - decode_requests,
                decode_requests=decode_requests,
                budget_tokens=budget_tokens,
                schedule_s=schedule_s,
            ),
            prompt_tokens,
            recomputed_tokens,
        )

    def on_step(self, composition: StepComposition, prompt_tokens: int, recomputed_tokens: int = 0) -> None:
        """Record a launched step. `prompt_tokens`: prompt tokens computed for the first time."""
        self.num_steps += 1
        self._launched.append(composition)
        self.scheduled_requests += composition.prefill_requests + composition.decode_requests
        self.prompt_tokens += prompt_tokens
        self.recomputed_tokens += recomputed_tokens
        self._iteration.observe(composition.prefill_tokens + composition.decode_tokens)
        self._note_rate(composition.prefill_tokens, 0)

    def on_settled(
        self, step_id: int, generated: int, timings: StepTimings, update_s: float, encoded_rows: int = 0
    ) -> None:
        """Record a settled step. Steps launched before it that were never settled have failed.

        encoded_rows: of the pictures that it encoded.
        """
        self.generation_tokens += generated
        self._note_rate(0, generated)
        while self._launched and self._launched[0].step_id < step_id:
            self._launched.popleft()
        if self._launched and self._launched[0].step_id == step_id:  # a step without rows was not recorded
            held = self._launched.popleft()
            is_lone, at_s = held.prefill_tokens == 0 and held.decode_tokens == held.decode_requests == 1, now_s()
            if is_lone and self._lone_at_s:
                self._lone_s.append(at_s - self._lone_at_s)
            self._lone_at_s = at_s if is_lone else 0.0
            forward_s = timings.forward_s
            self.steps.append(replace(held, forward_s=forward_s, sample_s=timings.sample_s, update_s=update_s))
            if encoded_rows:
                without = held.prefill_tokens * _median(self._token_s)
                self._row_s.append(max(forward_s - without, forward_s / 4) / encoded_rows)
            elif held.prefill_tokens >= MEASURED_TOKENS and not held.decode_requests:
                self._token_s.append(forward_s / held.prefill_tokens)

    def on_tokens(self, request: Request, count: int, at_s: float) -> None:
        """Record `count` tokens of one request that became known at `at_s`."""
        if request.last_token_s is None:
            request.first_token_s = at_s
            if not request.options.part_of:
                self._ttft.observe(at_s - request.arrived_s)
        else:
            gap = (at_s - request.last_token_s) / count
            for _ in range(count):
                self._inter_token.observe(gap)
        request.last_token_s = at_s

    def on_search(self, search: RequestTimeline) -> None:
        """Record a beam search that has ended as one request."""
        if search.scheduled_s is not None:
            self._queue.observe(search.scheduled_s - search.arrived_s)
        if search.ttft_s is not None:
            self._ttft.observe(search.ttft_s)
        self._count_ended(search)

    def on_finish(self, request: Request, timeline: RequestTimeline) -> None:
        if timeline.finish_reason == HANDED_OVER:  # the engine that continues it counts the whole request
            self.finished[HANDED_OVER] += 1
        elif not request.options.part_of:
            self._count_ended(timeline)

    def _count_ended(self, timeline: RequestTimeline) -> None:
        self.finished[timeline.finish_reason or "abort"] += 1
        self.recent.appendleft(timeline)
        self._prompt_len.observe(timeline.num_prompt_tokens)
        self._generation_len.observe(timeline.num_output_tokens)
        end_s = timeline.finished_s or now_s()
        self._e2e.observe(end_s - timeline.arrived_s)
        if timeline.first_token_s is not None and timeline.scheduled_s is not None:
            self._prefill.observe(timeline.first_token_s - timeline.scheduled_s)
            self._decode.observe(end_s - timeline.first_token_s)
            self._inference.observe(end_s - timeline.scheduled_s)
        if (tpot_s := timeline.tpot_s) is not None:
            self._tpot.observe(tpot_s)

    def snapshot(
        self,
        ledger: Ledger,
        running: Collection[Request],
        waiting: Iterable[Request],
        *,
        num_waiting: int = 0,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        async_depth: int,
        runner: RunnerStats,
        states: StatePool | None = None,
        speculation: SpeculationStats = NO_SPECULATION,
        tiers: TierStats = NO_TIERS,
    ) -> EngineStats:
        self._drop_old_rates(taken_s := now_s())
        span_s = max(taken_s - self._window[0][0], 0.5) if self._window else 1.0
        pool = ledger.main_pool
        return EngineStats(
            taken_s=taken_s,
            uptime_s=taken_s - self.started_s,
            num_running=len(running),
            num_waiting=num_waiting,
            block_size=block_size,
            total_blocks=pool.capacity,
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free - pool.num_cached,
            wasted_token_slots=sum(r.num_blocks * block_size - r.num_computed_tokens for r in running),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            steps=tuple(self.steps),
            num_steps=self.num_steps,
            scheduled_requests=self.scheduled_requests,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generation_tokens=self.generation_tokens,
            prefill_tokens_per_s=sum(entry[1] for entry in self._window) / span_s,
            decode_tokens_per_s=sum(entry[2] for entry in self._window) / span_s,
            lone_tokens_per_s=1 / _median(self._lone_s) if len(self._lone_s) == LONE_STEPS else 0.0,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            prefix_cache_lacks_state=self.prefix_cache_lacks_state,
            total_places=0 if states is None else states.capacity,
            used_places=0 if states is None else states.num_held,
            checkpoint_places=0 if states is None else states.num_checkpoints,
            num_preemptions=self.num_preemptions,
            recomputed_tokens=self.recomputed_tokens,
            num_failed_steps=self.num_failed_steps,
            degraded_steps=self.degraded_steps,
            async_depth=async_depth,
            corrupted_requests=self.corrupted_requests,
            runner=self._with_times(runner),
            finished=dict(self.finished),
            ttft=self._ttft.freeze(),
            tpot=self._tpot.freeze(),
            inter_token=self._inter_token.freeze(),
            e2e=self._e2e.freeze(),
            queue=self._queue.freeze(),
            prefill=self._prefill.freeze(),
            decode=self._decode.freeze(),
            inference=self._inference.freeze(),
            prompt_len=self._prompt_len.freeze(),
            generation_len=self._generation_len.freeze(),
            iteration_tokens=self._iteration.freeze(),
            requests=tuple(r.timeline() for r in (*running, *islice(waiting, SHOWN_WAITING))),
            recent=tuple(self.recent),
            speculation=speculation,
            tiers=tiers,
            kv_groups=ledger.stats(),
        )

    def _with_times(self, runner: RunnerStats) -> RunnerStats:
        """Return the runner's counts with the measured seconds of prompt tokens and of rows of pictures."""
        row_s = _median(self._row_s) or runner.picture_row_s
        return runner._replace(picture_row_s=row_s, prompt_token_s=_median(self._token_s))

    def _note_rate(self, prefill: int, decode: int) -> None:
        at_s = now_s()
        self._window.append((at_s, prefill, decode))
        self._drop_old_rates(at_s)

    def _drop_old_rates(self, at_s: float) -> None:
        while self._window and self._window[0][0] < at_s - RATE_WINDOW_S:
            self._window.popleft()
