"""Each change to the logits, alone and in its place in the order, against the definition."""

from typing import Any

import numpy as np
import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot
from localllm.runner.edits import apply_edits
from localllm.runner.sampling import SamplingState
from tests.runner.naive import Case, naive_edits, random_logits, tokens

VOCAB = 100
PROMPT, OUTPUT = [3, 7, 7, 20], [5, 9, 5, 3, 5]

TABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {4: 3.5, 50: -100.0}}, {}),
    ({"allowed_token_ids": [9, 9, 0, 99]}, {}),
    ({"min_tokens": 6, "stop_token_ids": [8, 9]}, {"eos": (2, 9)}),
    ({"min_tokens": 5, "stop_token_ids": [8]}, {"eos": (2,)}),
    ({"min_tokens": 6, "ignore_eos": True}, {"eos": (2,)}),
    ({"min_tokens": 6}, {"eos": (2, 5000)}),
    ({"repetition_penalty": 1.5}, {}),
    ({"repetition_penalty": 0.5}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 3}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 1.0, "repeat_last_n": 8}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "repeat_last_n": 0}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 2**40}, {}),
    ({"presence_penalty": 1.25}, {}),
    ({"frequency_penalty": 0.75}, {}),
    ({"frequency_penalty": -0.75, "presence_penalty": -2.0, "repetition_penalty": 1.2}, {}),
    ({}, {"bad_words": ((11,), (3, 5, 12), (5, 13), (9, 13), (1, 2, 3, 4, 5, 6, 7, 8, 14))}),
    ({}, {"bad_words": ((20, 5, 9, 5, 3, 5, 15),)}),  # the prompt's last token is not part of the output
    ({"logit_bias": {5: 8.0}, "allowed_token_ids": [5, 6], "repetition_penalty": 2.0}, {"bad_words": ((6,),)}),
]


def edited(logits: torch.Tensor, cases: list[Case]) -> torch.Tensor:
    state = SamplingState(len(cases), VOCAB, torch.device("cpu"))
    held = torch.zeros(len(cases), 20, dtype=torch.int32)
    for slot, case in enumerate(cases):
        state.enter(NewSlot(slot, f"r{slot}", case.tokens, len(case.prompt), case.params, (), 0, case.eos,
                            case.bad_words))  # fmt: skip
        held[slot, : len(case.tokens)] = torch.tensor(case.tokens)
    lengths = np.array([len(case.tokens) for case in cases])
    edits = state.batch(np.arange(len(cases)), lengths).edits
    out = logits.clone()
    if edits is not None:
        apply_edits(out, edits, held)
    return out


def case_of(row: tuple[dict[str, Any], dict[str, Any]], output: list[int] = OUTPUT) -> Case:
    return Case(SamplingParams(temperature=0.0, **row[0]), PROMPT, output, **row[1])


@pytest.mark.parametrize("row", TABLE, ids=str)
@pytest.mark.parametrize("output", [OUTPUT, []], ids=["late", "first"])
def test_each_change_equals_the_definition(row: tuple[dict[str, Any], dict[str, Any]], output: list[int]) -> None:
    case, logits = case_of(row, output), random_logits(1, VOCAB, 2.0, seed=4)
    case = Case(case.params, case.prompt, case.output, tuple(e for e in case.eos if e < VOCAB), case.bad_words)
    expected = naive_edits(logits[0].double().numpy(), case)
    np.testing.assert_allclose(edited(logits, [case_of(row, output)])[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_together_they_do_what_each_does_alone() -> None:
    cases = [case_of(row, OUTPUT[: i % 6]) for i, row in enumerate(TABLE)]
    logits = random_logits(len(cases), VOCAB, 2.0, seed=4)
    together = edited(logits, cases)
    for i, case in enumerate(cases):
        assert torch.equal(together[i], edited(logits[i : i + 1], [case])[0])


def test_rows_that_ask_nothing_are_untouched_and_free() -> None:
    plain = Case(SamplingParams(temperature=0.0), PROMPT, OUTPUT)
    logits = random_logits(2, VOCAB, 2.0, seed=4)
    assert torch.equal(edited(logits, [plain, case_of(TABLE[0])])[0], logits[0])
    state = SamplingState(1, VOCAB, torch.device("cpu"))
    state.enter(NewSlot(0, "r", PROMPT, 4, plain.params, (), 0))
    batch = state.batch(np.array([0]), np.array([4]))
    assert batch.edits is None
    assert batch.kinds == ()


def test_penalties_after_a_resume_still_know_where_the_prompt_ended() -> None:
    """After a preemption the outputs come back inside NewSlot.token_ids; presence must not fall on the prompt."""
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    resumed = Case(params, PROMPT, OUTPUT)
    logits = torch.zeros(1, VOCAB)
    changed = edited(logits, [resumed])[0].nonzero().flatten().tolist()
    assert changed == sorted(set(OUTPUT))


@pytest.mark.parametrize(("window", "seen", "in_output"), [(2, {3, 5}, {3, 5}), (7, {7, 20, 5, 9, 3}, {5, 9, 3})])
def test_penalties_look_back_as_far_as_they_are_asked_to(window: int, seen: set[int], in_output: set[int]) -> None:
    logits = torch.ones(1, VOCAB)
    for asked, expected in (({"repetition_penalty": 2.0}, seen), ({"frequency_penalty": 1.0}, in_output)):
        params = SamplingParams(temperature=0.0, repeat_last_n=window, **asked)
        changed = edited(logits, [Case(params, PROMPT, OUTPUT)])[0] != 1
        assert set(changed.nonzero().flatten().tolist()) == expected


def test_a_window_of_nothing_costs_nothing() -> None:
    state = SamplingState(1, VOCAB, torch.device("cpu"))
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, repeat_last_n=0)
    state.enter(NewSlot(0, "r", PROMPT, 4, params, (), 0))
    assert state.batch(np.array([0]), np.array([4])).edits is None


def test_a_freed_slot_leaves_nothing_to_its_next_holder() -> None:
    state = SamplingState(1, VOCAB, torch.device("cpu"))
    strange = SamplingParams(seed=1, logit_bias={1: 5.0}, presence_penalty=1.0, logprobs=3, top_k=4)
    state.enter(NewSlot(0, "a", PROMPT, 4, strange, (), 0, bad_words_token_ids=((1,),)))
    state.leave(0)
    state.enter(NewSlot(0, "b", PROMPT, 4, SamplingParams(temperature=0.0), (), 0))
    batch = state.batch(np.array([0]), np.array([4]))
    assert (batch.edits, batch.kinds, batch.logprob_counts) == (None, (), ())


def test_ids_outside_the_vocabulary_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="admission"):
        tokens(torch.zeros(1, VOCAB), [Case(SamplingParams(temperature=0.0, logit_bias={VOCAB: 1.0}))])
