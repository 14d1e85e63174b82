"""KV blocks beyond the cache: which blocks are copied out, which come back, and for whom.

A tier is more prefix cache. What leaves is a named block, so nothing about a request has to be kept: a preempted
request finds its blocks again by name, as the next turn of a chat does after a restart. Where it pays, the blocks of a
preempted request are also held in RAM, with the last ones, which have no name of their content (swaps.py).

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
from typing import Literal

from localllm.engine.memory.block_stores import BlockArrived, Entry, Key, RamStore, Transfers
from localllm.engine.memory.ledger import Hit, Ledger
from localllm.engine.memory.swaps import Swaps
from localllm.engine.recorder import now_s
from localllm.engine.request import Request, State
from localllm.engine.stats import StoreStats, TierStats, TransferStats
from localllm.engine.step import Bytes, HostBlocks, Move, StepPlan

STEP_BYTES = 64 * 2**20
"""Bytes copied out of queued blocks in one step, and copied in: what a step may wait for."""
SHARED_STEP_BYTES = 8 * 2**20
"""Bytes of one step where the model is in another process: they travel over a socket while the step waits."""
MOST_OUT_BYTES = 256 * 2**20
"""Bytes that were copied out and are not written yet. Blocks that are evicted meanwhile are lost."""
MOST_READ_BYTES = 128 * 2**20  # of one load, read ahead of the steps that copy them in
LATE_S, LATE_FACTOR = 5.0, 4.0
"""A load is ended if no block arrives for this time, or if it takes longer than both this and a multiple of
what computing would take."""
WEIGHT = 0.25  # of a new measurement
TRY_EVERY = 16  # of loads that would not pay, every 16th is made, to measure again
LEAST_TOKENS = 32  # prompt tokens of a step that measures
OVERLAP = 0.2  # of the time of copies out: most of it passes beside steps

CopyKind = Literal["read", "copy in", "copy out", "write"]
"""By a thread from a store, by a step into the cache, by a step out of it, by a thread to the fastest store."""


class TierCosts:
    """Measured times: of computing prompt tokens, by the context that they attend to, and of each kind of copy."""

    def __init__(self) -> None:
        self._token_s: dict[int, float] = {}  # seconds of a token, by bucket of its position
        self._byte_s: dict[CopyKind, float] = {}  # seconds of a byte
        self._num_refused = 0

    def observe_prompt(self, num_tokens: int, seconds: float, position: int = 0) -> None:
        """Take in the time of a step that computed tokens of prompts. position: the mean of theirs."""
        if num_tokens >= LEAST_TOKENS and seconds > 0:
            bucket = _bucket(position)
            self._token_s[bucket] = _mixed(self._token_s.get(bucket), seconds / num_tokens)

    def observe_copy(self, kind: CopyKind, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self._byte_s[kind] = _mixed(self._byte_s.get(kind), seconds / num_bytes)

    def compute_s(self, first: int, end: int) -> float:
        """Return the seconds that computing positions of a prompt takes; 0: not known. A context that has not been
        measured costs what the nearest one did."""
        seconds, known = 0.0, self._token_s
        while first < end and known:
            bucket = _bucket(first)
            part = min(end, BUCKET_TOKENS << bucket) - first
            seconds += part * known[min(known, key=lambda each: abs(each - bucket))]
            first += part
        return seconds

    def copy_s(self, num_bytes: int, *kinds: CopyKind) -> float:
        """Return the seconds of these copies of as many bytes, one after the other; 0: not known."""
        return num_bytes * sum([self._byte_s.get(kind, 0.0) for kind in kinds])

    def is_worth(self, first: int, end: int, num_bytes: int) -> bool:
        """Return whether reading blocks is faster than computing their positions. What is not known yet is tried, and
        what was slow is tried again now and then."""
        compute_s = self.compute_s(first, end)
        if not (compute_s and "read" in self._byte_s) or self.copy_s(num_bytes, "read", "copy in") < compute_s:
            return True
        self._num_refused += 1
        return self._num_refused % TRY_EVERY == 0

    def swap_pays(self, first: int, end: int, num_bytes: int, num_unsaved: int) -> bool:
        """Return whether copying blocks out and in is faster than computing these positions again. What is not known
        yet is tried. num_unsaved: bytes of the blocks that are not outside of the cache yet."""
        compute_s = self.compute_s(first, end)
        out_s, in_s = self.copy_s(num_unsaved, "copy out", "write"), self.copy_s(num_bytes, "read", "copy in")
        return not (compute_s and in_s) or OVERLAP * out_s + in_s < compute_s


BUCKET_TOKENS = 1024


def _bucket(position: int) -> int:
    """Return the number of the bucket of a position: the first 1024, then twice as many each time."""
    return (position // BUCKET_TOKENS).bit_length()


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


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
        self, ledger: Ledger, block_bytes: Sequence[int], transfers: Transfers, swap_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic, step_bytes: int = STEP_BYTES,
    ) -> None:  # fmt: skip
        """block_bytes: of one block of each KV group. swap_bytes: of RAM that swapped requests may hold; None: half of
        the tier. step_bytes: that queued blocks and loads may move in one step."""
        assert len(block_bytes) == len(ledger.pools), (block_bytes, ledger.num_blocks)
        self.ledger, self.transfers, self.costs, self._clock = ledger, transfers, TierCosts(), clock
        self._block_bytes, self._step_bytes = tuple(block_bytes), step_bytes
        self._private: set[Key] = set()  # names of requests that must not reach a disk
        self._queued: dict[Key, int] = {}  # blocks to copy out, oldest first
        self._launched: deque[_Copies] = deque()  # of launched steps, oldest first
        self._moves: list[_Copies] = []  # of the step being planned, in order
        self._evicted: Key | None = None  # the name that is dropped next, since its block is evicted
        self._leaving: set[Key] = set()  # copied out, not written yet
        self._out_bytes = 0
        self._loads: list[_Load] = []
        self._handing: dict[str, set[Key]] = {}  # blocks of requests that another engine continues, by their ids
        self._loaded: dict[str, int] = {}  # tokens that a waiting request has loaded, by its id
        self._arrived: deque[BlockArrived] = deque()
        ram = next((store for store in transfers.stores if isinstance(store, RamStore)), None)
        most_bytes = 0 if ram is None else ram.capacity_bytes // 2
        self.swaps = Swaps(ledger, block_bytes, ram, most_bytes if swap_bytes is None else swap_bytes)
        self.moved, self.queried_tokens, self.num_resumed = TransferStats(), 0, 0
        self.num_swapped_out = self.num_swapped_in = 0
        self.hit_tokens: Counter[str] = Counter()  # by store
        for group, pool in enumerate(ledger.pools):
            pool.on_evicted.append(partial(self._on_evicted, group))
            pool.on_dropped.append(partial(self._on_dropped, group))

    # ---- out ---------------------------------------------------------------------------------------------------------

    def named(self, request: Request, first: int, end: int) -> None:
        """Note who names blocks: the blocks of a private request do not reach a disk."""
        if not (request.is_private or self._private):
            return
        names, pools = request.block_hashes[first:end], self.ledger.pools
        keys = ((g, name) for g, pool in enumerate(pools) for name in names if pool.find(name) is not None)
        (self._private.update if request.is_private else self._private.difference_update)(keys)

    def swap_out(self, request: Request) -> None:
        """Keep all that a running request has computed, if it is about to be preempted, RAM has room, and bringing it
        back is faster than computing it again."""
        swap = self.swaps.plan(request)
        if swap is None:
            return
        num_bytes = self.swaps.bytes_of(swap.keys)
        num_unsaved = self.swaps.bytes_of(key for key in swap.keys if key not in self.transfers)
        first = swap.num_resident * self.ledger.block_size
        if self.costs.swap_pays(first, swap.num_tokens, num_bytes, num_unsaved):
            self.swaps.begin(request, swap._replace(written_by_s=self._clock() + LATE_S))
            self._private.update((group, name) for group, name in swap.keys if name in swap.tail)
            request.num_swaps += 1
            request.note("Swapped out", now_s())
            self.num_swapped_out += 1

    def released(self, request: Request) -> None:
        """Queue the named blocks of a request that gives them back."""
        if request in self.swaps:
            names = self.swaps.names(request)
        elif self.transfers.accepts(is_private=request.is_private):
            names = request.block_hashes[: min(request.num_registered_blocks, request.num_blocks)]
        else:
            return
        for group, (pool, table) in enumerate(zip(self.ledger.pools, request.block_tables, strict=True)):
            for name, block in zip(names, table, strict=False):
                key = group, name
                if block and pool.name_of(block) == name and key not in self._leaving and key not in self.transfers:
                    self._queued[key] = block

    def hand_over(self, request: Request) -> None:
        """Note a request whose blocks were queued and that another engine continues."""
        keys = {(group, name) for group in range(len(self._block_bytes)) for name in request.block_hashes}
        self._handing[request.request_id] = {key for key in keys if self._is_leaving(key)}

    def _is_leaving(self, key: Key) -> bool:
        return key in self._queued or key in self._leaving

    def take_handed_over(self) -> list[str]:
        """Return the ids of requests whose blocks have all been written since the last call, or were lost."""
        handed = [name for name, keys in self._handing.items() if not any(map(self._is_leaving, keys))]
        for name in handed:
            del self._handing[name]
        return handed

    def stop_hand_over(self, request_id: str) -> bool:
        """Forget a request whose blocks are leaving. Return False if there is none with this id."""
        return self._handing.pop(request_id, None) is not None

    def _on_evicted(self, group: int, name: bytes, block: int) -> None:
        """Copy a block out in the step that reuses it: behind the steps that wrote it, in the order of the device."""
        self._evicted = key = group, name
        if key not in self._queued or key in self.transfers:
            return
        if self._may_leave(key) and self._out_bytes < MOST_OUT_BYTES:
            self._copy_out(key, block)
        else:
            self.moved.num_lost_blocks += 1

    def _on_dropped(self, group: int, name: bytes, block: int) -> None:
        """Forget what is known of a name. Where it is not dropped by an eviction, what the block holds is not sure:
        copies that are not written yet are not written."""
        key = group, name
        self._queued.pop(key, None)
        if self._evicted != key:
            for out in (*self._launched, *self._moves):
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
        left = min(self._step_bytes, MOST_OUT_BYTES - self._out_bytes)
        for key, block in list(self._queued.items()):
            if left <= 0:
                break
            del self._queued[key]
            if self.ledger.pools[key[0]].find(key[1]) == block and self._may_leave(key):
                self._copy_out(key, block)
                left -= self._block_bytes[key[0]]

    # ---- back --------------------------------------------------------------------------------------------------------

    def loads(self, request: Request, names: Sequence[bytes], hit: Hit, multiple: int, *, begins: bool) -> bool:
        """Let a waiting request load the blocks behind its hit, if they are kept, and reading them pays. Return False
        if not. begins: False to load in a later step."""
        if request.has_loaded:
            return False
        names, end = self._reach(request, names, multiple)
        first, found = hit.num_tokens(self.ledger.block_size), self.ledger.blocks_of(names, end)
        missing = [(index, group) for index, group, block in found if block is None]
        if end <= first or not missing:
            return False
        if any((group, names[index]) not in self.transfers for index, group in missing):
            return True  # they are still being written
        kept = [(group, block) for _, group, block in found if block is not None]
        num_bytes = sum(self._block_bytes[group] for _, group in missing)
        counts = Counter(group for _, group in missing)
        if not self._have_room(counts, kept, is_swapped=request in self.swaps):
            return False
        if not begins:
            return True
        request.has_loaded = True  # once until it is admitted: what was loaded may be evicted again meanwhile
        if not self.costs.is_worth(first, end, num_bytes):
            return False
        for group, block in kept:
            self.ledger.pools[group].acquire([block])
        blocks = {group: iter(self.ledger.pools[group].take(count)) for group, count in counts.items()}
        compute_s, begun_s = self.costs.compute_s(first, end), self._clock()
        late_s = max(LATE_S, LATE_FACTOR * compute_s) if compute_s else math.inf
        wanted = [(group, names[index], next(blocks[group])) for index, group in missing]
        load = _Load(request, kept, wanted, num_bytes, begun_s + late_s, begun_s)
        self._loads.append(load)
        request.state = State.LOADING
        request.note("Loading", now_s())
        self._ask(load)
        return True

    def _reach(self, request: Request, names: Sequence[bytes], multiple: int) -> tuple[Sequence[bytes], int]:
        """Return the names of the blocks that a request can begin from, and where it would continue: what is cached,
        kept or, of a swapped request, still being written."""
        if request in self.swaps:
            end = self.swaps.position(request)
            own = self.swaps.names(request, end)
            found = self.ledger.blocks_of(own, end)
            missing = [(group, own[index]) for index, group, block in found if block is None]
            missing = [key for key in missing if key not in self.transfers]
            is_late = self.swaps.is_late(request, self._clock())
            if not missing or (not is_late and all(key in self._leaving for key in missing)):
                return own, end
            self.swaps.end(request)  # a block was lost: what is left has the names of its content
        count = self.ledger.reach(names, multiple, lambda group, name: (group, name) in self.transfers)
        return names[:count], count * self.ledger.block_size

    def _have_room(self, counts: Counter[int], kept: Sequence[tuple[int, int]], *, is_swapped: bool) -> bool:
        """Return whether the blocks of a load are free, and at most half of each pool is held by loads then: what they
        hold makes no progress by itself. A swapped request may load alone what it held before."""
        most = 1.0 if is_swapped and not self._loads else 0.5
        held = Counter(group for load in self._loads for group, *_ in (*load.kept, *load.wanted))
        own = Counter(group for group, _ in kept)
        for group, pool in enumerate(self.ledger.pools):
            new = counts[group] + pool.num_unreferenced([block for g, block in kept if g == group])
            if new > pool.num_free or held[group] + own[group] + counts[group] > most * pool.capacity:
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
                self.costs.observe_copy("write", news.num_bytes, news.first_s)
        left = self._step_bytes
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
                self.costs.observe_copy("read", block.nbytes, seconds)
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
        num_blocks = sum(1 for index in load.filled if load.wanted[index][0] == self._main)
        self._loaded[load.request.request_id] = num_blocks * self.ledger.block_size
        load.request.note(f"Loaded {num_blocks} blocks", now_s())
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
        self.swaps.end(request)
        for load in [load for load in self._loads if load.request is request]:
            self._drop(load)

    def cancel_last(self) -> bool:
        """End the load that began last, since a running request needs its blocks. False: there is none."""
        if self._loads:
            self._end(self._loads[-1])
            return True
        return False

    def entered(self, request: Request, num_tokens: int) -> None:
        """Count what an admitted request found, and let it load again after a preemption."""
        request.has_loaded = False
        loaded = self._loaded.pop(request.request_id, 0)
        request.num_loaded_tokens += min(loaded, num_tokens)
        if request in self.swaps:
            if num_tokens == self.swaps.position(request):
                self.num_swapped_in += 1
                request.note("Swapped in", now_s())
            self.swaps.end(request)
        if request.scheduled_s is None:
            self.queried_tokens += request.prompt_len - num_tokens + loaded
        else:
            self.num_resumed += loaded > 0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Plan the copies that do not depend on what else the step does."""
        if self.transfers.news or self._arrived or self._loads:  # most steps have none
            self._take_in()
        if not self._loads and self._queued:
            self._copy_queued_out()

    def take_moves(self, step_id: int) -> tuple[Move, ...]:
        """Return the copies of the step that is launched now."""
        if not self._moves:
            return ()
        moves = tuple([copies.sealed(step_id) for copies in self._moves])
        self._launched += self._moves
        self._moves = []
        return moves

    def settle(self, plan: StepPlan, seconds: float) -> None:
        """Write what the steps up to this one have copied out, and learn from the step's time in seconds."""
        chunks = [row for row in plan.rows if row.num_scheduled_tokens > 1 and not row.num_drafts]
        if num_tokens := sum([row.num_scheduled_tokens for row in chunks]):
            middles = [row.num_computed_tokens + row.num_scheduled_tokens // 2 for row in chunks]
            weighted = sum([at * row.num_scheduled_tokens for at, row in zip(middles, chunks, strict=True)])
            self.costs.observe_prompt(num_tokens, seconds, weighted // num_tokens)
        while self._launched and self._launched[0].step_id <= plan.step_id:
            copies = self._launched.popleft()
            assert copies.host is not None
            kind: CopyKind = "copy in" if copies.is_load else "copy out"
            self.costs.observe_copy(kind, self._bytes_of(copies), copies.host.seconds())
            if not copies.is_load:
                self.transfers.write(copies.keys, copies.host, self._bytes_of(copies))

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
        return bool(self._moves or self._loads or self._queued or self._handing or self.transfers.news)

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
        self._private.clear()
        for out in (*self._launched, *self._moves):
            self._leaving.difference_update(entry[0] for entry in out.keys if entry is not None)
            out.keys = [None] * len(out.keys)
        self.swaps.clear()
        self.transfers.clear()

    def clear(self) -> None:
        """Forget what is on its way. The cache has been cleared: no block is given back."""
        for load in self._loads:
            load.is_over = True
            load.request.state = State.PREEMPTED if load.request.num_preemptions else State.WAITING
        for out in (*self._launched, *self._moves):
            self._out_bytes -= 0 if out.is_load else self._bytes_of(out)
            self._leaving.difference_update(entry[0] for entry in out.keys if entry is not None)
        for held in (
            self._loads, self._loaded, self._queued, self._launched, self._moves, self._private, self._handing,
        ):  # fmt: skip
            held.clear()
        self.swaps.clear()

    def stats(self) -> TierStats:
        stores = tuple(
            StoreStats(store.name, store.used_bytes, store.capacity_bytes, self.hit_tokens[store.name])
            for store in self.transfers.stores
        )
        return TierStats(
            stores, replace(self.moved), len(self._loads), len(self._queued), self.queried_tokens,
            sum(self.hit_tokens.values()), self.num_resumed,
            self.num_swapped_out, self.num_swapped_in, self.swaps.used_bytes,
        )  # fmt: skip
