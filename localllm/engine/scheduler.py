"""Who runs in the next step, with how many tokens and which blocks.

One token budget per step covers everything: the work a request wants is the difference of its counters (request.py),
so there is no prefill mode and no decode mode. Requests that decode go first, one token each, so that a long prompt
never stalls running streams; prompts share what is left (prefill_shares.py). Waiting requests enter when their *whole*
prompt fits beside what running ones are expected to need (output_reserve.py). When a running request cannot grow, the
youngest one gives its blocks back and waits again (preemption).
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
"""More blocks than a request has: with so many registered, none of its further ones are."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The numbers a plan of memory decided (models/fit.py)."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    block_size: int = 16
    long_prefill_token_threshold: int = 0  # prefill tokens per step while any request decodes; 0: no cap
    policy: str = "fcfs"  # fcfs, priority
    max_num_queued_reqs: int = 1024
    enable_prefix_caching: bool = True
    watermark: float = 0.01  # share of the pool kept free at admission while something runs
    output_reserve: float = 0.65  # share of its expected output for which a request finds room at admission


class _Launched(NamedTuple):
    plan: StepPlan
    requests: tuple[Request, ...]  # of plan.rows; the objects, since an id may come back


LOOKAHEAD = 8
"""Waiting requests that are looked at beyond those that fill the step: a short prompt may be among them."""


class _Prefill(NamedTuple):
    """A request that wants to compute more of its prompt than one token, running or about to enter."""

    request: Request
    wanted: int
    enters: bool


@dataclass(slots=True)
class _Draft:
    """The step being put together."""

    budget: int
    rows: dict[str, tuple[Request, Row]] = field(default_factory=dict)
    new_slots: list[NewSlot] = field(default_factory=list)
    prefill_budget: int = 0
    preempted: bool = False


class WaitingQueue:
    """Requests in order of (priority, arrival). A preempted one arrived before all that wait behind it."""

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
    """`add` and `abort` at any time between steps; `schedule` makes a plan, `update` settles the oldest open one."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, hasher: BlockHasher, recorder: StatsRecorder | None = None
    ) -> None:
        self.config, self.pool, self.hasher = config, pool, hasher
        self.recorder = recorder or StatsRecorder()
        self.requests: dict[str, Request] = {}  # every unfinished one
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.launched: deque[_Launched] = deque()  # plans made and not settled
        self._num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._num_slots))[::-1]
        self._freed_slots: list[int] = []  # to be told to the runner with the next plan
        self._outputs: list[EngineOutput] = []  # endings that no step result brings
        self._watermark_blocks = max(1, int(config.watermark * pool.capacity))
        self._reserve = OutputReserve(config.output_reserve)
        self._arrivals = 0
        self._step_id = 0

    # Requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `QueueFull` when `max_num_queued_reqs` wait already."""
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
        """End a request in whatever state it is. False when it has ended (or never was)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        self._outputs.append(
            EngineOutput(request_id, finish_reason=reason, num_cached_tokens=request.num_cached_tokens)
        )
        return True

    def take_outputs(self) -> list[EngineOutput]:
        """Endings that happened outside `update`: aborts, and requests that can never run."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.launched)

    # A step is planned ----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to launch now."""
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
        """Where every slot is taken, the least urgent running request leaves for a more urgent waiting one."""
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
        """Divide what decodes left among prompts that are under way and prompts that enter."""
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
            if share and not each.enters:  # no row is taken out of the step again: whoever enters may share its blocks
                self._register(each.request, each.request.num_computed_tokens + share)
        spare = 0
        for each, share in zip(prefills, shares, strict=True):
            if share and each.enters:
                spare += share - self._enter(each.request, share + spare, draft)

    def _prefill_budget(self, draft: _Draft) -> int:
        """While others decode, prefill gets a share of the step, so that their next token is not far away."""
        cap = self.config.long_prefill_token_threshold
        return min(draft.budget, cap) if draft.rows and cap else draft.budget

    def _wanted(self, request: Request) -> int:
        """Tokens to run for a running request; 0 when what is launched already reaches its length limit."""
        if request.state is not State.RUNNING:  # preempted while this step was being made
            return 0
        room = request.max_output_tokens - request.num_output_tokens - request.num_output_placeholders
        if room <= 0:
            return 0
        if len(request.draft_token_ids) >= room:
            request.draft_token_ids = request.draft_token_ids[: room - 1]
        return request.num_wanted_tokens

    def _schedule_one(self, request: Request, count: int, draft: _Draft) -> bool:
        """Find blocks for `count` more tokens of a running request and put it into the step."""
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
        """New blocks for the request's table; preempts others if it must. None: it was itself preempted, or ended."""
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
        """Who gives way: the least urgent, and of those the youngest."""
        return max(self.running, key=lambda request: (request.priority, request.sequence))

    def _preempt(self, request: Request, draft: _Draft) -> None:
        """Recompute later: its named blocks stay findable until they are reused, so resuming is often cheap.

        Outputs already launched are still delivered when their step is settled; until then it is not readmitted.
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
        """Take a running request's blocks and slot away."""
        self.running.remove(request)
        self.pool.release(request.block_table)
        request.block_table = []
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    # Waiting requests enter -----------------------------------------------------------------------------------

    def _admissible(self, running: Sequence[_Prefill], draft: _Draft) -> list[_Prefill]:
        """Waiting requests that may enter in this step: first come, first served.

        A request whose blocks do not fit holds the others back. One that cannot use its turn yet does not: it waits for
        late outputs of its own, or for a running prompt that computes what both begin with.
        """
        found: list[_Prefill] = []
        filled, num_beyond = sum(each.wanted for each in running), 0
        entering = 0  # blocks of those found, with what is kept for their outputs
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
            if entering + (least if is_alone else most) > self._num_spare_blocks(request.priority):
                if found or not self._enters_on_trial(request, least):
                    break
                most = self.pool.capacity  # none beside it
            wanted = request.num_tokens - len(hits) * self.config.block_size
            found.append(_Prefill(request, wanted, enters=True))
            entering += most
            filled += wanted
        return found

    def _enters_on_trial(self, request: Request, num_blocks: int) -> bool:
        """Whether a request that finds no room for its output may enter nevertheless."""
        if not self._reserve.allows_trial or num_blocks > self._num_spare_blocks(None):
            return False
        self._reserve.on_trial(request, len(self.running))
        return True

    def _num_spare_blocks(self, priority: int | None) -> int:
        """Free blocks that running requests will not take for their prompts, nor, it is expected, for their outputs.

        priority: outputs of less urgent requests do not count, which would be preempted; None: no outputs count.
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
        """Whether a running request will fill the first block that this one did not find."""
        place = len(hits)
        return place < len(request.block_hashes) and any(
            other.num_registered_blocks <= place < len(other.block_hashes)
            and other.block_hashes[place] == request.block_hashes[place]
            for other in self.running
        )

    def _prefix_hits(self, request: Request) -> list[int]:
        """Cached blocks to start from. At least one token is computed, since its logits are not cached."""
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        self.hasher.extend(request.block_hashes, request.hash_root, request.token_ids)
        return self.pool.lookup(request.block_hashes[: (request.num_tokens - 1) // self.config.block_size])

    def _enter(self, request: Request, limit: int, draft: _Draft) -> int:
        """Put a waiting request into the step with at most `limit` tokens, and return how many it took: none where one
        that entered just before computes what both begin with."""
        hits = self._prefix_hits(request)  # those that entered in this step may have added some
        if self._is_being_computed(request, hits):
            return 0
        self.waiting.remove(request)
        self.pool.acquire(hits)
        cached = len(hits) * self.config.block_size
        request.block_table = list(hits)
        request.num_computed_tokens = cached
        if request.scheduled_s is None:  # a request that comes back finds outputs of its own, too
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
        self._register(request, cached + count)  # whoever is admitted next may share them already
        return count

    # The step is sealed ---------------------------------------------------------------------------------------

    def _commit(self, draft: _Draft) -> StepPlan:
        """Advance the counters as if the step had run, and name the blocks that it fills."""
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
        """Name the blocks before position `end` that are full of accepted tokens: never drafts, never placeholders.

        A step writes the K and V of all its rows before any of them attends, layer by layer, so a block may be found
        from the step that fills it on.
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
        """Account for the oldest launched step. Rows of requests that ended meanwhile are dropped.

        A row that cannot be accounted for ends its own request; the rows beside it are settled all the same.
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
        self.launched.popleft()  # not sooner: until here a failure is one of all these requests
        timings = result.timings
        try:
            self.recorder.on_settled(plan.step_id, generated, timings.forward_s, timings.sample_s, now_s() - started_s)
        except Exception:
            log.exception("figures of a step were not recorded step=%d", plan.step_id)
        return outputs

    def _settle(self, request: Request, row: Row, result: RowResult, at_s: float) -> EngineOutput | None:
        if result.error is not None:
            return self._end_with(request, self._error_of(result))
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(request, row, result)
        done = self._prompt_tokens_done(request, row) if request.reports_progress else None
        if not row.samples:
            return None if done is None else _progress(request, done)
        if request.state is State.RUNNING:  # else: preempted since, its counters start over
            request.num_output_placeholders -= 1 + len(row.draft_token_ids)
            request.num_computed_tokens -= 1 + len(row.draft_token_ids) - len(result.token_ids)
        if not result.token_ids:
            return self._end_with(request, StepFailed("The runner gave no token for this request."))
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
        """None once the first token is out: what runs again after a preemption is no news of the prompt."""
        done = min(row.num_computed_tokens + row.num_scheduled_tokens, request.prompt_len)
        return done if request.first_token_s is None else None

    def _accept(self, request: Request, token_ids: tuple[int, ...]) -> tuple[int, str | None, int | None]:
        """Append tokens one by one until one ends the request: (tokens kept, finish reason, stop token)."""
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
        """After a preemption the prompt runs again: what is known already is not appended twice."""
        known = len(request.prompt_logprobs)  # positions 1 .. known are scored
        request.prompt_logprobs += result.prompt_logprobs[max(0, known - row.num_computed_tokens) :]

    def _error_of(self, result: RowResult) -> LocalLLMError:
        why = result.error or ""
        if result.fault == "model":
            self.recorder.corrupted_requests += 1
            return StepFailed("The model produced no usable logits for this request.", why)
        if result.fault == "request":
            return RequestError("The answer cannot go on.", why, "Ask for less at once; trying again changes nothing.")
        return StepFailed("This request could not be computed.", why, "The requests beside it went on.")

    def _distrust_blocks(self) -> None:
        """A row gave NaN, so its KV may hold some, for how long nobody knows, and so may what was computed over it: no
        block that is there now, or that a running request fills from here on, is found by another."""
        self.pool.forget_all()
        for request in self.running:
            request.num_registered_blocks = NEVER

    def _end_with(self, request: Request, error: LocalLLMError) -> EngineOutput:
        self._finish(request, "error")
        return EngineOutput(request.request_id, finish_reason="error", error=error)

    # Requests end ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str) -> None:
        """The one place where a request ends, whatever its state: blocks and slot go back."""
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
            log.exception("figures of a request were not recorded id=%s", request.request_id)

    def fail(self, request: Request, error: LocalLLMError) -> None:
        """End it with an error, in whatever state it is."""
        self._outputs.append(self._end_with(request, error))

    def _exhausted(self, request: Request) -> KVCacheExhausted:
        capacity = self.pool.capacity * self.config.block_size
        return KVCacheExhausted(
            f"The KV cache is exhausted at {request.num_tokens} tokens.",
            f"This request runs alone and the whole cache holds {capacity} tokens.",
            "Give the cache more memory: --kv-cache-memory-bytes, or --gpu-memory-utilization.",
        )

    def fail_step(self, error: LocalLLMError, *, everyone: bool = False) -> int:
        """A step raised, wherever that was: end the requests that are launched, or all; the others start over.

        No cached block is trusted afterwards, and nothing that the step may have left half done is relied upon: the
        ledger begins anew. The runner forgets its slots too (`Runner.reset`). Returns how many requests have ended.
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
        """Nobody holds a block or a slot, nothing is launched, and every request waits in the order of its arrival."""
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
        """Guesses for the next step. Only for a request with nothing in flight: guesses extend known tokens."""
        if request.state is State.RUNNING and not request.num_output_placeholders:
            request.draft_token_ids = tuple(draft_token_ids)


def _progress(request: Request, done: int) -> EngineOutput:
    """News of a step that gave no token."""
    return EngineOutput(
        request.request_id,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_s=request.scheduled_s or 0.0,
        num_prompt_tokens_done=done,
    )


def as_told(error: BaseException, request: Request | None = None) -> LocalLLMError:
    """An exception as the requests that it ended hear of it. What is not ours goes to the log, if it is of one."""
    if isinstance(error, LocalLLMError):
        return error
    if request is not None:
        log.error("request failed id=%s", request.request_id, exc_info=error)
    return StepFailed(
        "The step that carried this request failed.",
        f"{type(error).__name__}: {error}",
        "The engine goes on; send the request again. The log has the details.",
    )
