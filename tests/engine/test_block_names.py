"""Equal names mean equal prefixes under equal extras in the same model, and nothing else does."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.memory.block_names import BlockHasher, InputSpan

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


def names_with(*spans: InputSpan) -> list[bytes]:
    hasher, names = BlockHasher(b"model", 4), list[bytes]()
    hasher.extend(names, hasher.root(), array("i", [7] * 20), spans)
    return names


def test_a_span_names_the_blocks_that_it_touches_and_all_after_them():
    text, picture = names_with(), names_with(InputSpan(6, 5, "cat"))
    assert text[:1] == picture[:1]
    assert not set(text[1:]) & set(picture[1:])
    assert names_with(InputSpan(6, 5, "cat")) == picture


@pytest.mark.parametrize("other", [InputSpan(6, 5, "dog"), InputSpan(7, 5, "cat"), InputSpan(5, 6, "cat")])
def test_another_input_or_another_position_gives_other_names(other: InputSpan):
    assert not set(names_with(InputSpan(6, 5, "cat"))[1:]) & set(names_with(other)[1:])


def test_blocks_before_a_second_span_are_shared():
    one, two = names_with(InputSpan(2, 3, "cat")), names_with(InputSpan(2, 3, "cat"), InputSpan(13, 2, "dog"))
    assert one[:3] == two[:3]
    assert one[3] != two[3]
