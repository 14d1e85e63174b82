"""Weights that stay while the engine around them is made anew, with another context than they were loaded for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.machine.hardware import read_hardware
from localllm.models.weights.parameters import held_bytes
from localllm.serving.build import build_engine
from localllm.serving.reopen import close_engine, open_engine
from tests.serving import answer, settings_for
from tests.tiny import make_tiny_model

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip


def longrope(folder: Path) -> Path:
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    return make_tiny_model(folder, "phi3", rope_parameters=LONGROPE, **lengths)


def two_ropes(folder: Path) -> Path:
    return make_tiny_model(folder, "gemma3")


def one_rope(folder: Path) -> Path:
    return make_tiny_model(folder, "llama")


@pytest.mark.parametrize("make", [one_rope, two_ropes, longrope])
@pytest.mark.parametrize(("loaded", "wanted"), [(24, 120), (120, 24)])
def test_an_engine_opened_anew_is_as_one_that_was_loaded_so(
    make: Callable[[Path], Path], loaded: int, wanted: int, tmp_path: Path
) -> None:
    path = make(tmp_path / "model")
    bare = close_engine(build_engine(settings_for(path, max_model_len=loaded)))
    config = settings_for(path, max_model_len=wanted).engine
    plan = bare.plan(config, read_hardware())
    again, fresh = open_engine(bare, config), build_engine(settings_for(path, max_model_len=wanted))
    assert again.plan.max_model_len == fresh.plan.max_model_len == wanted
    assert plan.weights_bytes == held_bytes(bare.executor.model) == bare.weights_bytes == fresh.plan.weights_bytes
    assert answer(again, wanted - 6) == answer(fresh, wanted - 6)
    again.close()
    fresh.close()


def test_without_a_wish_the_context_is_the_models_own(tiny_llama_path: Path) -> None:
    bare = close_engine(build_engine(settings_for(tiny_llama_path, max_model_len=24)))
    model = open_engine(bare, settings_for(tiny_llama_path, max_model_len=None, kv_cache_memory_bytes=8 << 20).engine)
    assert model.plan.max_model_len == model.spec.max_position > 24
    model.close()
