"""Lookup on the device against the lookup on the host, which tests/runner/test_lookup.py holds to a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.kernels import propose_lookup as module
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.propose_lookup import MOST_DRAFTS, propose_lookup
from localllm.runner.lookup import LEAST_MATCH, LONGEST_MATCH, find_drafts

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
