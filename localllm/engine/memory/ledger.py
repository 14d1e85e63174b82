"""Allocate, share and release the blocks of all requests, over the KV groups of a model: one `BlockPool` per group.

Layers with the same window (kernels/kv_format.py) and the same shape of K and V form a group, and read through one
block table per request. All tables of a request have the same length: entry i of each holds the positions from
i * block_size on. A windowed group replaces the blocks before its window by the null block and gives them back
(`drop_before`): one by one as a window slides, all of a chunk at once when the chunk has ended.

    allocate    append blocks to the tables of all groups, or to none
    lookup      the longest prefix of which every group still has what a query at its end reads
    release     the blocks of all groups at once

Does not know: torch, text, why a request runs, what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.engine.memory.block_pool import NULL_BLOCK, BlockPool
from localllm.engine.request import NEVER, Request
from localllm.engine.stats import KVGroupStats
from localllm.kernels.kv_format import first_unseeing, first_visible
from localllm.models.spec.model_spec import held_blocks, main_group

Counts = tuple[int, ...]
"""Blocks of each group."""

BlockIds = tuple[tuple[int, ...], ...]
"""Blocks of each group, equally many."""

Elsewhere = Callable[[int, bytes], bool]
"""Whether the block of a group and a name is kept outside of the cache."""

NO_STATE = -1
"""Instead of a slot to read a recurrent state from: begin from zeros."""


class Hit(NamedTuple):
    """A prefix found in the cache: `num_blocks` full blocks of each group, and for a request that was swapped out the
    blocks behind them."""

    num_blocks: int
    blocks: BlockIds  # of a windowed group the null block before the window
    state: int = NO_STATE  # slot of the recurrent state at the prefix's end
    num_kv_blocks: int = 0  # full blocks whose K and V are known: more than num_blocks for want of a state
    num_tail_tokens: int = 0  # tokens in the blocks behind num_blocks (swaps.py)

    def num_tokens(self, block_size: int) -> int:
        """Return the tokens whose K and V the request has with this hit."""
        return self.num_blocks * block_size + self.num_tail_tokens


class Ledger:
    """The pools of all KV groups, and the block tables of requests."""

    def __init__(
        self, num_blocks: Sequence[int], block_size: int, windows: Sequence[int | None] = (), *, step_tokens: int = 0
    ) -> None:
        """num_blocks: of each group, with its null block. windows: of each group, as in kernels/kv_format.py.
        step_tokens: the most tokens of a step, whose blocks windowed groups hold besides their windows."""
        self.num_blocks = tuple(num_blocks)
        self.pools = tuple(map(BlockPool, num_blocks))
        self.windows = tuple(windows) or (None,) * len(self.pools)
        assert len(self.windows) == len(self.pools), (num_blocks, windows)
        self.block_size = block_size
        self._windowed = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        self.has_windows, self._step_tokens = bool(self._windowed), step_tokens
        self.main_pool = self.pools[main_group(self.windows)]  # whose blocks are those of the longest requests
        self.step_reserve = tuple(0 if w is None else self.blocks_for(step_tokens) for w in self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need in one group."""
        return -(-num_tokens // self.block_size)

    # ---- counts ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> Counts:
        return tuple([pool.num_free for pool in self.pools])

    @property
    def capacity(self) -> Counts:
        return tuple([pool.capacity for pool in self.pools])

    def needs(self, num_tokens: int, step_tokens: int = 0) -> Counts:
        """Return the blocks per group that a request of `num_tokens` tokens holds during a step of `step_tokens`
        tokens."""
        return tuple([held_blocks(num_tokens, window, self.block_size, step_tokens) for window in self.windows])

    def needs_alone(self, num_tokens: int) -> Counts:
        """Return the most blocks that a request of this length ever holds."""
        return self.needs(num_tokens, self._step_tokens)

    def taken_by_hit(self, hit: Hit) -> Counts:
        """Return the blocks that a request takes from the free lists with a hit, less the blocks of the hit, which it
        need not allocate. A windowed group's blocks are replaced as the window moves on, so they save none."""
        counts = []
        for pool, blocks, window in zip(self.pools, hit.blocks, self.windows, strict=True):
            counts.append(pool.num_unreferenced(blocks) - len(blocks) if window is None else 0)
        return tuple(counts)

    def stats(self) -> tuple[KVGroupStats, ...]:
        """Return the use of each group."""
        pools = zip(self.windows, self.pools, strict=True)
        return tuple(KVGroupStats(window, pool.capacity, pool.num_used, pool.num_cached) for window, pool in pools)

    # ---- tables ------------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, count: int) -> BlockIds | None:
        """Append `count` blocks to each table of a request and return them; None without a change if a group has too
        few."""
        for pool in self.pools:
            if pool.num_free < count:
                return None
        new = []
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            blocks = tuple(pool.take(count))
            table += blocks
            new.append(blocks)
        return tuple(new)

    def drop_before(self, request: Request, position: int) -> None:
        """Give back the blocks of windowed groups that no query at `position` or later reads, and set the position from
        which on there are others."""
        size, dropped, next_drop = self.block_size, request.num_dropped_blocks, NEVER
        for group, window in self._windowed:
            start, end = dropped[group], first_visible(window, position) // size
            if end > start:
                table = request.block_tables[group]
                self.pools[group].release(table[start:end])
                for index in range(start, end):
                    table[index] = NULL_BLOCK
                dropped[group] = start = end
            next_drop = min(next_drop, first_unseeing(window, (start + 1) * size))
        request.next_drop = next_drop

    def release(self, request: Request) -> None:
        """Release all blocks of a request."""
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            pool.release(table)
        request.block_tables, request.num_dropped_blocks = [], []

    # ---- the prefix cache --------------------------------------------------------------------------------------------

    def lookup(self, names: Sequence[bytes], multiple: int = 1) -> Hit:
        """Return the longest cached prefix of a chain of block names whose number of blocks is a multiple of
        `multiple`. Changes nothing: call `enter` to keep it."""
        found = [
            pool.lookup(names) if window is None else None
            for pool, window in zip(self.pools, self.windows, strict=True)
        ]
        count = min([len(blocks) for blocks in found if blocks is not None], default=len(names))
        count = self._windowed_prefix(names, count - count % multiple, multiple)
        return Hit(count, tuple(
            self._window_blocks(group, names, count) if blocks is None else tuple(blocks[:count])
            for group, blocks in enumerate(found)
        ), num_kv_blocks=count)  # fmt: skip

    def reach(self, names: Sequence[bytes], multiple: int, also: Elsewhere) -> int:
        """Return the blocks of the longest prefix, as `lookup` does, with what `also` has counted as cached."""
        count = len(names)
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            for index in range(count if window is None else 0):
                if pool.find(names[index]) is None and not also(group, names[index]):
                    count = index
                    break
        return self._windowed_prefix(names, count - count % multiple, multiple, also)

    def blocks_of(self, names: Sequence[bytes], position: int) -> list[tuple[int, int, int | None]]:
        """Return (index, group, block) for all that a query at `position` reads of the named blocks, in order of their
        positions; None for a block that is not cached."""
        return sorted((
            (index, group, pool.find(names[index]))
            for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True))
            for index in range(self._first_read(window, position), len(names))
        ), key=lambda each: each[:2])  # fmt: skip

    @property
    def num_changes(self) -> int:
        """The number of changes of the prefix cache so far: until the next one, a hit stays what `lookup` returns."""
        return sum([pool.num_changes for pool in self.pools])

    def can_enter(self, hit: Hit, num_blocks: int) -> bool:
        """Return whether a request that starts from a hit can have `num_blocks` blocks of each group now."""
        new = num_blocks - len(hit.blocks[0])
        pools = zip(self.pools, hit.blocks, strict=True)
        return all(new + pool.num_unreferenced(blocks) <= pool.num_free for pool, blocks in pools)

    def enter(self, request: Request, hit: Hit) -> None:
        """Give the blocks of a hit to a request without blocks."""
        for pool, blocks in zip(self.pools, hit.blocks, strict=True):
            pool.acquire([block for block in blocks if block != NULL_BLOCK])
        request.block_tables = [list(blocks) for blocks in hit.blocks]
        request.num_dropped_blocks = [
            self._first_read(window, hit.num_tokens(self.block_size)) for window in self.windows
        ]
        self.drop_before(request, 0)  # drops nothing: sets when to drop first

    def register(self, request: Request, index: int, name: bytes) -> None:
        """Name the blocks at an index of the tables, which are full of accepted tokens, in all groups that hold it."""
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            if table[index] != NULL_BLOCK:
                pool.register(table[index], name)

    def unregister(self, request: Request, index: int) -> None:
        """Drop the names of the blocks at an index of the tables."""
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            name = pool.name_of(table[index])
            if name is not None:
                pool.forget(name)

    def forget_all(self) -> None:
        for pool in self.pools:
            pool.forget_all()

    def clear(self) -> None:
        """Free all blocks and drop all names. Tables of requests are not changed."""
        for pool in self.pools:
            pool.clear()

    def _first_read(self, window: int | None, position: int) -> int:
        """Return the index of the first block that a query at `position` reads."""
        return first_visible(window, position) // self.block_size

    def _windowed_prefix(
        self, names: Sequence[bytes], count: int, multiple: int, also: Elsewhere = lambda group, name: False
    ) -> int:
        """Return the longest prefix of at most `count` blocks whose windows are all cached."""
        while count:
            missing = max(
                [self._last_missing(group, window, names, count, also) for group, window in self._windowed], default=-1
            )
            if missing < 0:
                break
            count = missing - missing % multiple  # a longer one would need the missing block, too
        return count

    def _last_missing(self, group: int, window: int, names: Sequence[bytes], count: int, also: Elsewhere) -> int:
        """Return the index of the last uncached block that the next query reads after `count` blocks, -1 if all are
        cached."""
        pool = self.pools[group]
        for index in range(count - 1, self._first_read(window, count * self.block_size) - 1, -1):
            if pool.find(names[index]) is None and not also(group, names[index]):
                return index
        return -1

    def _window_blocks(self, group: int, names: Sequence[bytes], count: int) -> tuple[int, ...]:
        first = self._first_read(self.windows[group], count * self.block_size)
        kept = [self.pools[group].find(name) for name in names[first:count]]
        return (NULL_BLOCK,) * first + tuple([block for block in kept if block is not None])


def fits(counts: Counts, room: Counts) -> bool:
    """Return whether these blocks of each group are within `room`."""
    return all(count <= most for count, most in zip(counts, room, strict=True))


def plus(first: Counts, second: Counts) -> Counts:
    return tuple([a + b for a, b in zip(first, second, strict=True)])
