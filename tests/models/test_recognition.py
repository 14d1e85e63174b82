"""Classes of `transformers` that localllm's own decoder computes, recognised without a family that describes them: what
is recognised agrees with its class, and what differs anywhere is left to the class, with the reason."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.flint import modeling_flint as flint

from localllm.errors import UnsupportedModel
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend import recognition
from localllm.models.transformers_backend.recognition import Recognised, recognise
from tests.models.class_models import RECOGNISED_PARTS, make_class_model
from tests.models.classes import class_logits, largest_difference, try_class
from tests.models.harness import CPU, ModelHarness

FOUND = ("cohere_compass_text", "flint", "granite_swa", "granitemoe_swa", "hyperclovax", *RECOGNISED_PARTS)
DESCRIBED = (
    "arcee", "cohere2", "dots1", "ernie4_5", "flex_olmo", "glm4", "glm4_moe", "granitemoeshared", "helium", "qwen3_moe",
)  # fmt: skip
"""Types that families of localllm describe too: what is recognised without them must compute the same."""
OTHERS = {
    "apertus": "a layer has mlp.act_fn.alpha_n",
    "bitnet": "a layer has mlp.ffn_sub_norm.weight",
    "gemma": "its code reads use_bidirectional_attention from its config",
    "kolibri1": "correction_bias",
}


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    """Nothing that another test has found is remembered."""
    recognition._judged.cache_clear()
    yield
    recognition._judged.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_class_model(tmp_path, "flint")
    return tmp_path


def reason(path: Path) -> str:
    found = recognise(path, json.loads((path / "config.json").read_text())["architectures"][0])
    assert isinstance(found, str), found
    return found


@pytest.mark.parametrize("model_type", FOUND)
def test_recognised_classes_agree_with_transformers(model_type: str) -> None:
    outcome = try_class(model_type)
    assert outcome.kind == "own", outcome.detail


@pytest.mark.parametrize("model_type", DESCRIBED)
def test_without_its_family_a_class_is_recognised_and_agrees(model_type: str, tmp_path: Path) -> None:
    make_class_model(tmp_path, model_type)
    spec = read_spec(tmp_path, model_impl="transformers")
    found = recognise(tmp_path, spec.architecture)
    assert isinstance(found, Recognised), found
    own = replace(spec, implementation="localllm", recognised=found.storage, **found.fields)
    model = load_model(tmp_path, own, CPU, torch.float32)
    assert isinstance(model, DecoderModel)
    prompts = [torch.randint(3, 500, (length,)).tolist() for length in (52, 17, 1)]
    with torch.inference_mode():
        assert largest_difference(ModelHarness(model), prompts, class_logits(tmp_path, prompts)) < 1e-4


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_class_with_another_part_keeps_the_code_of_transformers(model_type: str, tmp_path: Path) -> None:
    make_class_model(tmp_path, model_type)
    assert OTHERS[model_type] in reason(tmp_path)


def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that only large activations reach."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=7.0)
        return self.down_proj(gate * self.up_proj(x))

    monkeypatch.setattr(flint.FlintMLP, "forward", forward)


def turned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another angle from a position on that no short prompt reaches."""
    forward = flint.FlintRotaryEmbedding.forward

    def later(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.where(position_ids < 128, position_ids, position_ids // 2))

    monkeypatch.setattr(flint.FlintRotaryEmbedding, "forward", later)


def one_more_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is wider by one token."""
    mask = flint.create_sliding_window_causal_mask

    def wider(config: Any, **others: Any) -> Any:
        config.sliding_window += 1
        try:
            return mask(config=config, **others)
        finally:
            config.sliding_window -= 1

    monkeypatch.setattr(flint, "create_sliding_window_causal_mask", wider)


def biased_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are weighed by the square of their score."""
    forward = flint.FlintTopKRouter.forward

    def squared(self: Any, x: torch.Tensor) -> Any:
        logits, weights, chosen = forward(self, x)
        return logits, weights.square(), chosen

    monkeypatch.setattr(flint.FlintTopKRouter, "forward", squared)


@pytest.mark.parametrize("change", [limited, turned_later, one_more_key, biased_choice])
def test_a_class_that_computes_otherwise_is_not_recognised(
    change: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert "it computes other logits" in reason(path)


def test_a_field_that_a_class_reads_must_be_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(recognise(path, "FlintForCausalLM"), Recognised)
    recognition._judged.cache_clear()
    known = tuple(name for name in recognition._KNOWN_FIELDS if name != "norm_topk_prob")
    monkeypatch.setattr(recognition, "_KNOWN_FIELDS", known)
    assert reason(path) == "its code reads norm_topk_prob from its config"


def test_a_checkpoint_with_more_tensors_keeps_the_code_of_transformers(path: Path) -> None:
    file = path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.zeros(4)}, file, {"format": "pt"})
    spec = read_spec(path)
    assert spec.implementation == "transformers"
    assert (
        spec.why_transformers == "its checkpoint has more tensors than the class, such as model.layers.0.extra.weight"
    )


def test_a_config_alone_is_enough(path: Path) -> None:
    (path / "model.safetensors").unlink()
    spec = read_spec(path)
    assert (spec.implementation, spec.attention_sinks) == ("localllm", True)


def test_the_first_layers_are_compared_when_the_model_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(path)
    limited(monkeypatch)
    forward = flint.FlintMLP.forward
    monkeypatch.setattr(flint.FlintMLP, "forward", lambda self, x: 1.5 * forward(self, x))
    with pytest.raises(UnsupportedModel, match="computes other logits") as raised:
        load_model(path, spec, CPU, torch.float32)
    assert "--model-impl transformers" in str(raised.value.hint)
    load_model(path, spec, CPU, torch.float32, verify=False)


def test_a_model_that_is_not_recognised_says_why(tmp_path: Path) -> None:
    make_class_model(tmp_path, "bitnet")
    spec = read_spec(tmp_path)
    assert spec.implementation == "transformers"
    assert spec.why_transformers.startswith("a layer has mlp.ffn_sub_norm.weight")
    assert not read_spec(tmp_path, model_impl="transformers").why_transformers
