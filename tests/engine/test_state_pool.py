"""The places of recurrent states: a random walk against a list of what should be there, then properties by name."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from localllm.engine.memory.block_pool import BlockPool
from localllm.engine.memory.state_pool import FoundState, StatePool
from tests.draws import draws

NUM_PLACES = 6


def chain(branch: int, length: int) -> list[bytes]:
    """Return the names of a chain of blocks. Chains share their first two blocks, and branches 0 and 1 a third."""
    return [f"{index}:{0 if index < 2 else branch // 2 if index == 2 else branch}".encode() for index in range(length)]


class StateWalk(RuleBasedStateMachine):
    """Places are taken, named, read and given up in any order, while blocks lose their KV."""

    held = Bundle("held")
    read = Bundle("read")

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(NUM_PLACES)
        self.kv = {name for branch in range(4) for name in chain(branch, 6)}
        self.named: dict[tuple[bytes, ...], int] = {}  # checkpoints that should be there; evictions may remove some
        self.out: list[int] = []  # places held or read, once per reference

    @rule(target=held, may_evict=st.booleans())
    def allocate(self, may_evict):
        had_free = self.pool.num_available > self.pool.num_checkpoints
        available = self.pool.num_available
        before = self.pool.checkpoints()
        place = self.pool.allocate(may_evict=may_evict)
        if place is None:
            assert not available or (not may_evict and not had_free)
            assert self.pool.checkpoints() == before
            return multiple()
        assert place not in self.out
        assert place != 0
        if had_free:
            assert self.pool.checkpoints() == before
        self.out.append(place)
        return place

    @rule(place=consumes(held), branch=st.integers(0, 3), length=st.integers(1, 6), spare=st.booleans())
    def register(self, place, branch, length, spare):
        names = chain(branch, length)
        existed = names[-1] in self.pool.checkpoints()
        done = self.pool.register(place, names, has_kv=self.kv.__contains__, spare=spare)
        assert done == (not existed and all(name in self.kv for name in names))
        if done:
            self.named[tuple(names)] = place
        self.out.remove(place)
        self.pool.release(place)

    @rule(place=consumes(held))
    def give_up(self, place):
        self.out.remove(place)
        self.pool.release(place)

    @rule(target=read, branch=st.integers(0, 3), length=st.integers(0, 6))
    def find(self, branch, length):
        names = chain(branch, length)
        found = self.pool.lookup(names, len(names))
        there = self.pool.checkpoints()
        depths = [depth for depth in range(1, length + 1) if names[depth - 1] in there]
        assert found == (FoundState(depths[-1], there[names[depths[-1] - 1]]) if depths else None)
        if found is None:
            return multiple()
        assert found == self.pool.lookup(chain(branch, 6), length), "a limit is the same as a shorter chain"
        self.pool.acquire(found.slot)
        self.out.append(found.slot)
        return found.slot

    @rule(place=consumes(read))
    def stop_reading(self, place):
        self.out.remove(place)
        self.pool.release(place)

    @rule(target=held, branch=st.integers(0, 3))
    def adopt(self, branch):
        found = self.pool.lookup(chain(branch, 6), 6)
        if found is None:
            return multiple()
        is_read = found.slot in self.out
        assert self.pool.adopt(found.slot) is not is_read
        if is_read:
            return multiple()
        assert found.slot not in self.pool.checkpoints().values()
        self.out.append(found.slot)
        return found.slot

    @rule(branch=st.integers(0, 3), index=st.integers(0, 5))
    def lose_kv(self, branch, index):
        name = chain(branch, 6)[index]
        self.kv.discard(name)
        self.pool.drop_block(name, 1)

    @rule()
    def compute_kv_again(self):
        self.kv |= {name for branch in range(4) for name in chain(branch, 6)}

    @rule()
    def forget(self):
        self.pool.forget_all()
        assert not self.pool.checkpoints()

    @invariant()
    def every_place_is_held_named_or_free(self):
        named = self.pool.checkpoints()
        assert len(set(named.values())) == len(named)
        assert self.pool.num_held == len(set(self.out))
        free = self.pool.num_available - self.pool.num_checkpoints
        assert len(set(self.out)) + len(set(named.values()) - set(self.out)) + free == self.pool.capacity

    @invariant()
    def only_reachable_checkpoints_are_kept(self):
        """H8, and a named place still has the state that was named."""
        there = self.pool.checkpoints()
        for names, place in list(self.named.items()):
            if there.get(names[-1]) != place:
                del self.named[names]
        assert {names[-1]: place for names, place in self.named.items()} == there
        assert all(name in self.kv for names in self.named for name in names)


StateWalk.TestCase.settings = draws(200, stateful_step_count=50)
TestStateWalk = StateWalk.TestCase


def save(pool: StatePool, names: list[bytes], *, spare: bool = False) -> int:
    place = pool.allocate()
    assert place is not None
    pool.register(place, names, has_kv=lambda name: True, spare=spare)
    pool.release(place)
    return place


def test_the_checkpoint_not_used_for_the_longest_time_is_evicted():
    pool = StatePool(4)
    a, b, c = (save(pool, chain(0, depth)) for depth in (1, 2, 3))
    pool.acquire(a)
    pool.release(a)
    assert pool.allocate() == b
    assert pool.allocate() == c
    assert pool.allocate() == a
    assert pool.allocate() is None


def test_spare_checkpoints_are_evicted_before_older_ones():
    pool = StatePool(4)
    kept, early, late = (
        save(pool, chain(0, 1)),
        save(pool, chain(0, 2), spare=True),
        save(pool, chain(0, 3), spare=True),
    )
    assert pool.allocate(may_evict=False) == early
    assert pool.allocate(may_evict=False) == late
    assert pool.allocate(may_evict=False) is None
    assert pool.allocate() == kept


def test_a_spare_checkpoint_that_was_read_is_kept_like_any_other():
    pool = StatePool(3)
    read, other = save(pool, chain(0, 1), spare=True), save(pool, chain(0, 2))
    pool.acquire(read)
    pool.release(read)
    pool.forget_spare(chain(0, 1)[-1])
    assert pool.allocate() == other


def test_a_read_checkpoint_is_not_evicted_and_is_freed_when_its_name_is_gone():
    pool = StatePool(2)
    place = save(pool, chain(0, 2))
    pool.acquire(place)
    assert pool.allocate() is None
    assert not pool.adopt(place)
    pool.drop_block(chain(0, 2)[0], 1)
    assert pool.checkpoints() == {}
    assert pool.num_held == 1
    pool.release(place)
    assert pool.allocate() == place


def test_a_block_in_the_middle_drops_every_deeper_checkpoint_of_its_chains():
    pool = StatePool(6)
    above, *below = (save(pool, chain(branch, depth)) for branch, depth in ((0, 1), (0, 4), (2, 3), (0, 6)))
    pool.drop_block(chain(0, 2)[-1], 1)
    assert pool.checkpoints() == {chain(0, 1)[-1]: above}
    assert pool.num_available - pool.num_checkpoints == 1 + len(below)
    assert len(pool._nodes) == 1


def test_forgetting_a_block_of_the_kv_tells_its_name_once():
    """The pools are connected by `on_dropped`."""
    blocks, dropped = BlockPool(3), []
    blocks.on_dropped.append(lambda name, block: dropped.append((name, block)))
    for block, name in zip(blocks.allocate(2), (b"x", b"y"), strict=True):
        blocks.register(block, name)
    blocks.forget(b"x")
    blocks.release([1, 2])
    assert blocks.free_list() == [1, 2]
    blocks.forget(b"y")
    blocks.forget(b"unknown")
    assert dropped == [(b"x", 1), (b"y", 2)]
    assert blocks.num_cached == 0
    blocks.register(blocks.allocate(1)[0], b"z")
    blocks.forget_all()
    assert dropped == [(b"x", 1), (b"y", 2)]


@pytest.mark.parametrize("num_places", [0, 1])
def test_a_pool_needs_a_place_beside_the_null_place(num_places):
    with pytest.raises(ValueError, match="null"):
        StatePool(num_places)
