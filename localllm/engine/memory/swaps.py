"""Preempted requests whose blocks stay in RAM until they run again: swapping instead of computing again.

Full blocks of accepted tokens leave the cache and come back by the names of their content, as all blocks do (tiers.py).
For a swapped request two things are added. Its *tail*, the last blocks, which are not full or have tokens that are not
known yet, gets names that belong to this preemption alone. And all its blocks in RAM are held: they are not evicted
until the request runs again or ends. It then continues where it was, without computing a token twice.
Does not know: when blocks are copied, whether swapping pays, threads, torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from localllm.engine.memory.block_pool import NULL_BLOCK
from localllm.engine.memory.block_stores import Key, RamStore
from localllm.engine.memory.ledger import Hit, Ledger
from localllm.engine.request import NEVER, Request


class Swap(NamedTuple):
    """Blocks of a preempted request."""

    num_tokens: int  # whose K and V they have once the launched steps are done
    num_shared: int  # first blocks of the table, which have the names of their content
    tail: tuple[bytes, ...]  # names of the blocks behind them
    keys: tuple[Key, ...]  # all that the request held, of each KV group
    num_resident: int  # first blocks that other requests hold, too
    written_by_s: float = 0.0  # by the clock of tiers.py: what is not in RAM by then is considered lost


class Swaps:
    """The swapped requests of one engine, and what they hold in RAM."""

    def __init__(self, ledger: Ledger, block_bytes: Sequence[int], store: RamStore | None, capacity_bytes: int) -> None:
        """capacity_bytes: that swapped requests may hold in the store; 0: no request is swapped."""
        self._ledger, self._block_bytes, self._store = ledger, block_bytes, store
        self.capacity_bytes = 0 if store is None else min(capacity_bytes, store.capacity_bytes)
        self._swaps: dict[int, Swap] = {}  # by the sequence number of the request, which is never used again
        self._holders: Counter[Key] = Counter()
        self.used_bytes = 0  # of RAM that is held, or will be when the blocks are written

    def plan(self, request: Request) -> Swap | None:
        """Return what would be kept of a running request; None if it has too little, or there is no room."""
        size, num_tokens = self._ledger.block_size, request.num_computed_tokens
        num_shared, end = request.num_registered_blocks, -(-num_tokens // size)
        if not self.capacity_bytes or num_shared == NEVER or end < 2:
            return None
        own = b"tail" + request.sequence.to_bytes(8, "big") + request.num_preemptions.to_bytes(8, "big")
        tail = tuple([own + index.to_bytes(8, "big") for index in range(num_shared, end)])  # longer than a digest
        names = (*request.block_hashes[:num_shared], *tail)
        first = request.num_dropped_blocks
        keys = tuple([(group, name) for group, index in enumerate(first) for name in names[index:]])
        if self.used_bytes + self.bytes_of(key for key in keys if key not in self._holders) > self.capacity_bytes:
            return None
        pool, table = self._ledger.main_pool, request.block_tables[self._ledger.pools.index(self._ledger.main_pool)]
        owned = [index for index, block in enumerate(table) if block != NULL_BLOCK and pool.ref_count[block] == 1]
        return Swap(num_tokens, num_shared, tail, keys, owned[0] if owned else end)

    def begin(self, request: Request, swap: Swap) -> None:
        """Name the tail of a request that still has its blocks, and hold its blocks in RAM from now on."""
        for pool, table in zip(self._ledger.pools, request.block_tables, strict=True):
            for index, name in enumerate(swap.tail, swap.num_shared):
                if table[index] != NULL_BLOCK:
                    pool.register(table[index], name)
        self._swaps[request.sequence] = swap
        self.used_bytes += self.bytes_of(key for key in swap.keys if key not in self._holders)
        self._holders.update(swap.keys)
        assert self._store is not None
        self._store.hold(swap.keys)

    def __contains__(self, request: Request) -> bool:
        return request.sequence in self._swaps

    def is_late(self, request: Request, now_s: float) -> bool:
        """Return whether the blocks of a swapped request should be in RAM by now."""
        return now_s > self._swaps[request.sequence].written_by_s

    def position(self, request: Request) -> int:
        """Return where a swapped request continues. Its last token is computed again, since logits are not kept, and
        what was computed behind tokens that were not accepted is void."""
        return min(self._swaps[request.sequence].num_tokens, request.num_tokens - 1)

    def names(self, request: Request, position: int | None = None) -> Sequence[bytes]:
        """Return the names of the blocks of a swapped request, up to a position or all."""
        swap = self._swaps[request.sequence]
        names = [*request.block_hashes[: swap.num_shared], *swap.tail]
        return names if position is None else names[: self._ledger.blocks_for(position)]

    def find(self, request: Request) -> Hit | None:
        """Return all that a swapped request needs, if the cache has it."""
        if request not in self:
            return None
        ledger, swap, position = self._ledger, self._swaps[request.sequence], self.position(request)
        names = self.names(request, position)
        if (num_tail_tokens := position - swap.num_shared * ledger.block_size) < 0:
            return None
        tables = [[NULL_BLOCK] * len(names) for _ in ledger.pools]
        for index, group, block in ledger.blocks_of(names, position):
            if block is None:
                return None
            tables[group][index] = block
        blocks = tuple([tuple(table) for table in tables])
        return Hit(swap.num_shared, blocks, num_kv_blocks=swap.num_shared, num_tail_tokens=num_tail_tokens)

    def end(self, request: Request) -> None:
        """Let a request's blocks in RAM be evicted, and forget its tail. A request that is not swapped is ignored."""
        swap = self._swaps.pop(request.sequence, None)
        if swap is None or self._store is None:
            return
        self._holders.subtract(swap.keys)
        over = [key for key in swap.keys if not self._holders[key]]
        for key in over:
            del self._holders[key]
        self.used_bytes -= self.bytes_of(over)
        self._store.let_go(over, forget=[key for key in swap.keys if key[1] in swap.tail])
        for pool in self._ledger.pools:
            for name in swap.tail:
                pool.forget(name)

    def clear(self) -> None:
        """Let go of everything. The cache has dropped its names."""
        if self._store is not None:
            tails = {name for swap in self._swaps.values() for name in swap.tail}
            self._store.let_go(list(self._holders), forget=[key for key in self._holders if key[1] in tails])
        self._swaps.clear()
        self._holders.clear()
        self.used_bytes = 0

    def bytes_of(self, keys: Iterable[Key]) -> int:
        """Return the bytes of blocks with these keys."""
        return sum([self._block_bytes[group] for group, _ in keys])
