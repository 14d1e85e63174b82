"""What is refused before it queues, and with which numbers."""

from dataclasses import replace

import pytest

from localllm.engine.admission import MOST_LOGPROBS, Admission, GenerationRequest, ModelLimits
from localllm.engine.params import SamplingParams
from localllm.errors import ContextTooLong, InvalidParameter
from tests.engine.harness import Letters


@pytest.fixture
def admission():
    return Admission(ModelLimits(max_model_len=10, vocab_size=100, eos_token_ids=(7,)), Letters(), seed=3)


def ask(prompt, **params):
    return GenerationRequest("x", prompt, SamplingParams(**params))


def test_prompt_too_long_names_needed_and_available_and_the_flag(admission):
    with pytest.raises(ContextTooLong) as caught:
        admission.admit(ask(list(range(12)), max_tokens=None))
    assert "10 tokens" in caught.value.what
    assert "13: 12 in the prompt" in caught.value.why
    assert "--max-model-len" in caught.value.hint


def test_output_that_does_not_fit_is_refused_not_shortened(admission):
    with pytest.raises(ContextTooLong) as caught:
        admission.admit(ask([1, 2, 3], max_tokens=8))
    assert caught.value.param == "max_tokens"


def test_without_max_tokens_the_output_gets_the_rest_of_the_context(admission):
    (request,) = admission.admit(ask([1, 2, 3], max_tokens=None))
    assert request.max_output_tokens == 7


def test_truncation_happens_only_when_asked_for(admission):
    (request,) = admission.admit(ask(list(range(12)), max_tokens=2, truncate_prompt_tokens=4))
    assert request.token_ids.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(("prompt_len", "asked"), [(3, 8), (9, 2), (1, 2**63), (1, 2**70)])
def test_min_tokens_that_can_never_be_met_are_refused(admission, prompt_len, asked):
    with pytest.raises(InvalidParameter, match=f"asks for {asked} tokens.*at most {10 - prompt_len} fit") as caught:
        admission.admit(ask([1] * prompt_len, max_tokens=None, min_tokens=asked))
    assert caught.value.param == "min_tokens"
    (request,) = admission.admit(ask([1] * prompt_len, max_tokens=None, min_tokens=10 - prompt_len))
    assert request.params.min_tokens == request.max_output_tokens


@pytest.mark.parametrize("prompt", [[], [100], [-1], [2**40]])
def test_bad_prompt_tokens_are_refused(admission, prompt):
    with pytest.raises(InvalidParameter) as caught:
        admission.admit(ask(prompt))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("field", [{"logit_bias": {100: 1.0}}, {"stop_token_ids": [100]}, {"allowed_token_ids": [100]}])
def test_token_ids_outside_the_vocabulary_are_refused_by_field(admission, field):
    with pytest.raises(InvalidParameter) as caught:
        admission.admit(ask([1], max_tokens=1, **field))
    assert caught.value.param == next(iter(field))


def test_choices_have_their_own_ids_and_seeds(admission):
    requests = admission.admit(ask([1], n=3, max_tokens=1, seed=5))
    assert [request.request_id for request in requests] == ["x/0", "x/1", "x/2"]
    assert [request.params.seed for request in requests] == [5, 6, 7]


def test_sampled_requests_always_have_a_seed_and_greedy_ones_need_none(admission):
    (sampled,) = admission.admit(ask([1], max_tokens=1))
    (greedy,) = admission.admit(ask([1], max_tokens=1, temperature=0.0))
    assert sampled.params.seed is not None
    assert greedy.params.seed is None


def test_drawn_seeds_repeat_with_the_engine_seed_and_differ_between_requests(admission):
    again = Admission(admission.limits, Letters(), seed=3)
    first = [admission.admit(ask([1], max_tokens=1))[0].params.seed for _ in range(3)]
    assert first == [again.admit(ask([1], max_tokens=1))[0].params.seed for _ in range(3)]
    assert len(set(first)) == 3


def test_bad_words_are_tokenised_with_and_without_a_space(admission):
    (request,) = admission.admit(ask([1], max_tokens=1, bad_words=["ab"]))
    assert request.bad_words_token_ids == ((97, 98), (32, 97, 98))


def test_min_tokens_and_eos_reach_the_request(admission):
    (request,) = admission.admit(ask([1], max_tokens=4, min_tokens=2, stop_token_ids=[9]))
    assert request.stop_token_ids == {7, 9}
    (ignoring,) = admission.admit(ask([1], max_tokens=4, ignore_eos=True))
    assert ignoring.stop_token_ids == frozenset()


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(("bound", "asked"), [(20, 21), (20, -1), (0, 1), (99, -1)])
def test_logprobs_above_the_servers_bound_are_refused_with_the_setting_that_raises_it(admission, field, bound, asked):
    admission.limits = replace(admission.limits, max_logprobs=bound)
    with pytest.raises(InvalidParameter) as caught:
        admission.admit(ask([1], max_tokens=1, **{field: asked}))
    assert caught.value.param == field
    assert f"At most {bound}" in caught.value.why
    assert f"--max-logprobs {asked}" in caught.value.hint


@pytest.mark.parametrize(("bound", "asked", "given"), [(20, 20, 20), (-1, -1, 100), (100, -1, 100), (-1, 500, 100)])
def test_minus_one_is_the_whole_vocabulary(admission, bound, asked, given):
    admission.limits = replace(admission.limits, max_logprobs=bound)
    (request,) = admission.admit(ask([1], max_tokens=1, logprobs=asked, prompt_logprobs=0))
    assert (request.params.logprobs, request.params.prompt_logprobs) == (given, 0)


@pytest.mark.parametrize(("field", "fits"), [("logprobs", {"max_tokens": 64}), ("prompt_logprobs", {"max_tokens": 1})])
def test_a_vocabulary_at_more_positions_than_memory_should_hold_is_refused_with_numbers(field, fits):
    limits = ModelLimits(max_model_len=4096, vocab_size=150_000, max_logprobs=-1)
    admission = Admission(limits, Letters())
    assert admission.admit(ask([1] * 64, **{field: -1}, **fits))
    with pytest.raises(InvalidParameter, match=f"{150_000 * 256} numbers") as caught:
        admission.admit(ask([1] * 256, max_tokens=256, **{field: -1}))
    assert str(MOST_LOGPROBS) in caught.value.why
