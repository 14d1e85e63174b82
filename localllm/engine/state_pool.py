"""Ownership of the places of recurrent states, and the checkpoints among them.

A place holds one state: that of a whole model after some tokens. A request writes its own place in each step. A
*checkpoint* is a place with a name: that of the last block of the tokens that its state comes after (block_hash.py). It
is useful only together with the KV of those blocks, so it is dropped with the first of them.
The tensors live in runner/state_cache.py; what is saved, and when, is decided in checkpoints.py.
Does not know: torch, tokens, requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.engine.block_pool import BlockPool

NULL_PLACE = 0
"""Never given to a request: padding rows write there, which means nowhere."""


class _Node:
    """A block with a checkpoint at its end, or at the end of a block after it."""

    __slots__ = ("children", "parent", "place")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent  # name of the block before this one; None: this is the first
        self.children: set[bytes] = set()
        self.place = NULL_PLACE  # of the checkpoint at the end of the block; 0: there is none


class FoundState(NamedTuple):
    """The deepest checkpoint of a chain of blocks."""

    num_blocks: int
    place: int


class StatePool:
    """Places 1 .. num_places-1. A place is *held* (referenced), a *checkpoint* that no request reads (named) or *free*.

    Places have reference counts, names and an LRU order as blocks have. The blocks under the checkpoints form a tree,
    in which the deepest checkpoint of a chain is found, and those that a dropped block makes unreachable.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._places = BlockPool(num_places)
        self._places.on_dropped = self._unname
        self._nodes: dict[bytes, _Node] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # checkpoints to evict before any other, oldest first

    def clear(self) -> None:
        """Free all places and drop all names."""
        self._places.clear()
        self._nodes.clear()
        self._spare.clear()

    @property
    def capacity(self) -> int:
        """Number of places that can be held."""
        return self._places.capacity

    @property
    def num_held(self) -> int:
        return self._places.num_used

    @property
    def num_available(self) -> int:
        """Places that `allocate` can return one after the other: free ones and checkpoints that no request reads."""
        return self._places.num_free

    @property
    def num_checkpoints(self) -> int:
        return self._places.num_cached

    @property
    def num_changes(self) -> int:
        """The number of checkpoints added or dropped so far."""
        return self._places.num_changes

    # ---- places ------------------------------------------------------------------------------------------------------

    def allocate(self, *, may_evict: bool = True) -> int | None:
        """Return a place held by the caller, or None without a change.

        Takes a free place, else a spare checkpoint's, else that of the checkpoint that was not used for the longest
        time, which `may_evict=False` forbids.
        """
        if self._places.num_free == self._places.num_cached:
            spare = next(iter(self._spare), None)
            if spare is not None:
                self._places.forget(spare)
            elif not may_evict:
                return None
        taken = self._places.allocate(1)
        return taken[0] if taken is not None else None

    def acquire(self, place: int) -> None:
        """Reference a checkpoint found by `lookup`, which is therefore not evicted. It counts as spare no more."""
        name = self._places.name_of(place)
        if name is not None:
            self._spare.pop(name, None)
        self._places.acquire([place])

    def adopt(self, place: int) -> bool:
        """Take a checkpoint that no request reads as a place of the caller, without its name. False: it is read."""
        name = self._places.name_of(place)
        if name is None or self._places.ref_count[place]:
            return False
        self._places.acquire([place])
        self._places.forget(name)
        return True

    def release(self, place: int) -> None:
        """Give up a held place, or a reference to a checkpoint."""
        self._places.release([place])

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lookup(self, names: Sequence[bytes], limit: int) -> FoundState | None:
        """Return the deepest checkpoint at the end of one of the first `limit` blocks of a chain.
        Changes nothing: call `acquire` to keep it."""
        found = None
        for index in range(min(limit, len(names))):
            node = self._nodes.get(names[index])
            if node is None:
                break
            if node.place:
                found = FoundState(index + 1, node.place)
        return found

    def register(
        self, place: int, names: Sequence[bytes], *, has_kv: Callable[[bytes], bool], spare: bool = False
    ) -> bool:
        """Make a held place the checkpoint after the last block of a chain; the caller still releases the place.

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
        if not new and self._nodes[names[-1]].place:
            return False
        for index in reversed(new):
            parent = names[index - 1] if index else None
            self._nodes[names[index]] = _Node(parent)
            if parent is not None:
                self._nodes[parent].children.add(names[index])
        self._places.register(place, names[-1])
        self._nodes[names[-1]].place = place
        if spare:
            self._spare[names[-1]] = None
        return True

    def forget_spare(self, name: bytes) -> None:
        """Drop a spare checkpoint; others, and one that was acquired since, stay."""
        if name in self._spare:
            self._places.forget(name)

    def keep(self, name: bytes) -> None:
        """Count a checkpoint as spare no more."""
        self._spare.pop(name, None)

    def drop_block(self, name: bytes) -> None:
        """Drop the checkpoints that need a block whose KV is gone: those at its end and after it."""
        if name not in self._nodes:
            return
        below, unreachable = [name], []
        while below:
            node = self._nodes[each := below.pop()]
            below += node.children
            if node.place:
                unreachable.append(each)
        for each in unreachable:
            self._places.forget(each)

    def forget_all(self) -> None:
        """Drop all names. Held places stay held."""
        self._places.forget_all()
        self._nodes.clear()
        self._spare.clear()

    def checkpoints(self) -> dict[bytes, int]:
        """Return the places of all checkpoints by name. O(checkpoints): for tests."""
        return self._places.names()

    def _unname(self, name: bytes) -> None:
        """Remove a checkpoint from the tree, and the blocks that lead to no other one."""
        self._spare.pop(name, None)
        node = self._nodes[name]
        node.place = NULL_PLACE
        while not node.place and not node.children:
            del self._nodes[name]
            if node.parent is None:
                return
            name, child = node.parent, name
            node = self._nodes[name]
            node.children.discard(child)
