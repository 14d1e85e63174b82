"""The ledger, walked at random and by hand."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from localllm.engine.memory.block_pool import NULL_BLOCK, BlockPool
from tests.draws import draws
from tests.engine.harness import check_pool


class PoolWalk(RuleBasedStateMachine):
    """Allocate, share, name and release in any order."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9)
        self.held: list[list[int]] = []
        self.names = 0

    @rule(target=tables, count=st.integers(1, 4))
    def allocate(self, count):
        before = self.pool.num_free
        table = self.pool.allocate(count)
        if table is None:
            assert before < count
            assert self.pool.num_free == before
            return multiple()
        assert len(table) == len(set(table)) == count
        self.held.append(table)
        return table

    @rule(table=tables)
    def name(self, table):
        for block in table:
            if not self.pool.is_named(block):
                self.names += 1
                self.pool.register(block, str(self.names).encode())

    @rule(table=tables)
    def name_a_second_copy(self, table):
        """A name that another block carries stays with that block."""
        names = self.pool.names()
        for block in table:
            for name in list(names)[:1]:
                self.pool.register(block, name)
                assert self.pool.names()[name] == names[name]

    @rule(target=tables, start=st.integers(0, 8), length=st.integers(1, 3))
    def hit(self, start, length):
        names = list(self.pool.names())[start : start + length]
        blocks = self.pool.lookup(names)
        assert len(blocks) == len(names)
        if not blocks:
            return multiple()
        self.pool.acquire(blocks)
        self.held.append(blocks)
        return blocks

    @rule(table=consumes(tables))
    def release(self, table):
        self.held.remove(table)
        self.pool.release(table)

    @rule()
    def forget(self):
        self.pool.forget_all()
        assert not self.pool.names()

    @invariant()
    def every_block_is_free_or_counted(self):
        check_pool(self.pool, self.held)


PoolWalk.TestCase.settings = draws(150, stateful_step_count=40)
TestPoolWalk = PoolWalk.TestCase


def test_allocate_is_all_or_nothing():
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]


def test_tail_of_a_prefix_is_evicted_before_its_head():
    pool = BlockPool(5)
    table = pool.allocate(3)
    for block in table:
        pool.register(block, b"%d" % block)
    pool.release(table)
    assert pool.allocate(1) == [4]  # never used: no cached content is lost
    assert pool.allocate(2) == [3, 2]
    assert pool.lookup([b"1", b"2"]) == [1]


def test_nameless_blocks_are_reused_before_named_ones():
    pool = BlockPool(4)
    named, nameless = pool.allocate(1), pool.allocate(1)
    pool.register(named[0], b"x")
    pool.release(named)
    pool.release(nameless)
    assert pool.free_list() == [2, 3, 1]


def test_hit_takes_a_block_out_of_the_free_list():
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.register(table[0], b"x")
    pool.release(table)
    assert pool.num_unreferenced(pool.lookup([b"x"])) == 1
    pool.acquire(pool.lookup([b"x"]))
    assert pool.num_used == 1
    assert pool.num_unreferenced(pool.lookup([b"x"])) == 0


def test_eviction_forgets_the_name():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.register(table[0], b"x")
    pool.release(table)
    pool.allocate(1)
    assert pool.lookup([b"x"]) == []


def test_releasing_twice_is_caught():
    pool = BlockPool(3)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(table)


def test_null_block_is_never_handed_out_and_release_ignores_it():
    pool = BlockPool(3)
    assert NULL_BLOCK not in pool.allocate(2)
    pool.release([NULL_BLOCK])
    assert pool.ref_count[NULL_BLOCK] == 1


def test_a_cleared_pool_is_as_new():
    pool = BlockPool(num_blocks=9)
    held = pool.allocate(5)
    pool.register(held[0], b"a")
    pool.register(held[4], b"b")
    pool.release(held[3:])
    pool.clear()
    check_pool(pool, [])
    assert not pool.names()
    assert pool.free_list() == BlockPool(num_blocks=9).free_list()
