"""Ownership of the slots of recurrent states, and the checkpoints among them.

A slot holds one state: that of a whole model after some tokens. A request writes its own slot in each step. A
*checkpoint* is a slot with a name: that of the last block of the tokens that its state comes after (block_names.py). It
is useful only together with the KV of those blocks, so it is dropped with the first of them.
The tensors live in runner/kv_cache.py; what is saved, and when, is decided in state_checkpoints.py.
Does not know: torch, tokens, requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.engine.memory.block_pool import BlockPool

NULL_SLOT = 0
"""Never given to a request: padding rows write there, which means nowhere."""


class _Node:
    """A block with a checkpoint at its end, or at the end of a block after it."""

    __slots__ = ("children", "parent", "slot")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent  # name of the block before this one; None: this is the first
        self.children: set[bytes] = set()
        self.slot = NULL_SLOT  # of the checkpoint at the end of the block; 0: there is none


class FoundState(NamedTuple):
    """The deepest checkpoint of a chain of blocks."""

    num_blocks: int
    slot: int


class StatePool:
    """Slots 1 .. num_slots-1. A slot is *held* (referenced), a *checkpoint* that no request reads (named) or *free*.

    Slots have reference counts, names and an LRU order as blocks have. The blocks under the checkpoints form a tree,
    in which the deepest checkpoint of a chain is found, and those that a dropped block makes unreachable.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = BlockPool(num_slots)
        self._slots.on_dropped.append(self._unname)
        self._nodes: dict[bytes, _Node] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # checkpoints to evict before any other, oldest first

    def clear(self) -> None:
        """Free all slots and drop all names."""
        self._slots.clear()
        self._nodes.clear()
        self._spare.clear()

    @property
    def capacity(self) -> int:
        """Number of slots that can be held."""
        return self._slots.capacity

    @property
    def num_held(self) -> int:
        return self._slots.num_used

    @property
    def num_available(self) -> int:
        """Slots that `allocate` can return one after the other: free ones and checkpoints that no request reads."""
        return self._slots.num_free

    @property
    def num_checkpoints(self) -> int:
        return self._slots.num_cached

    @property
    def num_changes(self) -> int:
        """The number of checkpoints added or dropped so far."""
        return self._slots.num_changes

    # ---- slots ------------------------------------------------------------------------------------------------------

    def allocate(self, *, may_evict: bool = True) -> int | None:
        """Return a slot held by the caller, or None without a change.

        Takes a free slot, else a spare checkpoint's, else that of the checkpoint that was not used for the longest
        time, which `may_evict=False` forbids.
        """
        if self._slots.num_free == self._slots.num_cached:
            spare = next(iter(self._spare), None)
            if spare is not None:
                self._slots.forget(spare)
            elif not may_evict:
                return None
        taken = self._slots.allocate(1)
        return taken[0] if taken is not None else None

    def acquire(self, slot: int) -> None:
        """Reference a checkpoint found by `lookup`, which is therefore not evicted. It counts as spare no more."""
        name = self._slots.name_of(slot)
        if name is not None:
            self._spare.pop(name, None)
        self._slots.acquire([slot])

    def adopt(self, slot: int) -> bool:
        """Take a checkpoint that no request reads as a slot of the caller, without its name. False: it is read."""
        name = self._slots.name_of(slot)
        if name is None or self._slots.ref_count[slot]:
            return False
        self._slots.acquire([slot])
        self._slots.forget(name)
        return True

    def release(self, slot: int) -> None:
        """Give up a held slot, or a reference to a checkpoint."""
        self._slots.release([slot])

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lookup(self, names: Sequence[bytes], limit: int) -> FoundState | None:
        """Return the deepest checkpoint at the end of one of the first `limit` blocks of a chain.
        Changes nothing: call `acquire` to keep it."""
        found = None
        for index in range(min(limit, len(names))):
            node = self._nodes.get(names[index])
            if node is None:
                break
            if node.slot:
                found = FoundState(index + 1, node.slot)
        return found

    def register(
        self, slot: int, names: Sequence[bytes], *, has_kv: Callable[[bytes], bool], spare: bool = False
    ) -> bool:
        """Make a held slot the checkpoint after the last block of a chain; the caller still releases the slot.

        has_kv: whether a block with this name can still be found. Returns False, without a change, if a block of the
        chain cannot be found, or if the chain has a checkpoint there already.
        """
        new: list[int] = []
        for index in range(len(names) - 1, -1, -1):
            if names[index] in self._nodes:  # then so are all blocks before it
                break
            if not has_kv(names[index]):
                return False
            new.append(index)
        if not new and self._nodes[names[-1]].slot:
            return False
        for index in reversed(new):
            parent = names[index - 1] if index else None
            self._nodes[names[index]] = _Node(parent)
            if parent is not None:
                self._nodes[parent].children.add(names[index])
        self._slots.register(slot, names[-1])
        self._nodes[names[-1]].slot = slot
        if spare:
            self._spare[names[-1]] = None
        return True

    def forget_spare(self, name: bytes) -> None:
        """Drop a spare checkpoint; others, and one that was acquired since, stay."""
        if name in self._spare:
            self._slots.forget(name)

    def keep(self, name: bytes) -> None:
        """Count a checkpoint as spare no more."""
        self._spare.pop(name, None)

    def drop_block(self, name: bytes, block: int) -> None:
        """Drop the checkpoints that need a block whose KV is gone: those at its end and after it."""
        if name not in self._nodes:
            return
        below, unreachable = [name], []
        while below:
            node = self._nodes[each := below.pop()]
            below += node.children
            if node.slot:
                unreachable.append(each)
        for each in unreachable:
            self._slots.forget(each)

    def forget_all(self) -> None:
        """Drop all names. Held slots stay held."""
        self._slots.forget_all()
        self._nodes.clear()
        self._spare.clear()

    def checkpoints(self) -> dict[bytes, int]:
        """Return the slots of all checkpoints by name. O(checkpoints): for tests."""
        return self._slots.names()

    def _unname(self, name: bytes, slot: int) -> None:
        """Remove a checkpoint from the tree, and the blocks that lead to no other one."""
        self._spare.pop(name, None)
        node = self._nodes[name]
        node.slot = NULL_SLOT
        while not node.slot and not node.children:
            del self._nodes[name]
            if node.parent is None:
                return
            name, child = node.parent, name
            node = self._nodes[name]
            node.children.discard(child)
