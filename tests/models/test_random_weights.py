"""Random models have the published sizes, live on the device asked for, and keep activations of ordinary size."""

import pytest
import torch

from scripts.gpu_check_lib.roofline import work_of
from scripts.random_weights import SHAPES, WeightFormat, random_model, shape_spec
from tests.models.harness import CPU, ModelHarness

PARAMETERS = {  # in matrices of layers and of the head, from the published configurations
    "llama-3.1-8b": (6.979e9, 0.525e9),
    "llama-3.2-1b": (0.973e9, 0.263e9),
    "qwen2.5-0.5b": (0.358e9, 0.136e9),
    "qwen3-4b": (3.633e9, 0.389e9),
    "qwen3-14b": (13.212e9, 0.778e9),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_are_those_of_the_models(name: str) -> None:
    work, (layers, head) = work_of(shape_spec(name)), PARAMETERS[name]
    assert work.layer_parameters == pytest.approx(layers, rel=1e-3)
    assert work.head_parameters == pytest.approx(head, rel=2e-3)


def test_every_shape_is_a_model_we_run() -> None:
    for name in SHAPES:
        spec = shape_spec(name, num_hidden_layers=4)
        assert spec.num_layers == 4
        assert (spec.qk_norm == "head") == name.startswith(("qwen3", "gemma-3"))


@pytest.mark.parametrize("weights", ["16-bit", "int4", "int8", "fp8"])
def test_a_random_model_runs_and_stays_finite(weights: WeightFormat) -> None:
    model = random_model(shape_spec("tiny"), CPU, torch.float32, weights=weights, max_model_len=128)
    assert model.max_model_len == 128
    _, logits = ModelHarness(model).prefill(list(range(60)), chunk=17)
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 3.0


def test_the_same_seed_gives_the_same_model() -> None:
    logits = [
        ModelHarness(random_model(shape_spec("tiny"), CPU, torch.float32, max_model_len=64, seed=seed)).prefill([1, 2])[
            1
        ]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
