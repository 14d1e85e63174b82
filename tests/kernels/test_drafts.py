"""Drafts on the device: those that a draw accepts, against a walk by hand, and those of lookup, against the host's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.kernels import propose_lookup as module
from localllm.kernels.accept_drafts import accept_drafts
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.propose_lookup import MOST_DRAFTS, propose_lookup
from localllm.runner.host_drafts import LEAST_MATCH, LONGEST_MATCH, find_drafts

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SLOTS, WIDTH = 5, 24


class Table:
    """The tokens of each slot by hand: `known` of them, then `valid` drafts."""

    def __init__(self, known: list[int], valid: list[int], tokens: list[list[int]]) -> None:
        self.known, self.valid, self.tokens = known, valid, tokens

    def accept(self, slot: int, drafts: int, drawn: list[int], best: list[float]) -> int:
        """Walk over one row's draws. Returns how many are accepted."""
        at, accepted = self.known[slot], 0
        for place in range(1 + drafts):
            if place and not math.isfinite(best[place]):
                break
            draft, self.tokens[slot][at + place] = self.tokens[slot][at + place], drawn[place]
            accepted += 1
            if draft != drawn[place]:
                break
        self.known[slot], self.valid[slot] = at + accepted, 0
        return accepted


@st.composite
def steps(draw: st.DrawFn) -> tuple[Table, int, list[tuple[int, int, list[int], list[float]]]]:
    """A table, the draws of a row, and rows of (slot or -1, drafts, drawn, best)."""
    draws = 1 + draw(st.integers(0, 8))
    known = [draw(st.integers(1, WIDTH - draws - 1)) for _ in range(SLOTS)]
    valid = [draw(st.integers(0, draws - 1)) for _ in range(SLOTS)]
    tokens = [[draw(st.integers(0, 3)) for _ in range(WIDTH)] for _ in range(SLOTS)]
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    rows = []
    for slot in slots:
        padding = draw(st.booleans()) and draw(st.booleans())
        drafts = draw(st.integers(0, valid[slot]))
        likely = tokens[slot][known[slot] : known[slot] + draws]
        drawn = [token if draw(st.integers(0, 4)) else draw(st.integers(0, 3)) for token in likely]
        best = [math.nan if draw(st.integers(0, 9)) == 0 else 1.0 for _ in range(draws)]
        rows.append((-1 if padding else slot, drafts, drawn, best))
    return Table(known, valid, tokens), draws, rows


@settings(max_examples=120, deadline=None)
@given(steps())
def test_draws_are_accepted_up_to_the_first_that_is_not_its_draft(
    step: tuple[Table, int, list[tuple[int, int, list[int], list[float]]]],
) -> None:
    """S17: 0 to 8 drafts, padding rows, fewer drafts than places, draws that are not a number."""
    device = DEVICE
    table, draws, rows = step
    slots = [[slot if slot >= 0 and place <= drafts else -1 for place in range(draws)] for slot, drafts, _, _ in rows]
    starts = [table.known[slot] if slot >= 0 else 0 for slot, *_ in rows]
    tokens = torch.tensor(table.tokens, dtype=torch.int32, device=device)
    known = torch.tensor(table.known, device=device)
    valid = torch.tensor(table.valid, dtype=torch.int32, device=device)
    counts = accept_drafts(
        torch.tensor(slots, device=device),
        torch.tensor([[start + place for place in range(draws)] for start in starts], device=device),
        tokens,
        torch.tensor([drawn for _, _, drawn, _ in rows], device=device),
        torch.tensor([best for *_, best in rows], device=device),
        known,
        valid,
    )
    expected = [(table.accept(slot, drafts, drawn, best), drafts) if slot >= 0 else (0, 0)
                for slot, drafts, drawn, best in rows]  # fmt: skip
    assert counts.T.tolist() == [list(each) for each in expected]
    assert tokens.tolist() == table.tokens
    assert known.tolist() == table.known
    assert valid.tolist() == table.valid


@pytest.mark.parametrize(("bad", "accepted"), [(0, 3), (1, 1), (2, 2)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_draw_that_is_not_a_number_ends_its_row_before_it(bad: int, accepted: int, value: float) -> None:
    """The first draw of a row is always recorded: its error is reported with it."""
    device = DEVICE
    tokens = torch.tensor([[7, 1, 2, 0, 0]], dtype=torch.int32, device=device)
    best = torch.ones(1, 3, device=device)
    best[0, bad] = value
    known, valid = torch.tensor([1], device=device), torch.tensor([2], dtype=torch.int32, device=device)
    counts = accept_drafts(
        torch.zeros(1, 3, dtype=torch.int64, device=device), torch.tensor([[1, 2, 3]], device=device), tokens,
        torch.tensor([[1, 2, 9]], device=device), best, known, valid,
    )  # fmt: skip
    assert counts.tolist() == [[accepted], [2]]
    assert known.tolist() == [1 + accepted]
    assert tokens.tolist() == [[7, 1, 2, 9 if accepted == 3 else 0, 0]]


WIDTH = 100


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """A text of few different tokens, or one that repeats itself with a mistake in it."""
    text = draw(st.lists(st.integers(0, draw(st.sampled_from([0, 1, 2, 5]))), min_size=1, max_size=WIDTH - 1))
    if draw(st.booleans()):
        text = (text[: draw(st.integers(1, 9))] * 30)[: len(text)]
        text[draw(st.integers(0, len(text) - 1))] = 9
    return text


def test_both_lookups_have_the_same_bounds() -> None:
    assert (module.LEAST_MATCH, module.LONGEST_MATCH) == (LEAST_MATCH, LONGEST_MATCH)


@pytest.mark.parametrize("places", [16, 1024])
@settings(max_examples=20 if INTERPRETED else 60, deadline=None)
@given(st.lists(st.tuples(texts(), st.integers(0, MOST_DRAFTS), st.booleans()), min_size=1, max_size=4))
def test_drafts_are_those_of_the_host(places: int, asked: list[tuple[list[int], int, bool]]) -> None:
    """S16: several texts at once, some of them in padding rows; with several parts of a text, and with one."""
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    texts, most, padding = zip(*asked, strict=True)
    tokens = torch.full((len(texts), WIDTH), 77, dtype=torch.int32)
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = torch.tensor(text)
    before, tokens = tokens.clone(), tokens.to(device)
    slots = [[-1 if hidden else slot, 5] for slot, hidden in enumerate(padding)]  # the first draw of each row counts
    valid = torch.full((len(texts),), 3, dtype=torch.int32, device=device)
    matches = torch.zeros(len(texts), dtype=torch.int64, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLACES", places)
        out = propose_lookup(
            torch.tensor(slots, device=device)[:, 0],
            torch.tensor(most, dtype=torch.int32, device=device),
            torch.tensor([len(text) for text in texts], device=device),
            valid, tokens, matches,
        )  # fmt: skip
    assert not matches.any(), "the next step begins with zeros"
    for slot, (text, count, hidden) in enumerate(asked):
        drafts = [] if hidden else find_drafts(np.array(text, np.int32), count).tolist()[: WIDTH - 1 - len(text)]
        assert out[slot, 0] == len(drafts)
        assert out[slot, 1 : 1 + len(drafts)].tolist() == drafts
        assert valid[slot] == (3 if hidden else len(drafts))
        before[slot, len(text) : len(text) + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    assert torch.equal(tokens.cpu(), before)
