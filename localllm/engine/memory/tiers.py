"""KV blocks beyond the cache: which blocks are copied out, which come back, and for whom.

A tier is more prefix cache. What leaves is a named block, so nothing about a request has to be kept: a preempted
request finds its blocks again by name, as the next turn of a chat does after a restart.

    out     named blocks when their request ends or is preempted, a few per step; others when they are evicted, in the
            step that reuses them. A copy is written once its step is settled: what fails is never kept
    back    a waiting request whose prompt goes on outside of the cache is LOADING: it holds blocks and no slot. Blocks
            that were read are copied in with the next step and named; then the request waits again and finds them as
            any other hit. A block that is missing, damaged or late ends the hit, and the rest is computed

The copies are `StepPlan.moves`, in the order in which they were decided: the runner applies them before the rows.
Does not know: files and threads (block_stores.py), tensors, why a request is admitted.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from localllm.engine.memory.block_stores import BlockArrived, Entry, Key, Transfers
from localllm.engine.memory.ledger import Ledger
from localllm.engine.request import Request, State
from localllm.engine.stats import StoreStats, TierStats, TransferStats
from localllm.engine.step import Bytes, HostBlocks, Move

STEP_BYTES = 64 * 2**20
"""Bytes copied out of queued blocks in one step, and copied in: what a step may wait for."""
MOST_OUT_BYTES = 256 * 2**20
"""Bytes that were copied out and are not written yet. Blocks that are evicted meanwhile are lost."""
MOST_READ_BYTES = 128 * 2**20  # of one load, read ahead of the steps that copy them in
LATE_S, LATE_FACTOR = 5.0, 4.0
"""A load is ended if no block arrives for this time, or if it takes longer than both this and a multiple of
what computing would take."""
WEIGHT = 0.25  # of a new measurement
TRY_EVERY = 16  # of loads that would not pay, every 16th is made, to measure again
LEAST_TOKENS = 32  # prompt tokens of a step that measures


class TierCosts:
    """Measured rates: tokens computed per second of prompts, and bytes read per second."""

    def __init__(self) -> None:
        self.tokens_per_s = self.bytes_per_s = 0.0  # 0: not measured yet
        self._num_refused = 0

    def observe_prompt(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= LEAST_TOKENS and seconds > 0:
            self.tokens_per_s = _mixed(self.tokens_per_s, num_tokens / seconds)

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self.bytes_per_s = _mixed(self.bytes_per_s, num_bytes / seconds)

    def compute_s(self, num_tokens: int) -> float:
        """Return the seconds that computing prompt tokens takes; 0: not known."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Return whether reading is faster than computing. What is not known yet is tried, and what was slow is tried
        again now and then."""
        if not (self.tokens_per_s and self.bytes_per_s):
            return True
        if num_bytes / self.bytes_per_s < self.compute_s(num_tokens):
            return True
        self._num_refused += 1
        return self._num_refused % TRY_EVERY == 0


def _mixed(old: float, new: float) -> float:
    return new if not old else old + WEIGHT * (new - old)


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks that one request waits for."""

    request: Request
    kept: list[tuple[int, int]]  # (group, block) that were cached, referenced so that they stay
    wanted: list[tuple[int, bytes, int]]  # (group, name, block) to fill, in order of their positions
    num_bytes: int
    deadline_s: float
    heard_s: float  # when the last block arrived
    num_asked: int = 0
    filled: list[int] = field(default_factory=list)  # indexes into `wanted` whose copy is planned
    answered: set[int] = field(default_factory=set)  # read, or known to be missing
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Copies:
    """A move under construction; one out of the cache is kept until its step is settled."""

    group: int
    is_load: bool
    blocks: list[int] = field(default_factory=list)
    rows: list[Bytes] = field(default_factory=list)  # into the cache
    keys: list[Entry | None] = field(default_factory=list)  # out of it; None: forgotten meanwhile
    host: HostBlocks | None = None
    step_id: int = 0

    def sealed(self, step_id: int) -> Move:
        """Return the move of the step that is launched now."""
        self.step_id = step_id
        move = Move(self.group, tuple(self.blocks), self.is_load, HostBlocks(lambda: self.rows))
        self.host = move.host
        return move


class KVTiers:
    """Decides what moves between the cache and the stores behind it. All methods run on the engine's thread."""

    def __init__(
        self, ledger: Ledger, block_bytes: Sequence[int], transfers: Transfers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """block_bytes: of one block of each KV group."""
        assert len(block_bytes) == len(ledger.pools), (block_bytes, ledger.num_blocks)
        self.ledger, self.transfers, self.costs, self._clock = ledger, transfers, TierCosts(), clock
        self._block_bytes = tuple(block_bytes)
        self._private: set[Key] = set()  # names of requests that must not reach a disk
        self._queued: dict[Key, tuple[int, int]] = {}  # block, and the step after which its content is sure
        self._outs: deque[_Copies] = deque()  # of launched steps, oldest first
        self._moves: list[_Copies] = []  # of the step being planned, in order
        self._evicted: Key | None = None  # the name that is dropped next, since its block is evicted
        self._leaving: set[Key] = set()  # copied out, not written yet
        self._out_bytes = 0
        self._loads: list[_Load] = []
        self._loaded: dict[str, int] = {}  # tokens that a waiting request has loaded, by its id
        self._launched = self._settled = 0  # step ids
        self._arrived: deque[BlockArrived] = deque()
        self.moved, self.queried_tokens, self.num_resumed = TransferStats(), 0, 0
        self.hit_tokens: Counter[str] = Counter()  # by store
        for group, pool in enumerate(ledger.pools):
            pool.on_evicted.append(partial(self._on_evicted, group))
            pool.on_dropped.append(partial(self._on_dropped, group))

    # ---- out ---------------------------------------------------------------------------------------------------------

    def named(self, request: Request, first: int, end: int) -> None:
        """Note who names blocks: the blocks of a private request do not reach a disk."""
        if not (request.is_private or self._private):
            return
        keys = ((group, name) for group in range(len(self._block_bytes)) for name in request.block_hashes[first:end])
        (self._private.update if request.is_private else self._private.difference_update)(keys)

    def released(self, request: Request) -> None:
        """Queue the named blocks of a request that gives them back."""
        end = min(request.num_registered_blocks, request.num_blocks, len(request.block_hashes))
        sure = (request.num_computed_tokens - request.num_in_flight_tokens) // self.ledger.block_size
        for group, (pool, table) in enumerate(zip(self.ledger.pools, request.block_tables, strict=True)):
            for index, block in enumerate(table[:end]):
                key = group, request.block_hashes[index]
                if block and pool.name_of(block) == key[1] and key not in self._leaving and key not in self.transfers:
                    self._queued[key] = block, 0 if index < sure else self._launched

    def _on_evicted(self, group: int, name: bytes, block: int) -> None:
        """Copy a block out in the step that reuses it."""
        self._evicted = key = group, name
        queued = self._queued.get(key)
        if queued is None or key in self.transfers:
            return
        if queued[1] <= self._settled and self._may_leave(key) and self._out_bytes < MOST_OUT_BYTES:
            self._copy_out(key, block)
        else:
            self.moved.num_lost_blocks += 1

    def _on_dropped(self, group: int, name: bytes, block: int) -> None:
        """Forget what is known of a name. Where it is not dropped by an eviction, what the block holds is not sure:
        copies that are not written yet are not written."""
        key = group, name
        self._queued.pop(key, None)
        if self._evicted != key:
            for out in (*self._outs, *self._moves):
                out.keys = [None if entry is not None and entry[0] == key else entry for entry in out.keys]
            self._leaving.discard(key)
        self._evicted = None
        self._private.discard(key)

    def _may_leave(self, key: Key) -> bool:
        return self.transfers.accepts(is_private=key in self._private)

    def _copy_out(self, key: Key, block: int) -> None:
        copies = self._copies(key[0], is_load=False)
        copies.blocks.append(block)
        copies.keys.append((key, key in self._private))
        self._leaving.add(key)
        self._out_bytes += self._block_bytes[key[0]]

    def _copies(self, group: int, *, is_load: bool) -> _Copies:
        """Return the last move of the step if it is of this kind, or a new one: their order counts."""
        if not self._moves or (self._moves[-1].group, self._moves[-1].is_load) != (group, is_load):
            self._moves.append(_Copies(group, is_load))
        return self._moves[-1]

    def _copy_queued_out(self) -> None:
        """Copy queued blocks out, oldest first."""
        left = min(STEP_BYTES, MOST_OUT_BYTES - self._out_bytes)
        for key, (block, step_id) in list(self._queued.items()):
            if left <= 0 or step_id > self._settled:
                break
            del self._queued[key]
            if self.ledger.pools[key[0]].find(key[1]) == block and self._may_leave(key):
                self._copy_out(key, block)
                left -= self._block_bytes[key[0]]

    # ---- back --------------------------------------------------------------------------------------------------------

    def loads(self, request: Request, names: Sequence[bytes], num_cached: int, multiple: int, *, begins: bool) -> bool:
        """Let a waiting request load the blocks behind its hit of `num_cached` blocks, if they are kept, and reading
        them pays. Return False if not. begins: False to load in a later step."""
        if request.has_loaded:
            return False
        count = self.ledger.reach(names, multiple, lambda group, name: (group, name) in self.transfers)
        if count <= num_cached:
            return False
        found = self.ledger.blocks_of(names, count)
        kept = [(group, block) for _, group, block in found if block is not None]
        missing = [(group, names[index]) for index, group, block in found if block is None]
        num_bytes = sum(self._block_bytes[group] for group, _ in missing)
        num_tokens = (count - num_cached) * self.ledger.block_size
        counts = Counter(group for group, _ in missing)
        if not self._have_room(counts, kept):
            return False
        if not begins:
            return True
        request.has_loaded = True  # once until it is admitted: what was loaded may be evicted again meanwhile
        if not self.costs.is_worth(num_tokens, num_bytes):
            return False
        for group, block in kept:
            self.ledger.pools[group].acquire([block])
        blocks = {group: iter(self.ledger.pools[group].take(count)) for group, count in counts.items()}
        compute_s, now_s = self.costs.compute_s(num_tokens), self._clock()
        late_s = max(LATE_S, LATE_FACTOR * compute_s) if compute_s else math.inf
        wanted = [(group, name, next(blocks[group])) for group, name in missing]
        load = _Load(request, kept, wanted, num_bytes, now_s + late_s, now_s)
        self._loads.append(load)
        request.state = State.LOADING
        self._ask(load)
        return True

    def _have_room(self, counts: Counter[int], kept: Sequence[tuple[int, int]]) -> bool:
        """Return whether the blocks of a load are free, and at most half of each pool is held by loads then: what they
        hold makes no progress by itself."""
        held = Counter(group for load in self._loads for group, *_ in (*load.kept, *load.wanted))
        own = Counter(group for group, _ in kept)
        for group, pool in enumerate(self.ledger.pools):
            new = counts[group] + pool.num_unreferenced([block for g, block in kept if g == group])
            if new > pool.num_free or 2 * (held[group] + own[group] + counts[group]) > pool.capacity:
                return False
        return True

    def _ask(self, load: _Load) -> None:
        """Ask for the next blocks of a load, not too far ahead."""
        ahead = (load.num_asked - len(load.answered)) * max(self._block_bytes)
        while load.num_asked < len(load.wanted) and ahead < MOST_READ_BYTES:
            group, name, _ = load.wanted[load.num_asked]
            self.transfers.read(load, load.num_asked, (group, name), lambda: not load.is_over)
            load.num_asked += 1
            ahead += self._block_bytes[group]

    def _take_in(self) -> None:
        """Copy in the blocks that have arrived, and end the loads that have all of theirs, or are late."""
        while self.transfers.news:
            news = self.transfers.news.popleft()
            if isinstance(news, BlockArrived):
                self._arrived.append(news)
            else:
                self._out_bytes -= news.num_bytes
                self._leaving.difference_update(entry[0] for entry in news.keys if entry is not None)
                self.moved.add("out", news.num_bytes, news.seconds)
        left = STEP_BYTES
        while self._arrived and left > 0:
            load, index, block, store, seconds = self._arrived.popleft()
            if load not in self._loads or index in load.answered:
                continue
            load.answered.add(index)
            load.heard_s = self._clock()
            if block is not None:
                self._copy_in(load, index, block)
                left -= block.nbytes
                self.moved.add("in", block.nbytes, seconds)
                self.costs.observe_read(block.nbytes, seconds)
                self.hit_tokens[store] += self.ledger.block_size if load.wanted[index][0] == self._main else 0
            self._ask(load)
        for load in tuple(self._loads):
            if len(load.answered) == len(load.wanted) or self._clock() > min(load.deadline_s, load.heard_s + LATE_S):
                self._end(load)

    @property
    def _main(self) -> int:
        return self.ledger.pools.index(self.ledger.main_pool)

    def _copy_in(self, load: _Load, index: int, content: Bytes) -> None:
        group, _, block = load.wanted[index]
        copies = self._copies(group, is_load=True)
        copies.blocks.append(block)
        copies.rows.append(content)
        load.filled.append(index)

    def _end(self, load: _Load) -> None:
        """Name what was loaded and give all blocks back to the cache, where the request finds them."""
        for index in load.filled:
            group, name, block = load.wanted[index]
            self.ledger.pools[group].register(block, name)
            if load.request.is_private:
                self._private.add((group, name))
        self._loaded[load.request.request_id] = self.ledger.block_size * sum(
            1 for index in load.filled if load.wanted[index][0] == self._main
        )
        self._drop(load)

    def _drop(self, load: _Load) -> None:
        self._loads.remove(load)
        load.is_over = True
        for group, pool in enumerate(self.ledger.pools):
            held = [block for g, block in load.kept if g == group]
            pool.release([*held, *(block for g, _, block in load.wanted if g == group)])
        request = load.request
        request.state = State.PREEMPTED if request.num_preemptions else State.WAITING

    def cancel(self, request: Request) -> None:
        """End the load of a request that ends; what has not been copied in is lost."""
        self._loaded.pop(request.request_id, None)
        for load in [load for load in self._loads if load.request is request]:
            self._drop(load)

    def cancel_last(self) -> bool:
        """End the load that began last, since a running request needs its blocks. False: there is none."""
        if self._loads:
            self._end(self._loads[-1])
            return True
        return False

    def entered(self, request: Request, num_blocks: int) -> None:
        """Count what an admitted request found, and let it load again after a preemption."""
        request.has_loaded = False
        loaded = self._loaded.pop(request.request_id, 0)
        request.num_loaded_tokens += min(loaded, num_blocks * self.ledger.block_size)
        if request.scheduled_s is None:
            self.queried_tokens += request.prompt_len - num_blocks * self.ledger.block_size + loaded
        else:
            self.num_resumed += loaded > 0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Plan the copies that do not depend on what else the step does."""
        self._take_in()
        if not self._loads and self._queued:
            self._copy_queued_out()

    def take_moves(self, step_id: int) -> tuple[Move, ...]:
        """Return the copies of the step that is launched now."""
        self._launched = step_id
        if not self._moves:
            return ()
        moves = tuple([copies.sealed(step_id) for copies in self._moves])
        self._outs += [copies for copies in self._moves if not copies.is_load]
        self._moves = []
        return moves

    def settle(self, step_id: int) -> None:
        """Write what the steps up to this one have copied out."""
        self._settled = step_id
        while self._outs and self._outs[0].step_id <= step_id:
            out = self._outs.popleft()
            assert out.host is not None
            self.transfers.write(out.keys, out.host, self._bytes_of(out))

    def _bytes_of(self, out: _Copies) -> int:
        return len(out.blocks) * self._block_bytes[out.group]

    @property
    def has_moves(self) -> bool:
        """Return whether the next step has copies, even if it has no rows."""
        return bool(self._moves)

    @property
    def is_loading(self) -> bool:
        """Return whether requests hold blocks that are being loaded."""
        return bool(self._loads)

    @property
    def has_work(self) -> bool:
        """Return whether blocks are to be copied. Queued ones wait for those that are being written."""
        return bool(self._moves or self._loads or self._queued or self.transfers.news)

    @property
    def waits(self) -> bool:
        """Return whether nothing can be copied before a thread tells of a block."""
        return not self.transfers.news and not self._arrived and bool(self._loads or self._leaving)

    # ---- failures ----------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Drop everything that is kept, since any of it may contain NaN, and what is on its way."""
        for load in tuple(self._loads):
            self._drop(load)
        self._queued.clear()
        for out in (*self._outs, *self._moves):
            self._leaving.difference_update(entry[0] for entry in out.keys if entry is not None)
            out.keys = [None] * len(out.keys)
        self.transfers.clear()

    def clear(self) -> None:
        """Forget what is on its way. The cache has been cleared: no block is given back."""
        for load in self._loads:
            load.is_over = True
            load.request.state = State.PREEMPTED if load.request.num_preemptions else State.WAITING
        for out in (*self._outs, *self._moves):
            self._out_bytes -= 0 if out.is_load else self._bytes_of(out)
            self._leaving.difference_update(entry[0] for entry in out.keys if entry is not None)
        for held in (self._loads, self._loaded, self._queued, self._outs, self._moves, self._private):
            held.clear()
        self._settled = self._launched

    def stats(self) -> TierStats:
        stores = tuple(
            StoreStats(store.name, store.used_bytes, store.capacity_bytes, self.hit_tokens[store.name])
            for store in self.transfers.stores
        )
        return TierStats(
            stores, replace(self.moved), len(self._loads), len(self._queued), self.queried_tokens,
            sum(self.hit_tokens.values()), self.num_resumed,
        )  # fmt: skip
