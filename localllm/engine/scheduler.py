"""The scheduler: decides which requests run in the next step, with how many tokens and which blocks.

One token budget per step covers everything. The work of a request is the difference of its counters (request.py), so
there is no prefill mode and no decode mode. Decodes are scheduled first, one token each, so that a long prompt never
stalls running streams; prompts share the rest of the budget (prefill.py). A waiting request is admitted when its
*whole* prompt fits in addition to the expected needs of the running ones (preemption.py). If a running request
cannot grow, the youngest request is preempted: it frees its blocks and waits again.
If the model runs in pipeline stages, the requests form cohorts: a request is in one sampling step at a time, and a step
takes an equal share of the requests that decode. Chunks of a prompt follow each other through the stages at once.
The requests themselves are in request_table.py; the results of a step are applied in settle.py.
Does not know: torch, text, threads, the clock (recorder.py does).
Ideas: iteration-level scheduling (Orca, Yu et al. 2022), chunked prefill (Sarathi-Serve, Agrawal et al. 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.engine.media import EncoderPrompt, EncoderStore, MediaSpan
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import BlockIds, Counts, Hit, fits, plus
from localllm.engine.outputs import HANDED_OVER, EngineOutput
from localllm.engine.preemption import Preemption
from localllm.engine.prefill import PromptPace, StreamPace, chunk_length, prefill_shares, whole_chunks
from localllm.engine.recorder import StatsRecorder, now_s
from localllm.engine.request import BACKGROUND_PRIORITY, Request, State
from localllm.engine.request_table import RequestTable
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.settle import LaunchedStep, settle_step
from localllm.engine.speculation import Speculation
from localllm.engine.stats import NO_SPECULATION, NO_TIERS, EngineStats
from localllm.engine.step import DraftSupport, NewSlot, Row, RunnerStats, StepPlan, StepResult
from localllm.errors import KVCacheExhausted, LocalLLMError, QueueFull

LOOKAHEAD = 8
"""Waiting requests examined beyond those that fill the step, since one of them may have a short prompt."""

MOST_HIT_BLOCKS = 4096
"""Blocks that requests of one step find in the prefix cache, if there are several: each block takes the host about a
microsecond, and streams wait meanwhile."""


class _Prefill(NamedTuple):
    """A request, running or about to be admitted, with more than one prompt token left to compute."""

    request: Request
    wanted: int
    hit: Hit | None = None  # of a request to be admitted

    @property
    def start(self) -> int:
        """Position of the first token to compute."""
        request = self.request
        return request.num_tokens + request.num_drafts + request.num_output_placeholders - self.wanted


@dataclass(slots=True)
class _StepBuilder:
    """The step under construction."""

    budget: int
    rows: dict[str, tuple[Request, Row]] = field(default_factory=dict)
    new_slots: list[NewSlot] = field(default_factory=list)
    prefill_budget: int = 0
    encoder_budget: int = 0  # rows of pictures that may still be encoded
    has_decodes: bool = False
    preempted: bool = False
    defers_background: bool = False  # background requests are left out, for the prompt of another request

    def holds(self, read: MediaSpan | EncoderPrompt, request_id: str, store: EncoderStore) -> bool:
        """Hold a picture or a source for a request, and return whether it is held. One that has to wait keeps others
        from being encoded in this step, so none waits for ever; while requests decode, a step encodes one."""
        fits = store.ask(read) == "there" or read.rows <= self.encoder_budget
        taken = store.take(read, request_id) if fits else "full"
        if taken == "full":
            self.encoder_budget = 0
        elif taken == "encode":
            self.encoder_budget = 0 if self.has_decodes else self.encoder_budget - read.rows
        return taken != "full"


class Scheduler:
    """Plans and settles steps. Call `add` and `abort` between steps;
    `schedule` plans a step, `update` settles the oldest open one."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        recorder: StatsRecorder | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """speculation: None: no drafts, except by `set_drafts`."""
        most_decodes = min(config.max_num_seqs, config.max_num_batched_tokens)
        assert config.fixed_chunk + most_decodes <= config.max_num_batched_tokens or not config.fixed_chunk, "no room"
        assert config.fixed_chunk % config.block_size == 0, (config.fixed_chunk, config.block_size)
        self.config, self.cache, self.ledger = config, cache, cache.ledger  # of the ledger only counts are read
        self.recorder = recorder or StatsRecorder()
        self.table = RequestTable(config, cache, self.recorder)
        self.speculation = speculation
        support = DraftSupport() if speculation is None else speculation.support
        self._lookahead, self._num_reread = support.lookahead, support.num_reread
        self.requests, self.running, self.waiting = self.table.requests, self.table.running, self.table.waiting
        self.launched: deque[LaunchedStep] = deque()  # plans not settled yet
        self._outputs: list[EngineOutput] = []  # outputs of requests that ended outside `update`
        self._prefilled: Sequence[Request] = ()  # requests of the last step that may hold a chunk before their windows
        self._num_cohorts = config.num_cohorts
        self._preemption = Preemption(cache, self.table.reserve, self.running, support.lookahead)
        self._pace, self._stream_pace = PromptPace(config.target_step_s), StreamPace()
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
        if request.options.is_background:
            request.priority = BACKGROUND_PRIORITY
        elif self.config.policy == "fcfs":
            request.priority = 0
        if self._num_cohorts > 1:
            request.most_unseen = 0
        if self.speculation is not None:
            request.max_drafts = self.speculation.most_for(request)
        self.table.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a request in any state. Return False if the id is unknown or the request has ended."""
        request, tiers = self.requests.get(request_id), self.cache.tiers
        if request is None:
            if tiers is None or not tiers.stop_hand_over(request_id):
                return False
            self._outputs.append(EngineOutput(request_id, finish_reason=reason))
            return True
        self.table.finish(request, reason)
        self._outputs.append(
            EngineOutput(request_id, finish_reason=reason, num_cached_tokens=request.num_cached_tokens)
        )
        return True

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs of requests that ended outside `update`: aborted ones, ones that can never run, and ones
        whose blocks have left for another engine."""
        handed = () if self.cache.tiers is None else self.cache.tiers.take_handed_over()
        outputs = [*self._outputs, *(EngineOutput(request_id, finish_reason=HANDED_OVER) for request_id in handed)]
        self._outputs = []
        return outputs

    @property
    def has_work(self) -> bool:
        tiers = self.cache.tiers
        return bool(self.requests or self.launched or (tiers is not None and tiers.has_work))

    @property
    def waits_for_tier(self) -> bool:
        """Return whether nothing can be launched before a block has been read or written."""
        tiers = self.cache.tiers
        return tiers is not None and not (self.running or self.launched) and tiers.waits

    # A step is planned ----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if there is nothing to launch now."""
        started_s = now_s()
        step = _StepBuilder(self.config.max_num_batched_tokens, encoder_budget=self.config.encoder_budget)
        self._preemption.on_step()
        self.cache.begin_step()
        for request in self._prefilled:
            self.cache.drop_unread(request)
        self._make_room_for_an_urgent_request(step)
        if self.speculation is not None:
            self._set_num_drafts(self.speculation)
        has_background = self._has_background()
        step.defers_background = has_background and self._computes_an_urgent_prompt()
        self._schedule_decodes(step)
        step.has_decodes = bool(step.rows)
        step.prefill_budget = self._prefill_budget(step, has_background=has_background)
        self._schedule_prefills(step)
        if step.defers_background and not step.rows:  # the prompt cannot enter yet
            step.defers_background = False
            self._schedule_decodes(step)
            step.prefill_budget = self._prefill_budget(step, has_background=True)
            self._schedule_prefills(step)
        if not step.rows:
            self.recorder.degraded_steps += any(map(self._is_held_back, self.running))
            return self._commit(step) if self.cache.has_moves else None
        plan = self._commit(step)
        planned_s, budget = now_s() - started_s, self.config.max_num_batched_tokens
        self.recorder.on_plan(plan.step_id, step.rows.values(), budget - step.budget, budget, planned_s)
        return plan

    def _make_room_for_an_urgent_request(self, step: _StepBuilder) -> None:
        """Preempt running requests for a more urgent waiting one (preemption.py)."""
        if (head := self._head()) is not None:
            for victim in self._preemption.victims_for(head, has_free_slot=bool(self.table.free_slots)):
                self._preempt(victim, step)
            step.preempted = False  # no row is planned yet, so the waiting request may enter in this step

    def _set_num_drafts(self, speculation: Speculation) -> None:
        """Set how many drafts each request that decodes in this step has."""
        decoding = []
        for request in self.running:
            request.num_drafts = len(request.draft_token_ids)
            if request.num_wanted_tokens == 1:
                decoding.append(request)
        has_prompts = len(decoding) < len(self.running) or bool(self.waiting and self.table.free_slots)
        speculation.set_drafts(decoding, self.config.max_num_batched_tokens, self.ledger, has_prompts=has_prompts)

    def _schedule_decodes(self, step: _StepBuilder) -> None:
        """Schedule the requests that have one token to compute, and drafts from what the budget leaves beside them."""
        decoding = [
            (request, wanted)
            for request in self._next_cohort()
            if 0 < (wanted := self._wanted(request)) <= 1 + request.num_drafts
            and not (step.defers_background and request.priority == BACKGROUND_PRIORITY)
        ]
        spare = max(0, step.budget - len(decoding))  # tokens for drafts
        for request, wanted in decoding:
            if step.budget <= 0:
                break
            if request.state is State.RUNNING:  # not preempted by one before it
                count = min(wanted, 1 + spare)
                spare -= self._schedule_one(request, count, step) and count - 1

    def _head(self) -> Request | None:
        """Return the first waiting request that does not wait for blocks from a tier."""
        return next((request for request in self.waiting if request.state is not State.LOADING), None)

    def _has_background(self) -> bool:
        last = self.waiting.least_urgent
        return (last is not None and last.priority == BACKGROUND_PRIORITY) or any(
            request.priority == BACKGROUND_PRIORITY for request in self.running
        )

    def _computes_an_urgent_prompt(self) -> bool:
        """Return whether a prompt is to be computed of a request that is not in the background. Background requests
        wait for it, since the step's time is that request's time to first token."""
        head = self._head()
        if head is not None and head.priority < BACKGROUND_PRIORITY and self.table.free_slots:
            return not self.cache.is_being_computed(head, self.cache.find(head), self.running)
        return any(
            request.priority < BACKGROUND_PRIORITY and self._wanted(request) > 1 + request.num_drafts
            for request in self.running
        )

    def _next_cohort(self) -> Sequence[Request]:
        """Return the requests that may decode in this step: all running ones, or at most one cohort's share of them."""
        if self._num_cohorts == 1:
            return tuple(self.running)
        decoding = [request for request in self.running if request.num_wanted_tokens <= 1 + request.num_drafts]
        most = -(-len(decoding) // self._num_cohorts)
        return [request for request in decoding if self._wanted(request) > 0][:most]

    def _schedule_prefills(self, step: _StepBuilder) -> None:
        """Divide the budget that decodes left among running prompts and prompts to be admitted."""
        self._prefilled = ()
        if step.prefill_budget <= 0:
            return
        prefills = [
            _Prefill(request, wanted)
            for request in self.running
            if request.request_id not in step.rows
            and (wanted := self._wanted(request)) > 1 + request.num_drafts
            and not (step.defers_background and request.priority == BACKGROUND_PRIORITY)
        ]
        if self.table.free_slots and not step.preempted:
            prefills += self._admissible(prefills, step)
        num_changes = self.cache.num_changes  # so far, the hits are up to date
        prefills.sort(key=lambda each: (each.request.priority, each.request.sequence))
        self._prefilled = [each.request for each in prefills]
        shares = self._shares(prefills, step.prefill_budget)
        spare, ran = 0, []
        for each, share in zip(prefills, shares, strict=True):
            if share and each.hit is None and each.request.state is State.RUNNING:
                if count := self._schedule_one(each.request, share, step):
                    ran.append((each.request, count))
                spare += share - count
        if step.preempted:
            return
        for request, count in ran:  # from here on no row leaves the step: its blocks may be shared
            self.cache.name_blocks(request, request.num_computed_tokens + count)
        for each, share in zip(prefills, shares, strict=True):
            if share and each.hit is not None:
                hit = each.hit if self.cache.num_changes == num_changes else self.cache.find(each.request)
                spare += share - self._enter(each.request, hit, share + spare, step)

    def _shares(self, prefills: Sequence[_Prefill], budget: int) -> list[int]:
        """Return the tokens of each prompt, which are in order of urgency and arrival."""
        if self.config.fixed_chunk:
            return whole_chunks([self._chunk_length(each.request, each.start) for each in prefills], budget)
        return prefill_shares([each.wanted for each in prefills], [each.request.priority for each in prefills], budget)

    def _chunk_length(self, request: Request, start: int) -> int:
        return chunk_length(start, request.prompt_len, self.config.fixed_chunk)

    def _prefill_budget(self, step: _StepBuilder, *, has_background: bool) -> int:
        """Return the step's prefill budget: limited while requests decode, so that their next token is not delayed, and
        for background prompts, so that a request that arrives meanwhile does not wait for a long step. With a target
        for the step's time, by what prompt tokens were measured to take; where a step copies weights, to whole steps
        with time between them (prefill.py)."""
        config = self.config
        cap = config.long_prefill_token_threshold or step.budget
        of_background = has_background and not step.defers_background
        if config.target_step_s:
            cap = min(cap, self._pace.num_tokens(of_background=of_background))
        is_limited = bool(step.rows) or of_background
        is_limited = is_limited or any(map(self._is_held_back, self.running))
        if config.stream_from and is_limited:
            is_timed = not any(_num_prompt_tokens(launched.plan) for launched in self.launched)
            if not (is_timed and self._stream_pace.is_due):
                return 0
        return min(step.budget, max(cap, config.fixed_chunk)) if is_limited else step.budget

    def _is_held_back(self, request: Request) -> bool:
        """Return whether a request that has tokens left to generate waits for those in flight."""
        num_outputs = request.num_output_tokens + request.num_output_placeholders
        return request.waits_for_tokens and num_outputs < request.max_output_tokens

    def _wanted(self, request: Request) -> int:
        """Return the tokens to run for a running request; 0 if the launched steps already reach its length limit, or if
        the request waits for their tokens."""
        if request.state is not State.RUNNING:  # preempted while this step was planned
            return 0
        room = request.max_output_tokens - request.num_output_tokens - request.num_output_placeholders
        if room <= 0 or (request.most_unseen is not None and request.waits_for_tokens):
            return 0
        if request.num_drafts >= room:
            request.num_drafts = room - 1
        return request.num_wanted_tokens

    def _schedule_one(self, request: Request, count: int, step: _StepBuilder, num_reread: int = 0) -> int:
        """Find blocks for at most `count` more tokens of a running request, add the request to the step, and return
        how many tokens it runs; 0: none, since it was preempted or ended. num_reread: see `Row`."""
        cache, start = self.cache, request.num_computed_tokens
        if request.media and start < request.media[-1].end:
            count = self._end_within_media(request, start, start + count, step) - start
            if not count:
                return 0
        if count > 1:
            count = cache.end_of_row(request, start + count) - start
        end_of_blocks = self._preemption.end_of_blocks(request, start + count)
        blocks = cache.grow(request, end_of_blocks)
        if not blocks:
            if blocks is None:
                blocks = self._make_room(request, end_of_blocks, step)
                if blocks is None:
                    return 0
            elif self._lookahead:
                blocks = self._grow_ahead(request, count)
        end = start + count
        num_drafts = max(0, end - request.num_tokens - request.num_output_placeholders)
        drafts = request.draft_token_ids[:num_drafts]
        if self._num_cohorts > 1 and not drafts:  # the last stage has proposed them, and the others verify them, too
            drafts = request.proposed[:num_drafts]
        samples = end >= request.num_tokens + request.num_output_placeholders
        is_known = not num_drafts and (request.num_output_placeholders <= 1 or not request.max_drafts)
        state = None if request.held_state is None else cache.state_of_row(request, end, is_known=is_known)
        row = Row(
            request.slot, request.request_id, start, count, blocks, samples, drafts, state,
            num_drafts, num_reread,
        )  # fmt: skip
        step.rows[request.request_id] = (request, row)
        step.budget -= count + num_reread
        return count

    def _end_within_media(self, request: Request, start: int, end: int, step: _StepBuilder) -> int:
        """Hold the pictures that a row from `start` to `end` reads, and return where it may end: before a picture that
        cannot be encoded in this step, and not inside one that attends both ways."""
        store = self.table.encoded
        for span in request.media:
            if span.end <= start or span.start >= end:
                continue
            if span.both_ways and end < span.end:
                if span.start > start or span.end - start > step.budget:
                    return max(start, span.start)
                end = span.end
            if not step.holds(span, request.request_id, store):
                return max(start, span.start)
        return end

    def _make_room(self, request: Request, end: int, step: _StepBuilder) -> BlockIds | None:
        """Preempt requests until a running one has blocks up to position `end`, and return its new blocks.
        None: it was itself preempted, or ended."""
        while (blocks := self.cache.grow(request, end)) is None:
            victim = self._preemption.victim()
            if victim is request and len(self.running) == 1:
                self.fail(request, self._exhausted(request))
                return None
            self._preempt(victim, step)
            self._preemption.on_pressure()
            if victim is request:
                return None
        return blocks

    def _grow_ahead(self, request: Request, count: int) -> BlockIds:
        """Return new blocks for the positions that a drafter writes to behind the tokens of a decoding request; none if
        others may need the free blocks."""
        if count > 1 + request.num_drafts or min(self.ledger.num_free) <= len(self.running):
            return ()
        end = request.num_computed_tokens + count + self._lookahead
        return self.cache.grow(request, min(end, request.prompt_len + request.max_output_tokens)) or ()

    def _preempt(self, request: Request, step: _StepBuilder) -> None:
        """Preempt a running request, and take its row out of the step under construction.

        Outputs already launched are still delivered when their step is settled; the request is not readmitted before
        that.
        """
        entry = step.rows.pop(request.request_id, None)
        if entry is not None:
            step.budget += entry[1].num_scheduled_tokens + entry[1].num_reread
        step.preempted = True
        self.cache.swap_out(request)
        self.table.preempt(request)

    # Waiting requests enter -----------------------------------------------------------------------------------

    def _admissible(self, running: Sequence[_Prefill], step: _StepBuilder) -> list[_Prefill]:
        """Return the waiting requests that may be admitted in this step, first come, first served.

        A request whose blocks do not fit blocks those behind it. A request is skipped without blocking others if it
        waits for outputs of its own that are still in flight, or for a running prompt that is computing their common
        prefix.
        """
        found: list[_Prefill] = []
        filled, num_beyond, num_hit_blocks = sum(each.wanted for each in running), 0, 0
        ledger, preemption = self.ledger, self._preemption
        entering = (0,) * len(ledger.pools)  # blocks of the found requests, including the reserve for their outputs
        spare: dict[int, Counts] = {}  # blocks by priority: nothing here changes them
        for request in tuple(self.waiting):
            num_beyond += filled >= step.prefill_budget
            if len(found) == len(self.table.free_slots) or num_beyond > LOOKAHEAD:
                break
            if step.defers_background and request.priority == BACKGROUND_PRIORITY:
                break
            if request.num_in_flight_tokens or request.state is State.LOADING:
                continue
            if not self.cache.has_slot(len(found)):
                break
            hit = self.cache.find(request)
            num_hit_blocks += hit.num_blocks
            if found and num_hit_blocks > MOST_HIT_BLOCKS:
                break
            if self.cache.is_being_computed(request, hit, self.running):
                continue
            least, most, alone = preemption.needs(request, hit)
            is_alone = not (found or self.running or self.cache.is_loading)
            if is_alone and not self.launched and not fits(alone, ledger.num_free):
                self.fail(request, self._exhausted(request))
                continue
            if request.priority not in spare:
                spare[request.priority] = preemption.spare_blocks(request.priority)
            if not fits(plus(entering, least if is_alone else most), spare[request.priority]):
                if found or not preemption.enters_on_trial(request, least):
                    break
                most = ledger.capacity  # no other request may be admitted with it
            if self.cache.loads(request, hit, begins=not found):
                spare.clear()
                continue
            wanted = request.num_tokens - hit.num_tokens(self.config.block_size)
            found.append(_Prefill(request, wanted, hit))
            entering = plus(entering, most)
            filled += wanted
        return found

    def _enter(self, request: Request, hit: Hit, limit: int, step: _StepBuilder) -> int:
        """Admit a waiting request with at most `limit` tokens, and return how many it took. Return 0 if a request
        admitted just before is computing their common prefix, or took the last slot for a recurrent state, or if a
        fixed chunk does not fit any more."""
        start = hit.num_tokens(self.config.block_size)
        reread = self._num_reread if start else 0
        count = min(request.num_tokens - start, limit - reread)
        if self.config.fixed_chunk:
            count = self._chunk_length(request, start)
        if not 0 < count <= limit - reread or self.cache.is_being_computed(request, hit, self.running):
            return 0
        if request.media:
            count = self._end_within_media(request, start, start + count, step) - start
            if not count:
                return 0
        if request.source is not None and not step.holds(request.source, request.request_id, self.table.encoded):
            return 0
        if not self.ledger.can_enter(
            hit, self.ledger.blocks_for(self._preemption.end_of_blocks(request, start + count))
        ):
            self.table.encoded.release_all(request.request_id)
            return 0  # a windowed group is short of blocks until its windows have moved on
        new = self.table.admit(request, hit)
        if new is None:
            self.table.encoded.release_all(request.request_id)
            return 0
        step.new_slots.append(new)
        count = self._schedule_one(request, count, step, reread)
        assert count, "admission promised these blocks"
        end = request.num_computed_tokens + count
        self.cache.name_blocks(request, end)  # the next admitted request may share these blocks
        return count + reread

    # The step is sealed ---------------------------------------------------------------------------------------

    def _commit(self, step: _StepBuilder) -> StepPlan:
        """Advance the counters as if the step had run, and register the blocks that it fills."""
        requests, sampling, name_blocks = [], [], self.cache.name_blocks
        for request, row in step.rows.values():
            requests.append(request)
            request.num_computed_tokens += row.num_scheduled_tokens
            request.num_in_flight_tokens += row.num_scheduled_tokens
            if row.samples:
                sampling.append(request)
                request.num_output_placeholders += 1 + row.num_drafts
            request.num_drafts, request.draft_token_ids = 0, ()
            for span in request.media if row.num_computed_tokens < request.prompt_len else ():
                if row.num_computed_tokens < span.end <= request.num_computed_tokens:
                    self.table.encoded.release(span.digest, request.request_id)
            name_blocks(request, request.num_computed_tokens)
        self._step_id += 1
        moves = self.cache.commit(self._step_id)
        rows = tuple([row for _, row in step.rows.values()])
        known = self._known_token_ids(step) if self._num_cohorts > 1 else ()
        propose = 0 if self.speculation is None else self.speculation.propose(sampling)
        is_unmasked = all(request.grammar is None for request in sampling)
        plan = StepPlan(
            self._step_id,
            rows,
            tuple(step.new_slots),
            self.table.take_freed_slots(),
            known,
            propose,
            is_unmasked,
            *(self.table.encoded.changes() if self.table.encoded.capacity_rows else ((), ())),
            moves=moves,
        )
        self.launched.append(LaunchedStep(plan, tuple(requests)))
        return plan

    def _known_token_ids(self, step: _StepBuilder) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the ids that the last steps of the rows' requests have sampled. They are settled, since their requests
        waited."""
        return tuple([
            (row.slot, tuple(request.token_ids[-max(1, request.num_accepted) :]))
            for request, row in step.rows.values()
            if row.num_computed_tokens == request.num_tokens - 1 >= request.prompt_len
        ])  # fmt: skip

    # A step is taken back, is settled, or fails -----------------------------------------------------------------

    def can_take_back(self) -> bool:
        """Return whether the newest step may be taken back: it has background requests alone, without drafts, which
        the runner has used up, and without recurrent states, which it has changed, and it encodes no pictures."""
        plan, requests = self.launched[-1]
        return (
            self._num_cohorts == 1
            and self.cache.states is None
            and bool(requests)
            and all(request.priority == BACKGROUND_PRIORITY for request in requests)
            and not (plan.encodes or any(row.num_drafts for row in plan.rows))
        )

    def take_back(self) -> None:
        """Undo the newest step, whose rows were not computed: they are planned again. Requests that entered with it
        wait again, since what they found in the cache may have been filled by this step."""
        step = self.launched.pop()
        for request, row in zip(step.requests, step.plan.rows, strict=True):
            request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
            request.num_in_flight_tokens -= row.num_scheduled_tokens
            request.num_computed_tokens -= row.num_scheduled_tokens
            request.num_output_placeholders -= row.samples
            self.cache.forget_names(request, request.num_computed_tokens)
        entered = {new.request_id for new in step.plan.new_slots}
        for request in step.requests:
            if request.request_id in entered:
                self.table.preempt(request)

    def update(self, result: StepResult) -> list[EngineOutput]:
        """Settle the oldest launched step (settle.py)."""
        step = self.launched[0]
        outputs = settle_step(self.table, step, result, self.speculation)
        self.launched.popleft()  # not sooner: until here a failure concerns all requests of this step
        seconds = result.timings.forward_s + result.timings.sample_s
        prompts_s = 0.0 if step.plan.encodes else seconds  # encoding is not a cost of tokens; 0: not measured
        self.cache.settle(step.plan, prompts_s)
        if self.config.target_step_s:
            self._pace.observe(_num_prompt_tokens(step.plan), prompts_s)
        if self.config.stream_from:
            self._stream_pace.observe(_num_prompt_tokens(step.plan), seconds)
        if self.speculation is not None and step.plan.rows and all(row.is_decode for row in step.plan.rows):
            self.speculation.costs.observe(_num_verified(step.plan, result), seconds)
        return outputs

    def fail(self, request: Request, error: LocalLLMError) -> None:
        """End a request with an error, whatever its state."""
        self._outputs.append(self.table.finish_with_error(request, error))

    def _exhausted(self, request: Request) -> KVCacheExhausted:
        capacity = self.ledger.main_pool.capacity * self.config.block_size
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
        launched, running = {id(request) for entry in self.launched for request in entry.requests}, tuple(self.running)
        self.launched.clear()
        self.table.restart_all()
        ended = [request for request in self.requests.values() if everyone or id(request) in launched]
        for request in ended:
            self.fail(request, error)
        for request in running:
            if not request.is_finished:
                request.num_preemptions += 1
                self.recorder.num_preemptions += 1
        return len(ended)

    # Looking in -----------------------------------------------------------------------------------------------

    def stats(self, async_depth: int, runner: RunnerStats) -> EngineStats:
        return self.recorder.snapshot(
            self.ledger,
            self.running,
            self.waiting,
            num_waiting=len(self.waiting),
            states=None if self.cache.states is None else self.cache.states.pool,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            async_depth=async_depth,
            runner=runner,
            speculation=NO_SPECULATION if self.speculation is None else self.speculation.stats(),
            tiers=NO_TIERS if self.cache.tiers is None else self.cache.tiers.stats(),
        )

    def set_drafts(self, request: Request, draft_token_ids: Iterable[int]) -> None:
        """Set guesses for the next step.
        Ignored unless the request has nothing in flight, since guesses extend known tokens, and for models with
        recurrent states, whose runner knows the drafts that it has proposed itself."""
        if request.state is State.RUNNING and not request.num_output_placeholders and self.cache.states is None:
            request.draft_token_ids = tuple(draft_token_ids)
            request.num_drafts = len(request.draft_token_ids)


def _num_prompt_tokens(plan: StepPlan) -> int:
    """Return the tokens of a step's prompts, but for rows of one token."""
    return sum([row.num_scheduled_tokens for row in plan.rows if not row.num_drafts and row.num_scheduled_tokens > 1])


def _num_verified(plan: StepPlan, result: StepResult) -> int:
    """Return the tokens of a decode step, with the drafts that the runner had."""
    return len(plan.rows) + sum([row.num_checked for row in result.rows])
