"""The text parts of models that also see, as transformers saves and computes the whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from localllm.errors import UnsupportedModel
from localllm.models.architectures.read_spec import family_of, read_spec
from localllm.models.loader import resident_bytes
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, Harness
from tests.models.test_goldens import assert_close, prompt, reference_logits
from tests.tiny import VOCAB_SIZE

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0,
}  # fmt: skip
_PATCHES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_LAYERS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 8,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLConfig": ("Qwen2VLForConditionalGeneration", {"rope_parameters": _SECTIONS}, {**_PATCHES, "embed_dim": 32}),
    "Qwen2_5_VLConfig": (
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": _SECTIONS, "tie_word_embeddings": True},
        {**_PATCHES, "out_hidden_size": 64},
    ),
    "Qwen3VLConfig": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}, "head_dim": 16},
        {**_PATCHES, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "Qwen3VLMoeConfig": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
        {**_PATCHES, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "InternVLConfig": ("InternVLForConditionalGeneration", {"model_type": "qwen3", "head_dim": 16}, _LAYERS),
    "SmolVLMConfig": ("SmolVLMForConditionalGeneration", {"model_type": "llama"}, _LAYERS),
    "Llama4Config": (
        "Llama4ForConditionalGeneration",
        {"intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4},
        {**_LAYERS, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 32, "projector_input_dim": 32},
    ),
    "Glm4vConfig": (
        "Glm4vForConditionalGeneration",
        {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {**_PATCHES, "out_hidden_size": 64, "image_size": 16},
    ),
    "Glm4vMoeConfig": (
        "Glm4vMoeForConditionalGeneration",
        {
            "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
        },
        {**_PATCHES, "out_hidden_size": 64, "image_size": 16},
    ),
}


def make_model(path: Path, config_name: str, **changes: Any) -> Any:
    """A tiny random model that sees, saved by transformers. changes: fields of its text part."""
    class_name, text, vision = MODELS[config_name]
    text = {**text, **changes}
    config = getattr(transformers, config_name)(text_config={**TEXT, **text}, vision_config=vision)
    config.tie_word_embeddings = bool(text.get("tie_word_embeddings"))
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 1 and value.is_floating_point() and "inv_freq" not in name:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("config_name", MODELS)
def test_text_alone_has_the_logits_of_the_whole_model(config_name: str, tmp_path: Path) -> None:
    model, tokens = make_model(tmp_path, config_name), prompt(41)
    harness = Harness(tmp_path)
    assert "Text only" in family_of(harness.spec).note
    assert harness.spec.tie_word_embeddings == model.config.tie_word_embeddings
    _, logits = harness.prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(model, tokens))
    assert held_bytes(harness.model) == resident_bytes(tmp_path, harness.spec, CPU, torch.float32)


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
