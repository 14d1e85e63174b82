"""The scheduler: decides which requests run in the next step, with how many tokens and which blocks.

One token budget per step covers everything. The work of a request is the difference of its counters (request.py), so
there is no prefill mode and no decode mode. Decodes are scheduled first, one token each, so that a long prompt never
stalls running streams; prompts share the rest of the budget (prefill_shares.py). A waiting request is admitted when its
*whole* prompt fits in addition to the expected needs of the running ones (output_reserve.py). If a running request
cannot grow, the youngest request is preempted: it frees its blocks and waits again.
Does not know: torch, text, threads, the clock (recorder.py does).
Ideas: iteration-level scheduling (Orca, Yu et al. 2022), chunked prefill (Sarathi-Serve, Agrawal et al. 2024).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.engine.block_hash import BlockHasher
from localllm.engine.block_pool import BlockPool
from localllm.engine.output_reserve import OutputReserve
from localllm.engine.outputs import EngineOutput
from localllm.engine.prefill_shares import prefill_shares
from localllm.engine.recorder import StatsRecorder, now_s
from localllm.engine.request import Request, State
from localllm.engine.stats import EngineStats, StepComposition
from localllm.engine.step import NewSlot, Row, RowResult, RunnerStats, StepPlan, StepResult
from localllm.errors import KVCacheExhausted, LocalLLMError, QueueFull, RequestError, StepFailed

log = logging.getLogger(__name__)

NEVER = 2**31
"""Larger than any request's number of blocks.
As `num_registered_blocks` it keeps further blocks from being registered."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler, as decided by the memory plan (models/fit/)."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    block_size: int = 16
    long_prefill_token_threshold: int = 0  # prefill tokens per step while any request decodes; 0: no cap
    policy: str = "fcfs"  # fcfs, priority
    max_num_queued_reqs: int = 1024
    enable_prefix_caching: bool = True
    watermark: float = 0.01  # share of the pool kept free at admission while something runs
    output_reserve: float = 0.65  # share of its expected output that a request needs room for at admission


class _Launched(NamedTuple):
    plan: StepPlan
    requests: tuple[Request, ...]  # in the order of plan.rows; objects, since an id may be reused


LOOKAHEAD = 8
"""Waiting requests examined beyond those that fill the step, since one of them may have a short prompt."""


class _Prefill(NamedTuple):
    """A request, running or about to be admitted, with more than one prompt token left to compute."""

    request: Request
    wanted: int
    enters: bool


@dataclass(slots=True)
class _Draft:
    """The step under construction."""

    budget: int
    rows: dict[str, tuple[Request, Row]] = field(default_factory=dict)
    new_slots: list[NewSlot] = field(default_factory=list)
    prefill_budget: int = 0
    preempted: bool = False


class WaitingQueue:
    """Waiting requests in order of (priority, arrival).
    A preempted request comes before later arrivals of its priority."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []  # sorted; sequence numbers are unique

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in self._entries)

    def push(self, request: Request) -> None:
        insort(self._entries, (request.priority, request.sequence, request))

    def remove(self, request: Request) -> None:
        place = bisect_left(self._entries, (request.priority, request.sequence))
        assert self._entries[place][2] is request, f"{request.request_id} is not waiting"
        del self._entries[place]


class Scheduler:
    """Plans and settles steps. Call `add` and `abort` between steps;
    `schedule` plans a step, `update` settles the oldest open one."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, hasher: BlockHasher, recorder: StatsRecorder | None = None
    ) -> None:
        self.config, self.pool, self.hasher = config, pool, hasher
        self.recorder = recorder or StatsRecorder()
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.launched: deque[_Launched] = deque()  # plans not settled yet
        self._num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._num_slots))[::-1]
        self._freed_slots: list[int] = []  # reported to the runner with the next plan
        self._outputs: list[EngineOutput] = []  # outputs of requests that ended outside `update`
        self._watermark_blocks = max(1, int(config.watermark * pool.capacity))
        self._reserve = OutputReserve(config.output_reserve)
        self._arrivals = 0
        self._step_id = 0

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `QueueFull` if `max_num_queued_reqs` requests are waiting."""
        if len(self.waiting) >= self.config.max_num_queued_reqs:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting already.",
                "The queue is full.",
                "Retry in a moment, or start with a larger --max-num-queued-reqs.",
            )
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self._arrivals += 1
        request.sequence = self._arrivals
        if self.config.policy == "fcfs":
            request.priority = 0
        request.hash_root = self.hasher.root(request.cache_extras)
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a request in any state. Return False if the id is unknown or the request has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        self._outputs.append(
            EngineOutput(request_id, finish_reason=reason, num_cached_tokens=request.num_cached_tokens)
        )
        return True

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs of requests that ended outside `update`: aborted ones, and ones that can never run."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.launched)

    # A step is planned ----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if there is nothing to launch now."""
        started_s = now_s()
        draft = _Draft(budget=self.config.max_num_batched_tokens)
        self._reserve.on_step()
        self._free_a_slot_for_an_urgent_request(draft)
        self._schedule_decodes(draft)
        draft.prefill_budget = self._prefill_budget(draft)
        self._schedule_prefills(draft)
        if not draft.rows:
            return None
        plan = self._commit(draft)
        self._record(plan, draft, now_s() - started_s)
        return plan

    def _free_a_slot_for_an_urgent_request(self, draft: _Draft) -> None:
        """Preempt the least urgent running request for a more urgent waiting one, if all slots are taken."""
        head = next(iter(self.waiting), None)
        if self.config.policy == "fcfs" or head is None or self._free_slots or head.num_in_flight_tokens:
            return
        victim = self._victim()
        if head.priority >= victim.priority:
            return
        hits = self._prefix_hits(head)
        need = self._num_blocks(head.num_tokens) + self.pool.num_unreferenced(hits) - len(hits)
        if need <= self._num_spare_blocks(None) + len(victim.block_table) and not self._is_being_computed(head, hits):
            self._preempt(victim, draft)

    def _schedule_decodes(self, draft: _Draft) -> None:
        for request in tuple(self.running):
            if draft.budget <= 0:
                break
            wanted = self._wanted(request)
            if 0 < wanted <= 1 + len(request.draft_token_ids):
                self._schedule_one(request, min(wanted, draft.budget), draft)

    def _schedule_prefills(self, draft: _Draft) -> None:
        """Divide the budget that decodes left among running prompts and prompts to be admitted."""
        if draft.prefill_budget <= 0:
            return
        prefills = [
            _Prefill(request, wanted, enters=False)
            for request in self.running
            if request.request_id not in draft.rows and (wanted := self._wanted(request)) > 0
        ]
        if self._free_slots and not draft.preempted:
            prefills += self._admissible(prefills, draft)
        prefills.sort(key=lambda each: (each.request.priority, each.request.sequence))
        shares = prefill_shares(
            [each.wanted for each in prefills], [each.request.priority for each in prefills], draft.prefill_budget
        )
        for each, share in zip(prefills, shares, strict=True):
            if share and not each.enters and each.request.state is State.RUNNING:
                self._schedule_one(each.request, share, draft)
        if draft.preempted:
            return
        for each, share in zip(prefills, shares, strict=True):
            if share and not each.enters:  # from here on no row leaves the step: its blocks may be shared
                self._register(each.request, each.request.num_computed_tokens + share)
        spare = 0
        for each, share in zip(prefills, shares, strict=True):
            if share and each.enters:
                spare += share - self._enter(each.request, share + spare, draft)

    def _prefill_budget(self, draft: _Draft) -> int:
        """Return the step's prefill budget: limited while requests decode, so that their next token is not delayed."""
        cap = self.config.long_prefill_token_threshold
        return min(draft.budget, cap) if draft.rows and cap else draft.budget

    def _wanted(self, request: Request) -> int:
        """Return the tokens to run for a running request; 0 if the launched steps already reach its length limit."""
        if request.state is not State.RUNNING:  # preempted while this step was planned
            return 0
        room = request.max_output_tokens - request.num_output_tokens - request.num_output_placeholders
        if room <= 0:
            return 0
        if len(request.draft_token_ids) >= room:
            request.draft_token_ids = request.draft_token_ids[: room - 1]
        return request.num_wanted_tokens

    def _schedule_one(self, request: Request, count: int, draft: _Draft) -> bool:
        """Find blocks for `count` more tokens of a running request and add the request to the step."""
        blocks = self._grow(request, count, draft)
        if blocks is None:
            return False
        end = request.num_computed_tokens + count
        guesses = max(0, end - request.num_tokens - request.num_output_placeholders)
        drafts = request.draft_token_ids[:guesses]
        samples = end >= request.num_tokens + request.num_output_placeholders
        row = Row(request.slot, request.request_id, request.num_computed_tokens, count, blocks, samples, drafts)
        draft.rows[request.request_id] = (request, row)
        draft.budget -= count
        return True

    def _grow(self, request: Request, count: int, draft: _Draft) -> tuple[int, ...] | None:
        """Return new blocks for the request's table, preempting others if necessary.
        None: it was itself preempted, or ended."""
        need = self._num_blocks(request.num_computed_tokens + count) - len(request.block_table)
        if need <= 0:
            return ()
        while (blocks := self.pool.allocate(need)) is None:
            victim = self._victim()
            if victim is request and len(self.running) == 1:
                self.fail(request, self._exhausted(request))
                return None
            self._preempt(victim, draft)
            if victim is request:
                return None
        request.block_table += blocks
        return tuple(blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _victim(self) -> Request:
        """Return the request to preempt: the youngest of the least urgent ones."""
        return max(self.running, key=lambda request: (request.priority, request.sequence))

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Preempt a request, to be recomputed later.
        Its registered blocks can be found until they are reused, so resuming is often cheap.

        Outputs already launched are still delivered when their step is settled; the request is not readmitted before
        that.
        """
        entry = draft.rows.pop(request.request_id, None)
        if entry is not None:
            draft.budget += entry[1].num_scheduled_tokens
        draft.preempted = True
        self._give_up(request)
        request.state = State.PREEMPTED
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self.recorder.num_preemptions += 1
        self._reserve.on_preemption()
        self.waiting.push(request)

    def _give_up(self, request: Request) -> None:
        """Remove a request from the running ones and free its blocks and its slot."""
        self.running.remove(request)
        self.pool.release(request.block_table)
        request.block_table = []
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    # Waiting requests enter -----------------------------------------------------------------------------------

    def _admissible(self, running: Sequence[_Prefill], draft: _Draft) -> list[_Prefill]:
        """Return the waiting requests that may be admitted in this step, first come, first served.

        A request whose blocks do not fit blocks those behind it. A request is skipped without blocking others if it
        waits for outputs of its own that are still in flight, or for a running prompt that is computing their common
        prefix.
        """
        found: list[_Prefill] = []
        filled, num_beyond = sum(each.wanted for each in running), 0
        entering = 0  # blocks of the found requests, including the reserve for their outputs
        spare: dict[int, int] = {}  # blocks by priority: nothing here changes them
        for request in tuple(self.waiting):
            num_beyond += filled >= draft.prefill_budget
            if len(found) == len(self._free_slots) or num_beyond > LOOKAHEAD:
                break
            if request.num_in_flight_tokens:
                continue
            hits = self._prefix_hits(request)
            if self._is_being_computed(request, hits):
                continue
            taken = self.pool.num_unreferenced(hits) - len(hits)
            least, most = (taken + self._num_blocks(n) for n in (request.num_tokens, self._reserve.num_tokens(request)))
            is_alone = not (found or self.running)
            if least > self.pool.num_free - entering and is_alone and not self.launched:
                self.fail(request, self._exhausted(request))
                continue
            if request.priority not in spare:
                spare[request.priority] = self._num_spare_blocks(request.priority)
            if entering + (least if is_alone else most) > spare[request.priority]:
                if found or not self._enters_on_trial(request, least):
                    break
                most = self.pool.capacity  # no other request may be admitted with it
            wanted = request.num_tokens - len(hits) * self.config.block_size
            found.append(_Prefill(request, wanted, enters=True))
            entering += most
            filled += wanted
        return found

    def _enters_on_trial(self, request: Request, num_blocks: int) -> bool:
        """Return whether a request without room for its expected output may be admitted nevertheless."""
        if not self._reserve.allows_trial or num_blocks > self._num_spare_blocks(None):
            return False
        self._reserve.on_trial(request, len(self.running))
        return True

    def _num_spare_blocks(self, priority: int | None) -> int:
        """Return the free blocks that running requests will not need for their prompts or, as expected, their outputs.

        priority: outputs of less urgent requests do not count, since those requests would be preempted. None: no
        outputs count.
        """
        if not self.running:
            return self.pool.num_free
        promised = self._watermark_blocks
        for request in self.running:
            counts = priority is not None and request.priority <= priority
            end = self._reserve.num_tokens(request) if counts else request.num_tokens
            promised += max(0, self._num_blocks(end) - len(request.block_table))
        return self.pool.num_free - promised

    def _is_being_computed(self, request: Request, hits: Sequence[int]) -> bool:
        """Return whether a running request will fill the first block that this request misses in the prefix cache."""
        place = len(hits)
        return place < len(request.block_hashes) and any(
            other.num_registered_blocks <= place < len(other.block_hashes)
            and other.block_hashes[place] == request.block_hashes[place]
            for other in self.running
        )

    def _prefix_hits(self, request: Request) -> list[int]:
        """Return the cached blocks to start from. At least one token is computed, since logits are not cached."""
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        self.hasher.extend(request.block_hashes, request.hash_root, request.token_ids)
        return self.pool.lookup(request.block_hashes[: (request.num_tokens - 1) // self.config.block_size])

    def _enter(self, request: Request, limit: int, draft: _Draft) -> int:
        """Admit a waiting request with at most `limit` tokens, and return how many it took. Return 0 if a request
        admitted just before is computing their common prefix."""
        hits = self._prefix_hits(request)  # requests admitted in this step may have added blocks
        if self._is_being_computed(request, hits):
            return 0
        self.waiting.remove(request)
        self.pool.acquire(hits)
        cached = len(hits) * self.config.block_size
        request.block_table = list(hits)
        request.num_computed_tokens = cached
        if request.scheduled_s is None:  # not at a readmission, which also finds blocks of the request's own outputs
            request.num_cached_tokens = cached
        request.num_registered_blocks = len(hits)
        request.slot = self._free_slots.pop()
        request.state = State.RUNNING
        self.running.append(request)
        self.recorder.on_admission(request)
        draft.new_slots.append(
            NewSlot(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=request.token_ids[:],
                prompt_len=request.prompt_len,
                params=request.params,
                block_ids=tuple(hits),
                num_computed_tokens=cached,
                eos_token_ids=request.eos_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                adapter=-1 if request.adapter is None else request.adapter.slot,
                prompt_embeds=request.prompt_embeds,
            )
        )
        count = min(request.num_wanted_tokens, limit)
        entered = self._schedule_one(request, count, draft)
        assert entered, "admission promised these blocks"
        self._register(request, cached + count)  # the next admitted request may share these blocks
        return count

    # The step is sealed ---------------------------------------------------------------------------------------

    def _commit(self, draft: _Draft) -> StepPlan:
        """Advance the counters as if the step had run, and register the blocks that it fills."""
        requests = []
        for request, row in draft.rows.values():
            requests.append(request)
            request.num_computed_tokens += row.num_scheduled_tokens
            request.num_in_flight_tokens += row.num_scheduled_tokens
            if row.samples:
                request.num_output_placeholders += 1 + len(row.draft_token_ids)
            request.draft_token_ids = ()
            self._register(request, request.num_computed_tokens)
        self._step_id += 1
        freed, self._freed_slots = tuple(self._freed_slots), []
        rows = tuple([row for _, row in draft.rows.values()])
        plan = StepPlan(self._step_id, rows, tuple(draft.new_slots), freed)
        self.launched.append(_Launched(plan, tuple(requests)))
        return plan

    def _register(self, request: Request, end: int) -> None:
        """Register the blocks before position `end` that are full of accepted tokens: never drafts, never placeholders.

        In each layer, a step writes the K and V of all its rows before any row attends. A block can therefore be shared
        already in the step that fills it.
        """
        full = min(end, len(request.token_ids)) // self.config.block_size
        if full <= request.num_registered_blocks or not self.config.enable_prefix_caching:
            return
        self.hasher.extend(request.block_hashes, request.hash_root, request.token_ids)
        for index in range(request.num_registered_blocks, full):
            self.pool.register(request.block_table[index], request.block_hashes[index])
        request.num_registered_blocks = full

    def _record(self, plan: StepPlan, draft: _Draft, schedule_s: float) -> None:
        decode_tokens = decode_requests = prompt_tokens = recomputed_tokens = 0
        for request, row in draft.rows.values():
            if row.num_scheduled_tokens == 1 + len(row.draft_token_ids) and row.samples:
                decode_requests += 1
                decode_tokens += row.num_scheduled_tokens
            if not request.num_preemptions and row.num_computed_tokens < request.prompt_len:
                prompt_tokens += min(request.num_computed_tokens, request.prompt_len) - row.num_computed_tokens
            if row.num_computed_tokens < request.num_lost_tokens:
                recomputed_tokens += min(request.num_computed_tokens, request.num_lost_tokens) - row.num_computed_tokens
        self.recorder.on_step(
            StepComposition(
                step_id=plan.step_id,
                prefill_tokens=self.config.max_num_batched_tokens - draft.budget - decode_tokens,
                decode_tokens=decode_tokens,
                prefill_requests=len(plan.rows) - decode_requests,
                decode_requests=decode_requests,
                budget_tokens=self.config.max_num_batched_tokens,
                schedule_s=schedule_s,
            ),
            prompt_tokens,
            recomputed_tokens,
        )

    # A step is settled ----------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[EngineOutput]:
        """Settle the oldest launched step. Rows of requests that ended since are dropped.

        A row that cannot be settled ends its own request; the other rows are settled normally.
        """
        started_s = now_s()
        plan, requests = self.launched[0]
        assert result.step_id == plan.step_id, f"step {result.step_id} came back before step {plan.step_id}"
        assert len(result.rows) == len(requests), f"{len(result.rows)} results for {len(requests)} rows"
        for request, row in zip(requests, plan.rows, strict=True):
            request.num_in_flight_tokens -= row.num_scheduled_tokens
        outputs, generated = [], 0
        for request, row, row_result in zip(requests, plan.rows, result.rows, strict=True):
            if row_result.fault == "model":
                self._distrust_blocks()
            if request.state is State.FINISHED:
                continue
            try:
                output = self._settle(request, row, row_result, started_s)
            except Exception as error:
                output = self._end_with(request, as_told(error, request))
            if output is not None:
                outputs.append(output)
                generated += len(output.token_ids)
        self.launched.popleft()  # not sooner: until here a failure concerns all requests of this step
        timings = result.timings
        try:
            self.recorder.on_settled(plan.step_id, generated, timings.forward_s, timings.sample_s, now_s() - started_s)
        except Exception:
            log.exception("statistics of a step were not recorded step=%d", plan.step_id)
        return outputs

    def _settle(self, request: Request, row: Row, result: RowResult, at_s: float) -> EngineOutput | None:
        if result.error is not None:
            return self._end_with(request, self._error_of(result))
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(request, row, result)
        done = self._prompt_tokens_done(request, row) if request.reports_progress else None
        if not row.samples:
            return None if done is None else _progress(request, done)
        if request.state is State.RUNNING:  # otherwise it was preempted since, and its counters were reset
            request.num_output_placeholders -= 1 + len(row.draft_token_ids)
            request.num_computed_tokens -= 1 + len(row.draft_token_ids) - len(result.token_ids)
        if not result.token_ids:
            return self._end_with(request, StepFailed("The runner returned no token for this request."))
        first = request.first_token_s is None
        kept, finish_reason, stop_reason = self._accept(request, result.token_ids)
        self.recorder.on_tokens(request, kept, at_s)
        if finish_reason is not None:
            self._finish(request, finish_reason)
        return EngineOutput(
            request.request_id,
            result.token_ids[:kept],
            result.logprobs[:kept],
            tuple(request.prompt_logprobs) if first and request.params.prompt_logprobs is not None else None,
            finish_reason,
            stop_reason,
            request.num_cached_tokens,
            request.scheduled_s or 0.0,
            done,
        )

    def _prompt_tokens_done(self, request: Request, row: Row) -> int | None:
        """Return the computed prompt tokens;
        None after the first token, since a recomputation is not progress of the prompt."""
        done = min(row.num_computed_tokens + row.num_scheduled_tokens, request.prompt_len)
        return done if request.first_token_s is None else None

    def _accept(self, request: Request, token_ids: tuple[int, ...]) -> tuple[int, str | None, int | None]:
        """Append tokens until one of them ends the request. Return (tokens kept, finish reason, stop token)."""
        for kept, token_id in enumerate(token_ids, start=1):
            request.token_ids.append(token_id)
            output_len = len(request.token_ids) - request.prompt_len
            if token_id in request.stop_token_ids and output_len >= request.params.min_tokens:
                is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
                return kept, "stop", None if is_eos else token_id
            if request.grammar is not None:
                request.grammar.accept(token_id)
                if request.grammar.is_over:
                    return kept, "stop", None
            if output_len >= request.max_output_tokens:
                return kept, "length", None
        return len(token_ids), None, None

    def _keep_prompt_logprobs(self, request: Request, row: Row, result: RowResult) -> None:
        """Append new prompt logprobs. After a preemption the prompt runs again;
        known positions are not appended twice."""
        known = len(request.prompt_logprobs)  # positions 1 .. known are scored
        request.prompt_logprobs += result.prompt_logprobs[max(0, known - row.num_computed_tokens) :]

    def _error_of(self, result: RowResult) -> LocalLLMError:
        why = result.error or ""
        if result.fault == "model":
            self.recorder.corrupted_requests += 1
            return StepFailed("The model produced no usable logits for this request.", why)
        if result.fault == "request":
            return RequestError(
                "The answer cannot continue.", why, "Send a smaller request; the same one would fail again."
            )
        return StepFailed("This request could not be computed.", why, "The other requests were not affected.")

    def _distrust_blocks(self) -> None:
        """Drop all prefix-cache names after a row produced NaN. Its KV blocks, and any computed from them, may contain
        NaN for an unknown time, so no existing block, and none that a running request fills later, is shared."""
        self.pool.forget_all()
        for request in self.running:
            request.num_registered_blocks = NEVER

    def _end_with(self, request: Request, error: LocalLLMError) -> EngineOutput:
        self._finish(request, "error")
        return EngineOutput(request.request_id, finish_reason="error", error=error)

    # Requests end ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str) -> None:
        """End a request, whatever its state, and free its blocks and slot. No other function ends one."""
        was_running = request.state is State.RUNNING
        if was_running:
            self._register(request, request.num_computed_tokens)
            self._give_up(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished_s = now_s()
        if not was_running:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self._reserve.on_end(request)
        try:
            self.recorder.on_finish(request, request.timeline())
        except Exception:
            log.exception("statistics of a request were not recorded id=%s", request.request_id)

    def fail(self, request: Request, error: LocalLLMError) -> None:
        """End a request with an error, whatever its state."""
        self._outputs.append(self._end_with(request, error))

    def _exhausted(self, request: Request) -> KVCacheExhausted:
        capacity = self.pool.capacity * self.config.block_size
        return KVCacheExhausted(
            f"The KV cache is exhausted at {request.num_tokens} tokens.",
            f"This request runs alone, and the whole cache holds {capacity} tokens.",
            "Give the cache more memory with --kv-cache-memory-bytes or --gpu-memory-utilization.",
        )

    def fail_step(self, error: LocalLLMError, *, everyone: bool = False) -> int:
        """Recover after a step raised: end the launched requests, or all of them, and restart the others.

        No cached block is trusted afterwards, and the pool and slots are reset, since the step may have been half done.
        The runner forgets its slots too (`Runner.reset`). Returns how many requests have ended.
        """
        launched, running = {id(request) for entry in self.launched for request in entry.requests}, self.running
        self._begin_anew()
        ended = [request for request in self.requests.values() if everyone or id(request) in launched]
        for request in ended:
            self.fail(request, error)
        for request in running:
            if not request.is_finished:
                request.num_preemptions += 1
                self.recorder.num_preemptions += 1
        return len(ended)

    def _begin_anew(self) -> None:
        """Free all blocks and slots, drop launched steps, and queue every request in order of arrival."""
        self.launched.clear()
        self.pool.clear()
        self._free_slots = list(range(self._num_slots))[::-1]
        self._freed_slots.clear()
        self.running, self.waiting = [], WaitingQueue()
        for request in self.requests.values():
            request.start_over()
            self.waiting.push(request)

    # Looking in -----------------------------------------------------------------------------------------------

    def stats(self, async_depth: int, runner: RunnerStats) -> EngineStats:
        return self.recorder.snapshot(
            self.pool,
            self.running,
            self.waiting,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            async_depth=async_depth,
            runner=runner,
        )

    def set_drafts(self, request: Request, draft_token_ids: Iterable[int]) -> None:
        """Set guesses for the next step.
        Ignored unless the request has nothing in flight, since guesses extend known tokens."""
        if request.state is State.RUNNING and not request.num_output_placeholders:
            request.draft_token_ids = tuple(draft_token_ids)


def _progress(request: Request, done: int) -> EngineOutput:
    """Return the output of a step that advanced the prompt and produced no token."""
    return EngineOutput(
        request.request_id,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_s=request.scheduled_s or 0.0,
        num_prompt_tokens_done=done,
    )


def as_told(error: BaseException, request: Request | None = None) -> LocalLLMError:
    """Return the exception as the error of the requests that it ended. A foreign exception of one request is logged."""
    if isinstance(error, LocalLLMError):
        return error
    if request is not None:
        log.error("request failed id=%s", request.request_id, exc_info=error)
    return StepFailed(
        "The step that carried this request failed.",
        f"{type(error).__name__}: {error}",
        "Send the request again: the engine is still running. The log has the details.",
    )
