"""A frozen snapshot of the engine's state. The dashboard, /metrics and logs read only this, so they always agree.

Does not know: who reads it, HTTP, torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, NamedTuple

from localllm.engine.step import RunnerStats
from localllm.kernels.kv_format import window_name

STALE_S = 2.0
"""Seconds after the last step until the rates are shown as 0."""

CLOCK_S = 0.001
"""Tolerance when comparing start times: above rounding errors, below the distance of any two engine starts."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per Prometheus bucket; `bounds` are upper bounds in seconds (or tokens)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one more than bounds: the last is +Inf; not cumulative
    total: float  # sum of all observations

    @property
    def count(self) -> int:
        return sum(self.counts)

    def since(self, before: Histogram) -> Histogram:
        """Return the observations since `before`, an earlier state of the same histogram."""
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - before.total)

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile by linear interpolation within its bucket; None without observations."""
        if not self.count:
            return None
        want, seen, low = q * self.count, 0, 0.0
        for bound, count in zip(self.bounds, self.counts[:-1], strict=True):
            if count and seen + count >= want:
                return low + (bound - low) * (want - seen) / count
            seen, low = seen + count, bound
        return low


def generation_rate(num_tokens: int, decode_s: float) -> float | None:
    """Return the tokens per second of an answer without its first token, which the prompt's time yields; None for a
    single token. decode_s: seconds from the first token to the last one."""
    return (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else None


def missed_seconds(num_missed: int, num_computed: int, prefill_s: float) -> float:
    """Return the part of a prefill's time that is due to some of the tokens that it computed."""
    return prefill_s * min(1.0, num_missed / num_computed) if num_computed > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """Times of a request's phases, in `time.time()` seconds; None for phases not reached."""

    request_id: str
    state: str  # waiting, running, preempted, finished
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
    arrived_s: float
    scheduled_s: float | None = None  # first time in a step
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    held_blocks: tuple[int, ...] = ()  # of each KV group; empty: none
    source: str = ""  # where it comes from: chat, playground, API; empty: unknown
    key_name: str = ""  # name of the key that it was sent with; empty: none
    num_drafted_tokens: int = 0  # drafts that were verified
    num_accepted_tokens: int = 0  # of those, the right ones
    miss_reason: str = ""  # why the prefix cache had no more of the prompt (prompt_history.py); empty: it had
    miss_position: int = 0  # prompt tokens before the place where the request left the earlier one
    num_missed_tokens: int = 0  # prompt tokens computed again that an earlier request had computed
    num_loaded_tokens: int = 0  # of the cached ones, and of those found after a preemption, read from a tier
    num_swaps: int = 0  # preemptions after which its blocks were kept in RAM
    events: tuple[tuple[str, float], ...] = ()  # the first preemptions, swaps and loads, with their times

    @property
    def missed_s(self) -> float | None:
        """Seconds of the prefill that went into tokens computed again; None before the first token."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return missed_seconds(self.num_missed_tokens, num_computed, self.first_token_s - self.scheduled_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate of generation, up to now if the request is not finished."""
        if self.first_token_s is None:
            return None
        return generation_rate(self.num_output_tokens, (self.finished_s or now_s) - self.first_token_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first."""
        if self.first_token_s is None or self.finished_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class StepComposition:
    """Contents of a step, and its times."""

    step_id: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_requests: int = 0
    decode_requests: int = 0
    budget_tokens: int = 0  # max_num_batched_tokens
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0


class SpeculationStats(NamedTuple):
    """Totals of speculation since the engine's start."""

    is_on: bool = False
    why_off: str = ""  # why there is none, as a part of a sentence
    num_drafts: int = 0  # rows that had drafts to verify
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()  # accepted drafts by their place in the row
    num_decode_rows: int = 0  # rows that generated, with or without drafts
    num_decode_tokens: int = 0  # tokens that these generated
    last_width: int = 0  # most drafts of a row in the last step that generated
    off_steps: tuple[tuple[str, int], ...] = ()  # steps without drafts by reason, one of `OFF_REASONS`
    last_reason: str = ""  # why the last step that generated had no drafts; empty: it had

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens that a request generates in a step; 1 without drafts."""
        return self.num_decode_tokens / self.num_decode_rows if self.num_decode_rows else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the verified drafts that were right."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Return the counts of two engines. What describes the last step is this engine's."""
        reasons = dict(self.off_steps)
        places = zip_longest(self.accepted_by_place, other.accepted_by_place, fillvalue=0)
        return self._replace(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            accepted_by_place=tuple(map(sum, places)),
            num_decode_rows=self.num_decode_rows + other.num_decode_rows,
            num_decode_tokens=self.num_decode_tokens + other.num_decode_tokens,
            off_steps=tuple((reasons | {reason: reasons.get(reason, 0) + n for reason, n in other.off_steps}).items()),
        )

    def since(self, before: SpeculationStats) -> SpeculationStats:
        """Return the counts since `before`, an earlier state of the same engine."""
        places, reasons = dict(enumerate(before.accepted_by_place)), dict(before.off_steps)
        return self._replace(
            num_drafts=self.num_drafts - before.num_drafts,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
            accepted_by_place=tuple([n - places.get(place, 0) for place, n in enumerate(self.accepted_by_place)]),
            num_decode_rows=self.num_decode_rows - before.num_decode_rows,
            num_decode_tokens=self.num_decode_tokens - before.num_decode_tokens,
            off_steps=tuple([(reason, n - reasons.get(reason, 0)) for reason, n in self.off_steps]),
        )


OFF_REASONS: Mapping[str, str] = {
    "prompt": "a prompt was being read",
    "no drafts": "nothing to guess from was found",
    "batch": "the batch was too large",
    "cost": "drafts would not have paid",
    "memory": "the KV cache was full",
}
"""Why a step generated without drafts: the label in metrics, and the same in words."""

NO_SPECULATION = SpeculationStats(why_off="this model is served without drafts")


@dataclass(frozen=True, slots=True)
class KVGroupStats:
    """The blocks of one KV group: layers with the same window."""

    window: int | None  # which tokens the layers see, as in kernels/kv_format.py; None: all
    total_blocks: int  # usable, without the null block
    used_blocks: int
    cached_blocks: int

    @property
    def name(self) -> str:
        return window_name(self.window)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks - self.cached_blocks


@dataclass(slots=True)
class TransferStats:
    """Totals of blocks that moved between the cache and the tiers behind it."""

    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0  # of a thread that read
    seconds_out: float = 0.0  # of a thread that wrote
    num_lost_blocks: int = 0  # evicted before they could be copied out

    def add(self, way: Literal["in", "out"], num_bytes: int, seconds: float) -> None:
        if way == "in":
            self.bytes_in, self.seconds_in = self.bytes_in + num_bytes, self.seconds_in + seconds
        else:
            self.bytes_out, self.seconds_out = self.bytes_out + num_bytes, self.seconds_out + seconds


class StoreStats(NamedTuple):
    """The state of one tier."""

    name: str  # ram, disk
    used_bytes: int
    capacity_bytes: int
    hit_tokens: int  # tokens that were read from it


class TierStats(NamedTuple):
    """KV blocks outside of the cache."""

    stores: tuple[StoreStats, ...] = ()  # fastest first; empty: there are none
    moves: TransferStats = TransferStats()
    num_loading: int = 0  # requests that wait for blocks
    num_queued: int = 0  # blocks to be copied out
    queried_tokens: int = 0  # prompt tokens that the cache did not have, looked up in the tiers
    hit_tokens: int = 0  # of those, the loaded ones
    num_resumed: int = 0  # preempted requests that came back from a tier
    num_swapped_out: int = 0  # preemptions after which the blocks of a request were kept in RAM
    num_swapped_in: int = 0  # of those, the ones after which nothing was computed again
    held_bytes: int = 0  # of RAM that swapped requests hold, or will when the blocks are written

    def held_in(self, store: StoreStats) -> int:
        """Return the bytes in a store that swapped requests hold: only RAM is held."""
        return min(self.held_bytes, store.used_bytes) if store.name == "ram" else 0


NO_TIERS = TierStats()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """All statistics of the engine. Totals count from the start; rates are over the last few seconds."""

    taken_s: float  # time.time()
    uptime_s: float
    num_running: int
    num_waiting: int
    block_size: int
    total_blocks: int  # usable, without the null block, of the KV group that keeps the most tokens
    used_blocks: int  # referenced by a request
    cached_blocks: int  # unreferenced, reusable through the prefix cache
    free_blocks: int  # used + cached + free == total
    wasted_token_slots: int  # positions in used blocks that hold no token yet: below block_size per request
    max_num_seqs: int
    max_model_len: int
    steps: tuple[StepComposition, ...]  # the newest settled steps, newest last
    num_steps: int
    scheduled_requests: int  # sum of the requests of all steps
    prompt_tokens: int  # computed prompt tokens, cache hits not counted
    prompt_tokens_cached: int
    generation_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefix_cache_queries: int  # prompt tokens looked up at admission
    prefix_cache_hits: int  # prompt tokens found in the prefix cache
    prefix_cache_lacks_state: int  # prompt tokens whose K and V were known and computed again for want of a state
    total_places: int  # usable places of recurrent states; 0: the model has none
    used_places: int  # held by requests
    checkpoint_places: int  # hold a checkpoint that no request reads
    num_preemptions: int
    recomputed_tokens: int  # computed again after a preemption
    num_failed_steps: int
    degraded_steps: int  # times that nothing was launched, since all requests waited for their last tokens
    async_depth: int
    corrupted_requests: int  # ended because their row of a step was unusable (NaN)
    runner: RunnerStats
    finished: dict[str, int]  # by finish reason
    ttft: Histogram
    tpot: Histogram
    inter_token: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_len: Histogram
    generation_len: Histogram
    iteration_tokens: Histogram
    requests: tuple[RequestTimeline, ...]  # all running ones, then the first waiting ones
    recent: tuple[RequestTimeline, ...]  # the last finished requests, newest first
    speculation: SpeculationStats = NO_SPECULATION
    tiers: TierStats = NO_TIERS
    kv_groups: tuple[KVGroupStats, ...] = ()  # the other numbers of blocks are those of one of them
    engine: str = "0"  # number of the replica, for labels
    lone_tokens_per_s: float = 0.0  # of one answer alone, in its last 200 steps without drafts; 0: fewer were run

    @property
    def kv_usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1; of several KV groups that of the fullest one."""
        shares = [group.used_blocks / group.total_blocks for group in self.kv_groups]
        own = self.used_blocks / self.total_blocks if self.total_blocks else 0.0
        return max(shares, default=own)

    @property
    def requests_per_step(self) -> float:
        return self.scheduled_requests / self.num_steps if self.num_steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    def picture_s(self, rows: int) -> float | None:
        """Return the seconds that a new picture is expected to take before the answer begins; None: not known."""
        row_s = self.runner.picture_row_s
        return rows * (row_s + self.runner.prompt_token_s) if row_s else None

    def goes_on_from(self, before: EngineStats) -> bool:
        """Return whether `before` is an earlier snapshot of the same engine; a new engine counts from 0."""
        began_s, earlier_s = self.taken_s - self.uptime_s, before.taken_s - before.uptime_s
        return abs(began_s - earlier_s) < CLOCK_S and self.num_steps >= before.num_steps

    def as_of(self, at_s: float) -> EngineStats:
        """Return the snapshot at a later time.
        An idle engine takes no snapshots, so only the clock and the rates change."""
        passed_s = at_s - self.taken_s
        if passed_s <= 0 or self.num_running or self.num_waiting:
            return self
        resting = passed_s > STALE_S
        return replace(
            self,
            taken_s=at_s,
            uptime_s=self.uptime_s + passed_s,
            decode_tokens_per_s=0.0 if resting else self.decode_tokens_per_s,
            prefill_tokens_per_s=0.0 if resting else self.prefill_tokens_per_s,
        )
