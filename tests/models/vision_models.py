"""Tiny checkpoints of models that read pictures, for the tests of their text part."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import VOCAB_SIZE

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PATCHES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_LAYERS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 8,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
FIELDS: dict[str, dict[str, Any]] = {"MuseGlimmerConfig": {"projector_hidden_size": 64, "out_hidden_size": 128}}
"""Of the whole model's config."""
VISION_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLConfig": (
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": _SECTIONS},
        {**_PATCHES, "embed_dim": 32, "hidden_size": 64},
    ),
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
    "MuseGlimmerConfig": (
        "MuseGlimmerForConditionalGeneration",
        {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 20, "post_norm_eps": 0.01},
        {**_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "Step3p7Config": (
        "Step3p7ForConditionalGeneration",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": 20,
            "num_sliding_attention_heads": 6,  # windowed layers have more heads than the others
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "share_expert_dim": 56,
            "moe_router_scaling_factor": 2.5,
            "swiglu_limits": [0.0, 0.0, 0.0, 0.4],
            "swiglu_limits_shared": [None, 0.0, 0.5, 0.0],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {**_LAYERS, "mlp_ratio": 1.0},
    ),
    "Glm4vConfig": (
        "Glm4vForConditionalGeneration",
        {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {**_PATCHES, "out_hidden_size": 64, "image_size": 16},
    ),
    "Lfm2VlConfig": (
        "Lfm2VlForConditionalGeneration",
        {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "block_auto_adjust_ff_dim": False,
        },
        {"model_type": "siglip2_vision_model", **_LAYERS, "num_patches": 16},
    ),
    "Glm46VConfig": (
        "Glm46VForConditionalGeneration",
        {
            "model_type": "glm4v_text",
            "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        {**_PATCHES, "model_type": "glm4v_vision", "out_hidden_size": 64, "image_size": 16},
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

_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "projection_dim": 16, **_LAYERS, "num_hidden_layers": 2, "image_size": 16,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", **_LAYERS, "image_size": 16}
_PIXTRAL: dict[str, Any] = {"model_type": "pixtral", "head_dim": 16, **_LAYERS, "image_size": 64}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 24, "initializer_range": 0.2,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GEMMA4_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256, "standardize": True,
}  # fmt: skip
MORE_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3Config": (
        "Gemma3ForConditionalGeneration",
        {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24, "query_pre_attn_scalar": 16,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        _SIGLIP,
    ),
    "Gemma4Config": (
        "Gemma4ForConditionalGeneration",
        {**_GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
         "num_kv_shared_layers": 2, "pad_token_id": 3},
        _GEMMA4_TOWER,
    ),
    "Gemma4UnifiedConfig": (
        "Gemma4UnifiedForConditionalGeneration",
        _GEMMA4,
        {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 128, "output_proj_dims": 32},
    ),
    "Mistral3Config": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "head_dim": 16}, _PIXTRAL),
    "LlavaConfig": ("LlavaForConditionalGeneration", {"model_type": "llama"}, _CLIP),
    "PixtralConfig": ("LlavaForConditionalGeneration", {"model_type": "mistral", "head_dim": 16}, _PIXTRAL),
    "LlavaNextConfig": ("LlavaNextForConditionalGeneration", {"model_type": "mistral", "head_dim": 16}, _CLIP),
    "LlavaOnevisionConfig": ("LlavaOnevisionForConditionalGeneration", {"model_type": "qwen2"}, _SIGLIP),
    "Idefics3Config": ("Idefics3ForConditionalGeneration", {"model_type": "llama"}, _LAYERS),
    "Qwen3_5Config": (
        "Qwen3_5ForConditionalGeneration",
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True, "mrope_section": [1, 0, 1],
                             "partial_rotary_factor": 0.25},
         "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2},
        {**_PATCHES, "out_hidden_size": 64, "num_position_embeddings": 16},
    ),
}  # fmt: skip
"""Models whose text part other tests cover."""


def make_model(
    path: Path, config_name: str, *, fields: dict[str, Any] | None = None, tower: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:  # fmt: skip
    """A tiny random model that sees, saved by transformers. fields: of its config; tower: other values of the fields
    that its tower has; changes: of its text part."""
    class_name, text, vision = {**VISION_MODELS, **MORE_MODELS}[config_name]
    text, vision = {**text, **changes}, {name: (tower or {}).get(name, value) for name, value in vision.items()}
    kind = "LlavaConfig" if config_name == "PixtralConfig" else config_name
    config = getattr(transformers, kind)(
        text_config={**TEXT, **text}, vision_config=vision, **FIELDS.get(config_name, {}), **(fields or {})
    )
    config.tie_word_embeddings = bool(text.get("tie_word_embeddings"))
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():  # what is saved
            if value.ndim == 1 and value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(path)
    return model
