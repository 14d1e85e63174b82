"""Sampling from slots on the device is the sampler's definition, whatever rows ask and however many are padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.launch import INTERPRETED
from localllm.runner.sampler import Sampled, sample, sample_on_device
from localllm.runner.sampling import SamplingFeatures, SamplingState
from tests.kernels.slot_tables import longs
from tests.runner.harness import VOCAB, cases
from tests.runner.naive import Case, naive_edits, naive_token, random_logits

EVERYTHING = SamplingFeatures(filters=True, edits=True, logprobs=True)


def state_of(batch: list[Case], device: torch.device) -> tuple[SamplingState, torch.Tensor]:
    state = SamplingState(len(batch), VOCAB, device, with_tables=True)
    held = torch.zeros(len(batch), 1 + max(len(case.tokens) for case in batch), dtype=torch.int32)
    for slot, case in enumerate(batch):
        state.enter(NewSlot(slot, f"r{slot}", case.tokens, len(case.prompt), case.params, (), 0, case.eos,
                            case.bad_words))  # fmt: skip
        held[slot, : len(case.tokens)] = torch.tensor(case.tokens)
    return state, held.to(device)


def run(
    logits: torch.Tensor, batch: list[Case], device: torch.device, features: SamplingFeatures | None = None
) -> Sampled:
    """One padding row in front and one behind, full of NaN."""
    state, held = state_of(batch, device)
    features = features or state.features(np.arange(len(batch)))
    assert features is not None
    assert state.tables is not None
    poison = torch.full((1, logits.shape[-1]), math.nan)
    slots = longs([-1, *range(len(batch)), -1], device)
    lengths = longs([0, *(len(case.tokens) for case in batch), 0], device)
    with torch.inference_mode():
        return sample_on_device(
            torch.cat((poison, logits, poison)).to(device), slots, lengths, state.tables, held, features
        )


@settings(deadline=None, max_examples=4 if INTERPRETED else 40, suppress_health_check=list(HealthCheck))
@given(st.lists(cases, min_size=1, max_size=3 if INTERPRETED else 9), st.integers(0, 1000), st.booleans())
def test_equals_the_definition_row_by_row(batch: list[Case], seed: int, everything: bool) -> None:
    """With the way that the batch asks for, and with the one that does everything for everybody."""
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    logits = random_logits(len(batch), VOCAB, seed=seed)
    usable = [np.isfinite(naive_edits(x.double().numpy(), case).max()) for x, case in zip(logits, batch, strict=True)]
    got = run(logits, batch, device, EVERYTHING if everything else None)
    assert got.best[1:-1].isfinite().tolist() == usable
    assert (got.token_ids[0], got.token_ids[-1]) == (0, 0)
    for row, case in enumerate(batch):
        if usable[row]:
            assert got.token_ids[row + 1] == naive_token(logits[row], case), case


def test_logprobs_are_those_of_the_general_way(device: torch.device) -> None:
    batch = [Case(SamplingParams(seed=i, logprobs=n, logit_bias=bias), [1, 2])
             for i, (n, bias) in enumerate([(None, None), (3, {5: 50.0}), (0, None), (20, None)])]  # fmt: skip
    state, held = state_of(batch, device)
    logits, slots = random_logits(4, VOCAB), np.arange(4)
    lengths = np.full(4, 2)
    want = sample(logits.to(device, copy=True), state.batch(slots, lengths), held)
    got = run(logits, batch, device)
    assert got.logprobs is not None
    assert want.logprobs is not None
    assert got.token_ids[1:-1].tolist() == want.token_ids.tolist()
    for place, (row, count) in enumerate(state.batch(slots, lengths).logprob_counts):
        ids = want.logprobs.token_ids[place, : 1 + count]
        assert got.logprobs.token_ids[row + 1, : 1 + count].tolist() == ids.tolist()
        torch.testing.assert_close(
            got.logprobs.logprobs[row + 1, : 1 + count],
            want.logprobs.logprobs[place, : 1 + count],
            rtol=1e-5,
            atol=1e-5,
        )
        assert got.logprobs.ranks[row + 1] == want.logprobs.ranks[place]


def test_wants_is_the_least_that_serves_all(device: torch.device) -> None:
    asked = [{"temperature": 0.0, "top_k": 5}, {}, {"top_p": 0.5}, {"min_p": 0.1}, {"presence_penalty": 1.0},
             {"logprobs": 0}]  # fmt: skip
    state, _ = state_of([Case(SamplingParams(**fields)) for fields in asked], device)
    assert state.features(np.array([0, 1])) == SamplingFeatures()
    assert [state.features(np.array([slot])) for slot in (2, 3, 4, 5)] == [
        SamplingFeatures(filters=True), SamplingFeatures(filters=True), SamplingFeatures(edits=True),
        SamplingFeatures(logprobs=True),
    ]  # fmt: skip
    assert state.features(np.array([2, 4, 5])) == EVERYTHING


def test_a_slot_forgets_its_last_holder(device: torch.device) -> None:
    strange = SamplingParams(seed=1, logit_bias={1: 90.0}, presence_penalty=1.0, top_k=4, min_tokens=9,
                             stop_token_ids=[3], allowed_token_ids=[1, 2])  # fmt: skip
    plain, logits = SamplingParams(temperature=0.0), random_logits(1, VOCAB)
    state, held = state_of([Case(strange, bad_words=((7,),))], device)
    state.leave(0)
    state.enter(NewSlot(0, "b", [1], 1, plain, (), 0))
    assert state.tables is not None
    got = sample_on_device(logits.to(device, copy=True), longs([0], device), longs([1], device), state.tables, held,
                           EVERYTHING)  # fmt: skip
    assert got.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("features", [SamplingFeatures(), SamplingFeatures(filters=True), EVERYTHING], ids=str)
def test_a_captured_graph_samples_whatever_comes_later(features: SamplingFeatures, device: torch.device) -> None:
    batch = [Case(SamplingParams(seed=i, top_k=(0, 9)[i % 2], top_p=(1.0, 0.8)[i % 2], presence_penalty=i % 3 / 2))
             for i in range(6)]  # fmt: skip
    if not features.filters:
        batch = [Case(SamplingParams(seed=i)) for i in range(6)]
    state, held = state_of(batch, device)
    assert state.tables is not None
    buffers = (torch.zeros(4, VOCAB, device=device), longs([-1] * 4, device), longs([0] * 4, device))
    sample_on_device(*buffers, state.tables, held, features)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_on_device(*buffers, state.tables, held, features)
    for slots in ([0, 1, 2, -1], [5, -1, -1, -1], [3, 4, 1, 0]):
        fresh = (random_logits(4, VOCAB, seed=sum(slots)).to(device), longs(slots, device), longs([1] * 4, device))
        for buffer, values in zip(buffers, fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        eager = sample_on_device(*fresh, state.tables, held, features)
        assert out.token_ids.tolist() == eager.token_ids.tolist()
