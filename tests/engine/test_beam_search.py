"""The search itself, over a table of probabilities: it finds what looking at everything finds."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.admission import Admission, GenerationRequest, ModelLimits
from localllm.engine.beam_search import BeamSearch, BeamSearchParams
from localllm.engine.step import TokenLogprobs
from localllm.errors import InvalidParameter
from tests.draws import draws
from tests.engine.harness import Letters, Scores, all_the_way

VOCAB = 6


def table(seed: int) -> Scores:
    """Log-probabilities of the next token after a context."""

    def scores(tokens: Sequence[int]) -> list[float]:
        rng = random.Random(f"{seed}{list(tokens)}")
        weights = [rng.expovariate(1) ** 2 + 1e-3 for _ in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return scores


def search(asked: GenerationRequest, scores: Scores, eos: tuple[int, ...], vocab_size: int = VOCAB) -> BeamSearch:
    """Driven to its end."""
    search = BeamSearch(asked, Admission(ModelLimits(64, vocab_size, eos), Letters()))
    while not search.is_over:
        answers = []
        for request in search.requests():
            following, count = scores(request.prompt_token_ids), request.params.logprobs
            assert count is not None
            order = sorted(range(len(following)), key=lambda i: -following[i])[:count]
            answers.append(TokenLogprobs([order[0], *order], [following[i] for i in [order[0], *order]], 1))
        search.advance(answers)
    return search


def asked(width: int, max_tokens: int, penalty: float = 1.0, **more: bool) -> GenerationRequest:
    return BeamSearchParams(width, max_tokens, length_penalty=penalty, **more).request("b", [1, 2, 3])


@draws(60)
@given(
    st.integers(0, 10**6), st.integers(1, VOCAB), st.integers(1, 7), st.sampled_from([None, 0]),
    st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0, 6.0]),
)  # fmt: skip
def test_ending_early_changes_nothing(seed, width, max_tokens, eos, penalty):
    found = search(asked(width, max_tokens, penalty), table(seed), () if eos is None else (eos,)).best()
    wanted = all_the_way(table(seed), [1, 2, 3], width, max_tokens, eos, penalty)
    assert [list(beam.token_ids) for beam in found] == [tokens for tokens, _ in wanted]
    assert [beam.cum_logprob for beam in found] == pytest.approx([total for _, total in wanted])


@given(st.integers(0, 10**6))
def test_a_width_of_the_whole_vocabulary_finds_the_best_of_all_short_answers(seed):
    scores = table(seed)
    every = {
        (a, b): scores([1, 2, 3])[a] + scores([1, 2, 3, a])[b] for a in range(VOCAB) for b in range(VOCAB)
    }  # fmt: skip
    best = sorted(every, key=lambda pair: -every[pair])[:VOCAB]
    assert [beam.token_ids for beam in search(asked(VOCAB, 2), scores, ()).best()] == best


def test_ends_early_where_nothing_better_can_come():
    steps = []

    def sure_of_the_end(tokens: Sequence[int]) -> list[float]:
        steps.append(len(tokens))
        return [math.log(0.99)] + [math.log(0.01 / (VOCAB - 1))] * (VOCAB - 1)

    found = search(asked(2, 50, 0.0), sure_of_the_end, (0,)).best()
    assert max(steps) < 8
    assert [beam.finish_reason for beam in found] == ["stop", "stop"]


def test_a_token_that_ends_an_answer_is_kept_only_where_asked_for_and_never_counted():
    without = search(asked(2, 5), table(1), (0,)).best()
    with_it = search(asked(2, 5, include_stop_str_in_output=True), table(1), (0,)).best()
    assert any(beam.finish_reason == "stop" for beam in without)
    for plain, longer in zip(without, with_it, strict=True):
        assert longer.token_ids == plain.token_ids + ((0,) if plain.finish_reason == "stop" else ())
        assert longer.cum_logprob == plain.cum_logprob
        assert len(longer.logprobs) == len(longer.token_ids)
        assert [entry.token_ids[0] for entry in longer.logprobs] == list(longer.token_ids)
    ignoring = search(asked(2, 5, ignore_eos=True), table(1), (0,)).best()
    assert all(len(beam.token_ids) == 5 for beam in ignoring)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 257}, "beam_width"), ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"), ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"), ({"length_penalty": "long"}, "length_penalty"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(fields, param):
    with pytest.raises(InvalidParameter) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
    assert caught.value.param == param


def test_a_width_beyond_the_servers_logprobs_is_refused_with_the_setting_that_raises_it():
    with pytest.raises(InvalidParameter, match="width 11 needs 22") as caught:
        search(asked(11, 3), table(1), (), vocab_size=500)
    assert "--max-logprobs 22" in caught.value.hint
    with pytest.raises(InvalidParameter, match="width 7 is not possible"):
        search(asked(7, 3), table(1), ())
