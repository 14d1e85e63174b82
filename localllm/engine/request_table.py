"""The unfinished requests of one engine: which wait, which run, and the slots and KV blocks that the running ones hold.

    waiting -> running (`admit`) -> finished (`finish`)
                  |  ^
                  v  |
               preempted (`preempt`), which waits again without blocks

The scheduler plans steps over these requests (scheduler.py), and settle.py applies the results of a step to them.
Does not know: why a request is admitted or preempted, tokens of a step, torch, text, threads.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator

from localllm.engine.media import EncoderStore
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Hit
from localllm.engine.outputs import HANDED_OVER, EngineOutput
from localllm.engine.preemption import OutputReserve
from localllm.engine.prompt_history import OFF, PromptHistory
from localllm.engine.recorder import StatsRecorder, now_s
from localllm.engine.request import Request, State
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import NewSlot
from localllm.errors import LocalLLMError

log = logging.getLogger(__name__)


class WaitingQueue:
    """Waiting requests in order of (priority, arrival).
    A preempted request comes before later arrivals of its priority."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []  # sorted; sequence numbers are unique

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in self._entries)

    @property
    def least_urgent(self) -> Request | None:
        """The last request in this order; None if the queue is empty."""
        return self._entries[-1][2] if self._entries else None

    def push(self, request: Request) -> None:
        insort(self._entries, (request.priority, request.sequence, request))

    def remove(self, request: Request) -> None:
        index = bisect_left(self._entries, (request.priority, request.sequence))
        assert self._entries[index][2] is request, f"{request.request_id} is not waiting"
        del self._entries[index]

    def clear(self) -> None:
        self._entries.clear()


class RequestTable:
    """All unfinished requests by id, and the changes of state that a request goes through."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, recorder: StatsRecorder) -> None:
        self.config, self.cache, self.recorder = config, cache, recorder
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.encoded = EncoderStore(config.encoder_rows)
        self.reserve = OutputReserve(config.output_reserve)
        self._num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.free_slots = list(range(self._num_slots))[::-1]
        self._freed_slots: list[int] = []  # reported to the runner with the next plan
        self._arrivals = 0
        self.history = PromptHistory(config.block_size, cache.hit_multiple * config.block_size)

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self._arrivals += 1
        request.sequence = self._arrivals
        request.hash_root = self.cache.hasher.root(request.cache_extras)
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def _explain_miss(self, request: Request, num_kv_tokens: int) -> None:
        """Note why the request found no more of its prompt in the cache, and remember its prompt for later ones."""
        if not _has_prompt(request):
            return
        try:
            if self.cache.uses_cache(request):
                prompt = request.prefix(request.prompt_len, self.config.block_size)
                request.cache_miss = self.history.explain(prompt, request.num_cached_tokens, num_kv_tokens)
                self.history.remember(request.sequence, prompt)
            else:
                request.cache_miss = OFF
            self.history.keep_miss(request.request_id, request.options.owner, request.cache_miss)
        except Exception:
            log.exception("a cache miss was not explained id=%s", request.request_id)

    def _remember(self, request: Request) -> None:
        """Remember what a request that ends has computed, its output included: the next prompt may continue it."""
        if request.scheduled_s is None or not self.config.enable_prefix_caching or not _has_prompt(request):
            return
        try:
            num_computed = max(request.num_computed_tokens, request.num_lost_tokens)
            self.history.remember(request.sequence, request.prefix(num_computed, self.config.block_size))
        except Exception:
            log.exception("a request was not remembered id=%s", request.request_id)

    def admit(self, request: Request, hit: Hit) -> NewSlot | None:
        """Run a waiting request: give it a slot and what the cache holds of the start of its prompt. Return what
        the runner needs to know about it; None, without a change, if no slot is left for its recurrent state."""
        if not self.cache.enter(request, hit):
            return None
        self.waiting.remove(request)
        size = self.config.block_size
        cached = hit.num_tokens(size)
        request.num_computed_tokens = cached
        if request.scheduled_s is None:  # not at a readmission, which also finds blocks of the request's own outputs
            request.num_cached_tokens = cached
            self._explain_miss(request, hit.num_kv_blocks * size)
        request.slot = self.free_slots.pop()
        request.state, request.is_redrawn = State.RUNNING, False
        self.running.append(request)
        if request.num_preemptions:
            request.note("Runs again", now_s())
        self.recorder.on_admission(request, hit.num_kv_blocks * size)
        return NewSlot(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=request.token_ids[:],
            prompt_len=request.prompt_len,
            params=request.params,
            block_ids=hit.blocks,
            num_computed_tokens=cached,
            eos_token_ids=request.eos_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            adapter=-1 if request.options.adapter is None else request.options.adapter.slot,
            prompt_embeds=request.prompt_embeds,
            media=request.media,
            source=b"" if request.source is None else request.source.digest,
            max_drafts=request.max_drafts,
            prediction_token_ids=request.options.prediction_token_ids if request.max_drafts else (),
            dry_breakers=request.dry_breakers,
        )

    def preempt(self, request: Request) -> None:
        """Make a running request wait again, to be recomputed.
        Its registered blocks can be found until they are reused, so resuming is often cheap."""
        self._release(request)
        request.state = State.PREEMPTED
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.drop_drafts()
        request.num_preemptions += 1
        request.note("Preempted", now_s())
        self.recorder.num_preemptions += 1
        self.reserve.on_preemption()
        self.waiting.push(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, whatever its state, and free its blocks and slot. No other function ends one."""
        was_running = request.state is State.RUNNING
        if was_running:
            self.cache.name_blocks(request, request.num_computed_tokens)
            self._release(request)
            if reason == HANDED_OVER and self.cache.tiers is not None:
                self.cache.tiers.hand_over(request)
        elif self.cache.tiers is not None:
            self.cache.tiers.cancel(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished_s = now_s()
        if not was_running:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self.reserve.on_end(request)
        self._remember(request)
        try:
            self.recorder.on_finish(request, request.timeline())
        except Exception:
            log.exception("statistics of a request were not recorded id=%s", request.request_id)

    def finish_with_error(self, request: Request, error: LocalLLMError) -> EngineOutput:
        self.finish(request, "error")
        return EngineOutput(request.request_id, finish_reason="error", error=error)

    def _release(self, request: Request) -> None:
        """Remove a request from the running ones and free its memory and its slot."""
        self.running.remove(request)
        self.cache.release(request)
        if self.encoded.capacity_rows:  # of models that see, and encoder-decoders
            self.encoded.release_all(request.request_id)
        self.free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1

    def take_freed_slots(self) -> tuple[int, ...]:
        """Return the slots freed since the last call."""
        freed, self._freed_slots = tuple(self._freed_slots), []
        return freed

    def restart_all(self) -> None:
        """Free all blocks and slots, and queue every request in order of arrival, with nothing computed."""
        self.cache.clear()
        self.encoded.clear()
        self.free_slots = list(range(self._num_slots))[::-1]
        self._freed_slots.clear()
        self.running.clear()
        self.waiting.clear()
        for request in self.requests.values():
            request.start_over()
            self.waiting.push(request)


def _has_prompt(request: Request) -> bool:
    """Return whether a request is compared with others: not one of a beam search's many steps, and not embeddings or
    pictures, whose token ids have no meaning."""
    return not request.options.part_of and not request.spans
