"""Edits read from tables equal their definition, alone, together and beside rows that ask for nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.sampling.edit import BLOCK, edit_logits
from localllm.kernels.sampling.tables import MAX_BIAS, WORD_LEN
from localllm.runner.sampling import SamplingState
from tests.kernels.conftest import DTYPES
from tests.kernels.slot_tables import longs
from tests.runner.naive import Case, naive_edits, random_logits

VOCAB = BLOCK + 100  # two blocks, the second not full
PROMPT, OUTPUT = [3, 7, 7, 20, VOCAB - 1], [5, 9, 5, 3, 5, VOCAB - 2]

TABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {4: 3.5, 50: -100.0, VOCAB - 1: 2.0}}, {}),
    ({"allowed_token_ids": [9, 9, 0, 31, 32, VOCAB - 1]}, {}),
    ({"min_tokens": 7, "stop_token_ids": [8, VOCAB - 3]}, {"eos": (2, 9)}),
    ({"min_tokens": 6, "stop_token_ids": [8]}, {"eos": (2,)}),
    ({"repetition_penalty": 1.5}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 4}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 1.0, "repeat_last_n": 8}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "repeat_last_n": 0}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 2**40}, {}),
    ({"repetition_penalty": 0.5, "frequency_penalty": 0.25}, {}),
    ({"presence_penalty": 1.25}, {}),
    ({"frequency_penalty": -0.75, "presence_penalty": -2.0, "repetition_penalty": 1.2}, {}),
    ({}, {"bad_words": ((11,), (5, VOCAB - 2, 12), (9, 13), (1, 2, 3, 4, 5, 6, 7, 14))}),
    ({}, {"bad_words": ((VOCAB - 1, 5, 9, 5, 3, 5, VOCAB - 2, 15),)}),  # the prompt's last token is not output
    ({"logit_bias": {5: 8.0}, "allowed_token_ids": [5, 6], "repetition_penalty": 2.0}, {"bad_words": ((6,),)}),
    ({}, {}),
]
CASES = [Case(SamplingParams(temperature=0.0, **row[0]), PROMPT, OUTPUT, **row[1]) for row in TABLE]


def state_of(cases: list[Case], device: torch.device) -> tuple[SamplingState, torch.Tensor]:
    state = SamplingState(len(cases), VOCAB, device, with_tables=True)
    held = torch.full((len(cases), 4 + max(len(case.tokens) for case in cases)), 7, dtype=torch.int32)
    for slot, case in enumerate(cases):
        state.enter(NewSlot(slot, f"r{slot}", case.tokens, len(case.prompt), case.params, (), 0, case.eos,
                            case.bad_words))  # fmt: skip
        held[slot, : len(case.tokens)] = torch.tensor(case.tokens)
    return state, held.to(device)


def edited(logits: torch.Tensor, cases: list[Case], device: torch.device, mask: torch.Tensor | None = None) -> Any:
    state, held = state_of(cases, device)
    out, lengths = logits.to(device, copy=True), longs([len(case.tokens) for case in cases], device)
    assert state.tables is not None
    mask = None if mask is None else mask.to(device)
    edit_logits(out, longs(range(len(cases)), device), lengths, state.tables, held, mask)
    return out.float().cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_change_equals_the_definition(dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(len(CASES), VOCAB, 2.0, seed=4).to(dtype)
    got = edited(logits, CASES, device)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 4e-3}
    for row, case in enumerate(CASES):
        np.testing.assert_allclose(got[row].numpy(), naive_edits(logits[row].double().numpy(), case), **close)
    assert torch.equal(got[-1], logits[-1].float())  # who asks nothing is untouched


def test_a_mask_goes_over_everything_else(device: torch.device) -> None:
    cases, logits = [CASES[0], CASES[-1], CASES[-1]], random_logits(3, VOCAB, 2.0, seed=4)
    mask = torch.full((3, -(-VOCAB // 32)), -1, dtype=torch.int32)
    mask[:2] = 0
    mask[:2, 0] = 1 << 4 | -(1 << 31)  # tokens 4 and 31
    got = edited(logits, cases, device, mask)
    assert [row.isfinite().nonzero().flatten().tolist() for row in got[:2]] == [[4, 31]] * 2
    assert got[0, 4] == pytest.approx(logits[0, 4] + 3.5)
    assert torch.equal(got[2], logits[2])


def test_padding_and_poison_stay_as_they_are(device: torch.device) -> None:
    state, held = state_of([CASES[12], CASES[2]], device)
    assert state.tables is not None
    logits = random_logits(3, VOCAB, 2.0, seed=4).to(device)
    logits[1], logits[2, 2] = math.nan, math.nan
    before, lengths = logits.clone(), longs([len(CASES[0].tokens)] * 3, device)
    edit_logits(logits, longs([0, -1, 1], device), lengths, state.tables, held)
    assert logits[1].isnan().all()
    assert logits[2].isnan().sum() == (before[2].isnan().sum() if INTERPRETED or device.type == "cuda" else 0)
    assert torch.isneginf(logits[0, 11])


@settings(deadline=None, max_examples=3 if INTERPRETED else 25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=2500), st.integers(0, 2500), st.sampled_from([0.7, 1.0, 1.4]),
       st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from([-0.25, 0.0, 0.5]),
       st.one_of(st.sampled_from([-1, 1, 64]), st.integers(1, 2600)))  # fmt: skip
def test_penalties_of_long_texts(
    text: list[int], prompt_len: int, repetition: float, presence: float, frequency: float, window: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        repeat_last_n=window,
    )  # fmt: skip
    cut = min(max(prompt_len, 1), len(text))
    case, logits = Case(params, text[:cut], text[cut:]), random_logits(1, VOCAB, 2.0, seed=4)
    expected = naive_edits(logits[0].double().numpy(), case)
    np.testing.assert_allclose(edited(logits, [case], device)[0].numpy(), expected, rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_the_tables_is_sampled_the_general_way() -> None:
    many = dict.fromkeys(range(MAX_BIAS + 1), 1.0)
    long = tuple(range(WORD_LEN + 1))
    cases = [Case(SamplingParams(logit_bias=many)), Case(SamplingParams(), bad_words=(long,)), Case(SamplingParams())]
    state, _ = state_of(cases, torch.device("cpu"))
    assert [state.features(np.array([slot])) is None for slot in range(3)] == [True, True, False]
    assert state.features(np.array([2, 0])) is None
