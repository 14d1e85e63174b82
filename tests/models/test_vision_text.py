"""The text parts of models that also see, as transformers saves and computes the whole models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.config.settings import EngineConfig
from localllm.errors import UnsupportedModel
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.loader import resident_bytes
from localllm.models.read_spec import family_of, read_spec
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, Harness, assert_close, prompt, reference_logits
from tests.models.vision_models import _SECTIONS, TEXT, VISION_MODELS, make_model


@pytest.mark.parametrize("config_name", VISION_MODELS)
def test_text_alone_has_the_logits_of_the_whole_model(config_name: str, tmp_path: Path) -> None:
    model, tokens = make_model(tmp_path, config_name), prompt(41)
    harness = Harness(tmp_path)
    assert "Text only" in family_of(harness.spec).note
    assert harness.spec.tie_word_embeddings == model.config.tie_word_embeddings
    _, logits = harness.prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(model, tokens))
    assert held_bytes(harness.model) == resident_bytes(tmp_path, harness.spec, CPU, torch.float32)


@pytest.mark.parametrize("config_name", ["Llama4Config", "Lfm2VlConfig"])
def test_a_model_whose_pictures_are_not_supported_says_so_at_start(config_name: str, tmp_path: Path) -> None:
    kind = make_model(tmp_path, config_name).config.model_type
    (tmp_path / "preprocessor_config.json").write_text("{}")
    plan = plan_memory(EngineConfig(device="cpu"), read_spec(tmp_path), 2**20, Hardware((), "a CPU", 2, 2**34, 2**33))
    assert f"Text only: Pictures of {kind} are not supported." in plan.notes


@pytest.mark.parametrize("rope", [{}, {"partial_rotary_factor": 1.0}])
def test_a_config_without_a_partial_rotary_factor_rotates_whole_heads(rope: dict[str, Any], tmp_path: Path) -> None:
    """Glm4vTextConfig has no such field, where GLM-4's has 0.5."""
    model, tokens = make_model(tmp_path, "Glm4vConfig", rope_parameters={**_SECTIONS, **rope}), prompt(20)
    assert_close(Harness(tmp_path).prefill(tokens)[1], reference_logits(model, tokens))


@pytest.mark.parametrize("width", [32, 64])
def test_square_experts_are_read_as_the_other_matrix_is_stored(width: int, tmp_path: Path) -> None:
    """With 32 gate_up_proj is [experts, 64, 64] and fits either way, with 64 down_proj."""
    model, tokens = make_model(tmp_path, "Qwen3VLMoeConfig", moe_intermediate_size=width), prompt(20)
    assert_close(Harness(tmp_path).prefill(tokens)[1], reference_logits(model, tokens))
    _turn_experts(tmp_path)
    assert_close(Harness(tmp_path).prefill(tokens)[1], reference_logits(model, tokens))


def test_experts_stored_the_other_way(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE is published: inputs first, where transformers 5 saves outputs first."""
    model, tokens = make_model(tmp_path, "Qwen3VLMoeConfig"), prompt(20)
    _turn_experts(tmp_path)
    _, logits = Harness(tmp_path).prefill(tokens)
    assert_close(logits, reference_logits(model, tokens))


def _turn_experts(path: Path) -> None:
    """Store the experts' matrices transposed."""
    state = load_file(path / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in state.items()}
    assert turned.keys() == state.keys()
    save_file(turned, path / "model.safetensors")


def test_fields_of_both_parts_in_one_place(tmp_path: Path) -> None:
    """As Qwen2.5-VL is published: the text part's fields beside vision_config, and a rotary embedding named mrope."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = {**TEXT, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "rope_scaling": rope, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 32}}))
    spec = read_spec(tmp_path)
    assert (spec.rope.variant, spec.rope.theta, spec.attention_bias) == ("default", 1e6, True)


def test_an_unknown_text_part_is_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["InternVLForConditionalGeneration"], "text_config": {**TEXT, "model_type": "phi9"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"'phi9' is not supported.*qwen3_moe"):
        read_spec(tmp_path)
