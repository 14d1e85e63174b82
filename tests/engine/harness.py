"""A small engine on the fake model, and the invariants of scheduler and block pool as functions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.engine.loop import Drafter, EngineLoop
from localllm.engine.media import EncoderPrompt, MediaSpan
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.block_pool import NULL_BLOCK, BlockPool
from localllm.engine.memory.block_stores import BlockArrived, BlockStore, Entry, Key, Transfers
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.memory.tiers import KVTiers
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import BACKGROUND_PRIORITY, NEVER, Request, RequestOptions, State
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.speculation import Speculation
from localllm.engine.step import DraftSupport, HostBlocks, PromptEmbeds, RunnerStats, StepPlan
from localllm.errors import StepFailed
from localllm.text.grammar import OutputGrammar
from tests.fake_runner import FakePipeline, FakeRunner, first_seen

BLOCK_SIZE = 4
MOST_VERIFIED = 64  # tokens of a step with drafts
MOST_PLACEHOLDERS = 32  # positions that launched guesses may give up again, and a block


class PlannedTransfers(Transfers):
    """Transfers without threads: `advance` does one job. Late, in any order, failing and answered twice, by `dice`."""

    def __init__(self, stores: Sequence[BlockStore], dice: random.Random | None = None) -> None:
        super().__init__(stores)
        self.jobs: list[Callable[[], None]] = []
        self.dice, self.now_s = dice, 0.0

    def clock(self) -> float:
        return self.now_s

    def read(self, load: Any, index: int, key: Key, is_wanted: Callable[[], bool]) -> None:
        dice = self.dice
        if dice is not None and dice.random() < 0.1:
            self.jobs.append(lambda: self._tell(BlockArrived(load, index, None)))  # the disk fails
        else:
            self.jobs.append(lambda: self.do_read(load, index, key))
        if dice is not None and dice.random() < 0.05:
            self.jobs.append(lambda: self._tell(BlockArrived(object(), index, None)))  # of nobody

    def write(self, keys: Sequence[Entry | None], blocks: HostBlocks, num_bytes: int) -> None:
        self.jobs.append(lambda: self.do_write(keys, blocks, num_bytes))

    def clear(self) -> None:
        for store in self.stores:
            store.clear()
        self.jobs.append(lambda: [store.clear() for store in self.stores] and None)

    def advance(self) -> None:
        self.now_s += 0.001 if self.dice is None else self.dice.choice([0.001, 0.001, 5.0])
        if self.jobs:
            self.jobs.pop(0 if self.dice is None else self.dice.randrange(len(self.jobs)))()


@dataclass(slots=True)
class SmallEngine:
    """An engine on the fake model. `tokens`: output by request; `endings`: last outputs; `plans`: every step.
    runner: the one that samples; with stages, the loop's runner is a `FakePipeline` around it."""

    scheduler: Scheduler
    runner: FakeRunner
    loop: EngineLoop
    tokens: dict[str, list[int]] = field(default_factory=dict)
    endings: dict[str, list[EngineOutput]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    longest_draft: int = 0

    def add(self, request_id: str, prompt: Sequence[int], **asked: object) -> Request:
        request = make_request(request_id, prompt, **asked)
        self.loop.submit(request)
        return request

    def run(self, max_steps: int = 2000) -> dict[str, list[int]]:
        """Run until all requests have ended. Every step is checked."""
        for _ in range(max_steps):
            self.loop.step()
            check_invariants(self)
            if not self.scheduler.has_work:
                return self.tokens
        raise AssertionError(f"still at work after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def receive(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.endings, f"news of {output.request_id} after its end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.endings[output.request_id] = [output]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    priority: int = 0,
    is_background: bool = False,
    salt: str | None = None,
    eos: tuple[int, ...] = (),
    grammar: OutputGrammar | None = None,
    embeds: PromptEmbeds | None = None,
    media: tuple[MediaSpan, ...] = (),
    source: EncoderPrompt | None = None,
    max_drafts: int | None = None,
    **params: object,
) -> Request:
    asked = SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(
        request_id,
        prompt,
        asked,
        RequestOptions(priority, salt, is_background=is_background, max_drafts=max_drafts),
        max_output_tokens=max_tokens,
        eos_token_ids=eos,
        grammar=grammar,
        prompt_embeds=embeds,
        media=media,
        source=source,
    )


class EveryOther:
    """A grammar over small numbers: after each token every other token is allowed, and after `length` tokens none."""

    def __init__(self, length: int, fails_after: int | None = None) -> None:
        self.length, self.fails_after = length, fails_after
        self.taken: list[int] = []

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        if len(self.taken) == self.fails_after:
            raise StepFailed("This grammar gives up.")
        assert not self.is_over, "asked what may come after the end"
        bits[:] = sum(1 << token for token in range(31) if self.allows(token))

    def allows(self, token: int) -> bool:
        return (token + sum(self.taken) + len(self.taken)) % 2 == 0

    def refuses(self, token_id: int) -> bool:
        return False

    def may_forbid(self, num_unseen: int) -> bool:
        return True

    def accept(self, token_id: int) -> None:
        assert self.allows(token_id), f"{token_id} may not follow {self.taken}"
        self.taken.append(token_id)

    def fork(self) -> EveryOther:
        other = EveryOther(self.length, self.fails_after)
        other.taken = self.taken[:]
        return other

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.length


def make_engine(
    *,
    num_blocks: int | tuple[int, ...] = 64,
    windows: tuple[int | None, ...] = (None,),
    depth: int = 1,
    num_stages: int = 1,
    drafter: Drafter | None = None,
    vocab_size: int = 32,
    fail_when: object = None,
    runner_type: type[FakeRunner] = FakeRunner,
    num_places: int = 0,
    propose: Callable[[Sequence[int], int], Sequence[int]] | None = None,
    most_drafts: int = 3,
    speculation_type: type[Speculation] = Speculation,
    transfers: PlannedTransfers | None = None,
    swap_bytes: int | None = None,
    **config: object,
) -> SmallEngine:
    """transfers: between the cache and the stores behind it; None: there are none. swap_bytes: see `KVTiers`.
    propose: drafts that the runner makes of a request's known tokens, at most so many; None: it makes none."""
    settings: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "block_size": BLOCK_SIZE,
    }
    settings |= {**config, "num_stages": num_stages}
    sizes = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(windows)
    support = DraftSupport(most_drafts, MOST_VERIFIED, proposes=True) if propose is not None else DraftSupport()
    limits = SchedulerConfig(**settings)  # type: ignore[arg-type]
    ledger = Ledger(sizes, BLOCK_SIZE, windows, step_tokens=limits.max_num_batched_tokens)
    states = StatePool(num_places) if num_places else None
    tiers = None
    if transfers is not None:
        tiers = KVTiers(ledger, (16 * BLOCK_SIZE,) * len(windows), transfers, swap_bytes, clock=transfers.clock)
    scheduler = Scheduler(
        limits,
        CacheManager(limits, ledger, BlockHasher(b"a model", BLOCK_SIZE), states, tiers),
        speculation=speculation_type(support) if propose is not None else None,
    )
    runner = runner_type(
        sizes,
        BLOCK_SIZE,
        windows=windows,
        vocab_size=vocab_size,
        fail_when=fail_when,  # type: ignore[arg-type]
        num_places=num_places,
        propose=propose,
        drafts=support,
    )
    stages = FakePipeline(runner, num_stages) if num_stages > 1 else runner
    loop = EngineLoop(scheduler, stages, depth=depth, drafter=drafter)
    engine = SmallEngine(scheduler, runner, loop)
    loop.deliver = engine.receive
    if transfers is not None:
        loop._wait_for_tier = transfers.advance  # type: ignore[method-assign]
    plan_step = scheduler.schedule

    def watched() -> StepPlan | None:
        decoding, preempted = decoding_ids(scheduler), scheduler.recorder.num_preemptions
        able = {r.request_id for r in scheduler.running if r.request_id in decoding and scheduler._wanted(r)}
        most = -(-len(decoding) // scheduler.config.num_cohorts)
        plan = plan_step()
        if plan is not None and scheduler.speculation is not None and any(row.num_drafts for row in plan.rows):
            running = able & {row.request_id for row in plan.rows}
            assert len(running) >= min(len(able), most), "drafts took the place of another's token"
            assert scheduler.recorder.num_preemptions == preempted, "a request was preempted in a step with drafts"
            assert plan.num_tokens <= MOST_VERIFIED
        if plan is not None:
            check_plan(scheduler, plan)
            assert len(decoding & {row.request_id for row in plan.rows}) <= most, "more than a cohort decodes"
            engine.plans.append(plan)
            engine.longest_draft = max(engine.longest_draft, *(row.num_drafts for row in plan.rows), 0)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    if fail_when is None:
        loop._recover = _raise  # type: ignore[method-assign]
    return engine


def decoding_ids(scheduler: Scheduler) -> set[str]:
    """Return the running requests that have one token to compute, or guesses."""
    running = scheduler.running
    return {r.request_id for r in running if r.num_wanted_tokens <= 1 + r.num_drafts}


def _raise(error: Exception) -> None:
    """Re-raise: except in tests of failing steps, an exception in a step is a bug."""
    raise error


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check I14 and I15: the limits of one step."""
    config = scheduler.config
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert bool(plan.rows or plan.moves)
    assert len(plan.rows) <= config.max_num_seqs
    assert len({row.slot for row in plan.rows}) == len(plan.rows)
    assert all(row.num_scheduled_tokens >= 1 for row in plan.rows)
    assert all(NULL_BLOCK not in blocks for row in plan.rows for blocks in row.new_block_ids)
    for row in plan.rows:
        request = scheduler.requests[row.request_id]
        assert row.num_computed_tokens + row.num_scheduled_tokens == request.num_computed_tokens
        check_windows(scheduler.ledger, request, row.num_computed_tokens)


def check_windows(ledger: Ledger, request: Request, position: int) -> None:
    """Check that the request holds every block that its queries from `position` on read, and none that is long past."""
    size = ledger.block_size
    for pool, window, table in zip(ledger.pools, ledger.windows, request.block_tables, strict=True):
        first = first_seen(window, position) // size
        assert all(table[first:]), f"{request.request_id} has given back what it reads: {table}, from place {first} on"
        assert all(pool.ref_count[block] for block in table[first:])
        past = first_seen(window, max(0, position - MOST_PLACEHOLDERS)) // size
        assert not any(table[:past]), f"{request.request_id} keeps what nothing reads: {table}"


def check_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Check I1 to I6: every block is free or counted, and every name belongs to one block."""
    count = Counter(block for table in tables for block in table)
    count[NULL_BLOCK] = 1
    assert [count[block] for block in range(pool.num_blocks)] == list(pool.ref_count)
    free = pool.free_list()
    assert sorted(free) == [block for block in range(pool.num_blocks) if not count[block]]
    assert pool.num_free == len(free)
    assert pool.num_cached == sum(pool.is_named(block) for block in free)
    names = pool.names()
    assert len(set(names.values())) == len(names)
    assert all(pool.is_named(block) for block in names.values())
    assert sum(pool.is_named(block) for block in range(pool.num_blocks)) == len(names)
    assert not pool.is_named(NULL_BLOCK)


def check_invariants(engine: SmallEngine) -> None:
    scheduler = engine.scheduler
    running = scheduler.running
    scheduler.table.encoded.check_invariants([request.request_id for request in running])
    for group, pool in enumerate(scheduler.ledger.pools):
        check_pool(pool, [*(request.block_tables[group] for request in running), *loading_blocks(scheduler, group)])
    assert len(running) <= scheduler.config.max_num_seqs
    assert len({request.slot for request in running}) == len(running)
    assert len(scheduler.waiting) == len(list(scheduler.waiting))
    assert len(scheduler.waiting) + len(running) == len(scheduler.requests)
    size = scheduler.config.block_size
    for request in scheduler.requests.values():
        n, s, p = request.num_tokens, request.num_drafts, request.num_output_placeholders
        c, f = request.num_computed_tokens, request.num_in_flight_tokens
        assert p >= 0
        assert f >= 0
        assert c <= n + p + s  # I16
        if request.state is State.RUNNING:
            for pool, table in zip(scheduler.ledger.pools, request.block_tables, strict=True):  # S7
                named = [place for place, block in enumerate(table) if pool.is_named(block)]
                assert all((place + 1) * size <= n for place in named), f"{request.request_id}: an unaccepted token"
            assert c - f <= n
            rejected = engine.longest_draft * max(engine.loop.depth, 1)  # positions that drafts may have used
            if request.priority == BACKGROUND_PRIORITY:
                rejected = max(rejected, request.num_lost_tokens - c)  # or a step that was taken back
            assert -(-c // size) <= request.num_blocks <= -(-(c + rejected) // size)  # I9
            assert request.num_blocks * size - c < size + rejected  # waste below one block
        else:
            assert request.block_tables == []
            assert request.slot == -1
        if not scheduler.launched:  # S6
            assert p == f == 0
    check_states(scheduler)
    stats = scheduler.stats(1, RunnerStats())
    assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks
    writable_twice(engine)


def loading_blocks(scheduler: Scheduler, group: int) -> list[list[int]]:
    """Return the blocks of each load: requests hold at most half of them, and their requests wait without a slot."""
    tiers = scheduler.cache.tiers
    loads = [] if tiers is None else tiers._loads
    loading = [request for request in scheduler.waiting if request.state is State.LOADING]
    assert sorted(map(id, loading)) == sorted(id(load.request) for load in loads)
    held = [
        [block for g, block in load.kept if g == group] + [block for g, _, block in load.wanted if g == group]
        for load in loads
    ]
    swapped = len(loads) == 1 and loads[0].request in tiers.swaps
    assert sum(map(len, held)) <= scheduler.ledger.pools[group].capacity / (1 if swapped else 2)
    return held


def check_states(scheduler: Scheduler) -> None:
    """Check H5 and H8: every place is held, named or free, and the KV of each checkpoint is there."""
    states = scheduler.cache.states
    holders = [request for request in scheduler.requests.values() if request.held_state is not None]
    if states is None:
        assert not holders
        return
    assert holders == [request for request in scheduler.requests.values() if request.state is State.RUNNING]
    assert not states._planned, "a save of a step that was planned"
    own = [request.held_state.slot for request in holders] + [save.slot for save in states._pending]
    assert len(set(own)) == len(own)
    assert 0 not in own
    pool = states.pool
    named = pool.checkpoints()
    assert not set(own) & set(named.values())
    assert pool.num_held == len(set(own) | set(states._read))
    free = pool.num_available - pool.num_checkpoints
    assert len(set(own) | set(states._read) | set(named.values())) + free == pool.capacity
    for name, node in pool._nodes.items():
        assert states._has_kv(name)
        assert node.slot or node.children
        assert named.get(name, 0) == node.slot
    assert len(states._pending) <= 2 * scheduler.config.max_num_seqs * (1 + len(scheduler.launched))


def writable_twice(engine: SmallEngine) -> None:
    """Check I8: a block held by two requests is full and named, so it is not written again. After a NaN, running
    requests name no blocks any more."""
    scheduler = engine.scheduler
    for request in scheduler.running:
        full = min(request.num_computed_tokens, request.num_tokens) // scheduler.config.block_size
        for pool, table in zip(scheduler.ledger.pools, request.block_tables, strict=True):
            for index, block in enumerate(table):
                if block != NULL_BLOCK and pool.ref_count[block] > 1:
                    assert index < full, f"block {block} of {request.request_id} is shared and not full"
                    assert pool.is_named(block) or request.num_registered_blocks == NEVER


class Letters:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % 100 for character in text]


Scores = Callable[[Sequence[int]], Sequence[float]]


def all_the_way(
    scores: Scores, prompt: Sequence[int], width: int, max_tokens: int, eos: int | None, penalty: float
) -> list[tuple[list[int], float]]:
    """vLLM's search written down plainly: to max_tokens, whatever has ended. Answers without eos, and their sums."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended = []

    def rank(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(prompt) + len(beam[0])) ** penalty

    for _ in range(max_tokens):
        longer = []
        for tokens, total in beams:
            following = scores([*prompt, *tokens])
            for token in sorted(range(len(following)), key=lambda i: -following[i])[: 2 * width]:
                if token == eos:
                    ended.append((tokens, total + following[token]))
                else:
                    longer.append(([*tokens, token], total + following[token]))
        beams = sorted(longer, key=rank, reverse=True)[:width]
    return sorted([*ended, *beams], key=rank, reverse=True)[:width]
