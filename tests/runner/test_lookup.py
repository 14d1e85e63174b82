"""Lookup against a search by hand."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.runner.host_drafts import LONGEST_MATCH, find_drafts, find_predicted, longest_match
from tests.draws import draws


def by_hand(ids: Sequence[int], text: Sequence[int], least: int) -> tuple[int, int]:
    """Return the place behind the latest of the longest matches, and its length."""
    best, limit = (0, 0), min(LONGEST_MATCH, len(ids), len(text))
    for end in range(1, len(text) + 1):
        length = 0
        while length < min(limit, end) and text[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= max(least, best[1]):
            best = end, length
    return best


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """A text of few different tokens, or one that repeats itself with a mistake in it."""
    most = draw(st.sampled_from([0, 1, 2, 5]))
    text = draw(st.lists(st.integers(0, most), max_size=90))
    if text and draw(st.booleans()):
        text = (text[: draw(st.integers(1, 9))] * 30)[: len(text)]
        text[draw(st.integers(0, len(text) - 1))] = 9
    return text


@draws(400)
@given(text=texts(), least=st.integers(1, 4))
def test_the_latest_of_the_longest_matches_is_found(text: list[int], least: int) -> None:
    """S16: the end of a text in the text before it, never itself."""
    ids = np.array(text, np.int32)
    assert longest_match(ids, ids[:-1], least) == by_hand(text, text[:-1], least)


@draws(200)
@given(text=texts(), other=texts(), least=st.integers(1, 4))
def test_the_end_of_a_text_is_found_in_another(text: list[int], other: list[int], least: int) -> None:
    found = longest_match(np.array(text, np.int32), np.array(other, np.int32), least)
    assert found == by_hand(text, other, least)


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 9, [4, 5, 9]),  # as many as the match is long
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 9, [5, 1, 2]),  # the latest
        ([7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3], 9, [4, 8, 1, 2]),  # the longest
        ([1, 2, 9, 1, 2], 9, []),  # too short
        ([5, 5, 5, 5], 9, [5]),
        ([1, 2, 3], 9, []),
        ([], 9, []),
    ],
)
def test_drafts_are_what_followed(text: list[int], most: int, drafts: list[int]) -> None:
    assert find_drafts(np.array(text, np.int32), most).tolist() == drafts


@pytest.mark.parametrize(
    ("output", "predicted", "drafts"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]),  # the prediction's beginning
        ([1], [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5]),
        ([9], [1, 2, 3, 4, 5, 6, 7], []),
        ([1, 2, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8], [7, 8]),  # behind a change
        ([1, 2, 3], [1, 2, 3], []),
        ([1, 2, 3], [], []),
    ],
)
def test_a_prediction_goes_on_where_the_output_is(output: list[int], predicted: list[int], drafts: list[int]) -> None:
    assert find_predicted(np.array(output, np.int32), np.array(predicted, np.int32), 4).tolist() == drafts


def test_long_texts_are_searched_alike() -> None:
    dice = random.Random(2)
    text = [dice.randrange(3) for _ in range(3000)]
    ids = np.array(text, np.int32)
    assert longest_match(ids, ids[:-1], 3) == by_hand(text, text[:-1], 3)
