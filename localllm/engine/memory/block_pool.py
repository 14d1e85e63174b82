"""Ownership of the KV cache blocks.

A block is `block_size` consecutive token positions of one request. This module keeps reference counts, the free list in
LRU order, and which full blocks can be shared. The tensors live in runner/kv_cache.py.
Does not know: torch, text, time, requests.
Idea: PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0
"""Never allocated and never named: the padding of block tables points to it."""


class BlockPool:
    """Blocks 1 .. num_blocks-1. A block is *used* (referenced), *cached* (free, its content still named) or *free*.

    The free list is a doubly linked list in two arrays, so that a hit removes a block from its middle in O(1). Its head
    is evicted first. If two blocks hold equal content, only the first carries the name; the second stays private,
    because block tables are append-only and never rewritten.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_changes = 0  # names added or dropped so far: a lookup before the last change may be out of date
        self.on_dropped: list[Callable[[bytes, int], None]] = []
        """Called with each name that is dropped alone, and its block: by an eviction, before the block is handed out,
        or by `forget`, not by `forget_all`."""
        self.on_evicted: list[Callable[[bytes, int], None]] = []
        """Called before `on_dropped` for an eviction alone: what the name says is still in the block."""
        self.clear()

    def clear(self) -> None:
        """Free all blocks and drop all names."""
        num_blocks = self.num_blocks
        self.ref_count = [0] * num_blocks
        self.ref_count[NULL_BLOCK] = 1
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._next = [*range(1, num_blocks), 0]  # circular; the null block is the sentinel
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_changes += 1
        self.num_free = num_blocks - 1  # unreferenced blocks, including cached ones
        self.num_cached = 0  # free blocks with a name

    @property
    def capacity(self) -> int:
        """Number of blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` private blocks, or None without a change.
        Takes them from the head; a named block is evicted."""
        return None if count > self.num_free else self.take(count)

    def take(self, count: int) -> list[int]:
        """Return `count` private blocks from the head of the free list, which has at least as many."""
        following, blocks, head = self._next, [], self._next[NULL_BLOCK]
        for _ in range(count):
            if (name := self._hash_of[head]) is not None:
                for listener in self.on_evicted:
                    listener(name, head)
                self._forget(head)
            self.ref_count[head] = 1
            blocks.append(head)
            head = following[head]
        following[NULL_BLOCK], self._prev[head] = head, NULL_BLOCK
        self.num_free -= count
        return blocks

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain.
        Changes nothing: call `acquire` to keep them."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, name: bytes) -> int | None:
        """Return the block of that name."""
        return self._block_of.get(name)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Count the blocks of `blocks` that `acquire` would take from the free list."""
        return sum(1 for block in blocks if not self.ref_count[block])

    def acquire(self, blocks: Iterable[int]) -> None:
        """Reference blocks found by `lookup`."""
        for block in blocks:
            if not self.ref_count[block]:
                self._unlink(block)
                self.num_cached -= 1
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a table. Its tail becomes evictable before its head, so that prefixes live longest."""
        ref_count = self.ref_count
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert ref_count[block] > 0, f"block {block} released more often than held"
            ref_count[block] -= 1
            if not ref_count[block]:
                self._link(block)

    def register(self, block: int, name: bytes) -> None:
        """Name a full block of accepted tokens, unless another block carries the name already."""
        assert block != NULL_BLOCK, "the null block has no content to name"
        if self._hash_of[block] is None and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block
            self.num_changes += 1

    def is_named(self, block: int) -> bool:
        return self._hash_of[block] is not None

    def name_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def forget(self, name: bytes) -> None:
        """Drop a name, if a block carries it. An unreferenced block is the next to be allocated."""
        block = self._block_of.get(name)
        if block is None:
            return
        if self.ref_count[block]:
            self._drop_name(block, name)
        else:
            self._unlink(block)
            self._forget(block)
            self._link(block)

    def forget_all(self) -> None:
        """Drop all names. Referenced blocks stay referenced."""
        for block in list(self._block_of.values()):
            if not self.ref_count[block]:
                self.num_cached -= 1
            self._hash_of[block] = None
        self._block_of.clear()
        self.num_changes += 1

    def free_list(self) -> list[int]:
        """Return unreferenced blocks in order of allocation. O(free): for tests and the dashboard."""
        blocks, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def names(self) -> dict[bytes, int]:
        return dict(self._block_of)

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            self._drop_name(block, name)
            self.num_cached -= 1

    def _drop_name(self, block: int, name: bytes) -> None:
        del self._block_of[name]
        self._hash_of[block] = None
        self.num_changes += 1
        for listener in self.on_dropped:
            listener(name, block)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int) -> None:
        """Add a block to the free list:
        named blocks at the tail (LRU), unnamed ones at the head (memory still warm)."""
        if self._hash_of[block] is None:
            before, after = NULL_BLOCK, self._next[NULL_BLOCK]
        else:
            before, after = self._prev[NULL_BLOCK], NULL_BLOCK
            self.num_cached += 1
        self._next[before], self._prev[after] = block, block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
