"""Equal names mean equal prefixes under equal extras in the same model, and nothing else does."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.memory.block_names import BlockHasher

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def chain(hasher: BlockHasher, token_ids: list[int], extras: tuple[tuple[str, str], ...] = ()) -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(extras), array("i", token_ids))
    return hashes


@given(tokens, tokens)
def test_names_are_equal_exactly_where_prefixes_are(left, right):
    hasher = BlockHasher(b"model", 4)
    for index, (a, b) in enumerate(zip(chain(hasher, left), chain(hasher, right), strict=False)):
        end = 4 * (index + 1)
        assert (a == b) == (left[:end] == right[:end])


@given(tokens, st.integers(1, 39))
def test_hashing_as_tokens_arrive_equals_hashing_at_once(token_ids, cut):
    hasher = BlockHasher(b"model", 4)
    hashes: list[bytes] = []
    root = hasher.root()
    hasher.extend(hashes, root, array("i", token_ids[:cut]))
    hasher.extend(hashes, root, array("i", token_ids))
    assert hashes == chain(hasher, token_ids)
    assert len(hashes) == len(token_ids) // 4


def test_extras_are_tagged_with_their_kind():
    hasher = BlockHasher(b"model", 4)
    roots = {hasher.root(), hasher.root([("salt", "x")]), hasher.root([("lora", "x")]), hasher.root([("salt", "y")])}
    assert len(roots) == 4
    assert hasher.root([("a", "bc")]) != hasher.root([("ab", "c")])


def test_another_model_gives_other_names():
    same = list(range(8))
    assert not set(chain(BlockHasher(b"one", 4), same)) & set(chain(BlockHasher(b"two", 4), same))
