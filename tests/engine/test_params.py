"""Every parameter has a range, and leaving it is refused by name."""

import math

import pytest

from localllm.engine.params import SAMPLING_PARAMS, SamplingParams, given_params
from localllm.errors import InvalidParameter

OUT_OF_RANGE = [
    ("n", None), ("temperature", None), ("top_k", None), ("min_tokens", None),
    ("n", 0), ("n", 257), ("n", 1.5), ("n", True), ("temperature", -0.1), ("temperature", math.nan),
    ("temperature", math.inf), ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("repeat_last_n", -2), ("dry_base", -1), ("xtc_probability", 1.1), ("mirostat", 3),
    ("dry_sequence_breakers", [""]), ("dry_sequence_breakers", ["x" * 41]), ("logits_processors", [1]),
    ("repeat_last_n", 1.5), ("logit_bias", {1: 101}),
    ("logit_bias", {"x": 1}), ("logit_bias", {-1: 1}),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]), ("seed", 2**64), ("max_tokens", 0),
    ("min_tokens", -1), ("min_tokens", 17), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]), ("logprobs", -2),
    ("prompt_logprobs", -2), ("truncate_prompt_tokens", 0), ("repetition_penalty", 1e-300),
    ("allowed_token_ids", [1, True]), ("bad_words", ["x" * 999] * 17),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_everyday_spellings_are_normalised():
    params = SamplingParams(stop="\n", top_k=-1, logit_bias={"5": -100})
    assert params.stop == ("\n",)
    assert params.top_k == 0
    assert params.logit_bias == {5: -100}


def test_stop_strings_need_text():
    with pytest.raises(InvalidParameter):
        SamplingParams(stop="x", detokenize=False)


def test_all_stop_strings_together_are_bounded():
    SamplingParams(stop=["x" * 1000] * 4)
    with pytest.raises(InvalidParameter, match="5000 characters; at most 4096") as caught:
        SamplingParams(stop=[f"{i}" * 1000 for i in range(5)])
    assert caught.value.param == "stop"


def test_changed_names_what_differs_from_the_defaults():
    assert SamplingParams(temperature=0.5, stop="x").changed() == {"temperature": 0.5, "stop": ("x",)}


@pytest.mark.parametrize("name", SAMPLING_PARAMS)
def test_every_parameter_is_described_and_its_default_is_within_its_bounds(name):
    info = SAMPLING_PARAMS[name]
    assert info.text.endswith(".")
    assert (info.kind in ("whole", "real")) == (info.low is not None)
    info.check(info.default, name)
    if info.low is not None:
        with pytest.raises(InvalidParameter, match=name):
            info.check(info.low - 1, name)


def test_a_body_is_read_by_the_names_of_its_dialect():
    class Options:
        num_predict, repeat_penalty, top_k, temperature = 7, 1.1, None, 0

    assert given_params(Options, "ollama") == {"max_tokens": 7, "repetition_penalty": 1.1, "temperature": 0}
    assert given_params(Options) == {"temperature": 0}
