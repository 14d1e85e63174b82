"""The automaton of stop strings, held against its plain definition."""

import string
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.text.stop_strings import START, StopMatch, StopStrings, stop_strings
from tests.draws import draws

LETTERS = st.text("ab", min_size=1, max_size=6)


def find(strings: Sequence[str], text: str, seen: int) -> StopMatch | None:
    """The match that completes first after the first `seen` characters; of two that end together the longer."""
    matches = [
        StopMatch(end - len(each), end, each)
        for end in range(seen + 1, len(text) + 1)
        for each in strings
        if text[:end].endswith(each)
    ]
    return min(matches, key=lambda match: (match.end, match.begin), default=None)


def num_held(strings: Sequence[str], text: str) -> int:
    """The longest end of the text that begins a stop string and is not all of it."""
    return max((n for each in strings for n in range(1, len(each)) if text.endswith(each[:n])), default=0)


@draws(1000)
@given(strings=st.lists(LETTERS, max_size=6), pieces=st.lists(st.text("abc", max_size=9), max_size=8))
def test_reading_piece_by_piece_finds_what_the_definition_finds(strings: list[str], pieces: list[str]) -> None:
    stops, state, text = StopStrings(tuple(strings)), START, ""
    for piece in pieces:
        state, match = stops.read(state, piece)
        seen, text = len(text), text + piece
        want = find(strings, text, seen)
        assert match == (want and want._replace(begin=want.begin - seen, end=want.end - seen))
        if match is not None:
            return
        assert stops.num_held(state) == num_held(strings, text)


@draws(1000)
@given(strings=st.lists(LETTERS, max_size=6), skipped=st.text("abc", max_size=20), rest=st.text("abc", max_size=20))
def test_matches_in_skipped_text_do_not_count_but_its_end_does(strings: list[str], skipped: str, rest: str) -> None:
    stops = StopStrings(tuple(strings))
    state = stops.skip(START, skipped)
    assert stops.num_held(state) == num_held(strings, skipped)
    want = find(strings, skipped + rest, len(skipped))
    match = stops.read(state, rest)[1]
    assert match == (want and want._replace(begin=want.begin - len(skipped), end=want.end - len(skipped)))


@draws(300)
@given(strings=st.lists(LETTERS, max_size=4), text=st.text("abc", max_size=12))
def test_absent_means_that_nothing_waits_and_nothing_matches(strings: list[str], text: str) -> None:
    stops = StopStrings(tuple(strings))
    if stops.absent(text):
        assert stops.read(START, text) == (START, None)
        assert num_held(strings, text) == 0


@pytest.mark.parametrize("char", string.punctuation)
def test_characters_that_mean_something_in_an_expression_mean_themselves(char: str) -> None:
    stops = StopStrings((char + "x", "]", "^"))
    assert stops.absent("abc")
    assert stops.read(START, f"abc{char}x")[1] in (StopMatch(3, 5, char + "x"), StopMatch(3, 4, char))


def test_the_choices_of_a_request_share_one_automaton() -> None:
    assert stop_strings(("a", "bc")) is stop_strings(("a", "bc"))


def test_the_work_for_a_text_does_not_grow_with_the_number_of_strings() -> None:
    """Transitions are counted: a character costs one, and falling back costs no more than going forward did."""
    num_tries = 0

    class Counted(dict[str, int]):
        def __contains__(self, char: object) -> bool:
            nonlocal num_tries
            num_tries += 1
            return super().__contains__(char)

    stops = StopStrings((*tuple("ab" * 7 + f"{i:02x}" for i in range(200)), "a" * 900))
    stops._children = [Counted(children) for children in stops._children]
    text, state = "a" * 899 + "b", START
    for char in text:
        state, match = stops.read(state, char)
        assert match is None
    assert num_tries <= 2 * len(text)
