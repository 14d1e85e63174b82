"""Tiny random models of any class of `transformers`, made by shrinking the default config of its type.

Every size that a config has by a known name is replaced by a small one, in its parts too (text, vision). Of lists with
one entry per layer, entries are kept so that each kind of layer occurs. What a class needs beyond that is in `SPECIAL`.
Does not know: localllm.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS = 4  # most layers of a tiny model, unless it has more kinds
WINDOW = 20
VOCAB_SIZE = 512
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embed_dim"), 64),
    **dict.fromkeys(("embedding_size", "out_hidden_size", "word_embed_proj_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_ff"), 96),
    **dict.fromkeys(("ffn_hidden_size", "dff", "dim_ff", "d_inner", "mlp_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("dense_intermediate_size", "feed_forward_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 40),
    "shared_experts_intermediate_size": 40,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "kv_channels", "attention_head_size", "d_head"), 16),
    "rotary_dim": 8,
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("decoder_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 256),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    "moe_top_k": 2,
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    "zero_expert_num": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 20,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_head_dim": 32,
    "index_n_heads": 16,  # with few heads several keys have the score 0, and either may be chosen
    "index_topk": 16,
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "local_attention", "local_attention_window_len"), WINDOW),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 8),
    "mamba_d_ssm": 128,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 4,
    "laurel_rank": 8,
    "image_size": 32,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "position_embedding_size": 64,
    "depth": 1,
    "num_filters": 4,
    "base_channels": 8,
    "codebook_size": 32,
    "num_global_layers": 1,
    "conf_num_hidden_layers": 1,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "num_blocks": 2,
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Small sizes by the names that configs have. A window is shorter than the prompts."""
RECOGNISED_PARTS = ("glm_ocr", "granite4_vision", "hyperclovax_vision_v2", "paddleocr_vl")
"""Types of models that read more than text, whose text part localllm recognises and no family describes."""
OWN_NAMES = ("cosmos3_omni", "kimi_k25", "qianfan_ocr")
"""Types that transformers saves under names that no released checkpoint has: here they keep those in memory."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_QWEN4 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 16,  # with few heads several blocks have the score 0, and either may be chosen
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2,
    "heads_per_ngram": 2,
    "ple_layer_ids": [1, 3],  # counted from 1
    "ple_embed_dim": 64,
    "hc_lowrank": 16,
    "output_gate_type": "sigmoid",
    "eos_token_id": 2,
}
_GLM5_NEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "indexer_types": ["full"] * 4,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
}
_INKLING = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,  # twice those of the full layers
    "swa_head_dim": 16,
    "d_rel": 6,
    "rel_extent": 20,  # beyond it full layers have no bias
    "log_scaling_n_floor": 24,
    "n_shared_experts": 2,
    "vocab_size": VOCAB_SIZE + 12,  # rows of padding
}
_MINIMAX_M3 = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_n_heads": 2,  # as many as key heads
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 2,
}
_STEP = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "sliding_window": WINDOW,
    "num_sliding_attention_heads": 6,  # windowed layers have more heads than the others
    "moe_router_scaling_factor": 2.5,
    "share_expert_dim": 40,
    "swiglu_limits": [0.0, 0.0, 0.0, 0.4],
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_SECTIONS = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
}
_ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_COHERE_VISION = {"text_config": {"logit_scale": 1.0}}  # its whole model in transformers forgets the scale
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "aya_vision": _COHERE_VISION,
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere2_vision": _COHERE_VISION,
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "num_hidden_layers": 4,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in _ALTERNATING},
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 1.5}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "first_k_dense_replace": 1},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            *["compressed_sparse_attention"] * 2,
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 3,
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_text": {"global_head_dim": 32},
    "glm_ocr": _SECTIONS,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 2, 2, 4],
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16},  # 8 dimensions rotate
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "text_config": {"time_step_min": 1e-12}},
    "nemotron_h": {"time_step_min": 1e-12},  # its scan clamps the time step there, and its single step does not
    "paddleocr_vl": _SECTIONS,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "xmod": {"default_language": "en_XX"},
    "glm5_next": {"text_config": _GLM5_NEXT},
    "hy_v4": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "shared"],
    },
    "inkling_text": _INKLING,
    "minimax_m3_vl": {"text_config": _MINIMAX_M3},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "step3p7": {"text_config": _STEP},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "time_step_min": 1e-12},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a model type needs beyond `SIZES`. A nested mapping is for a part of the config."""


def class_names() -> dict[str, str]:
    """Return the causal language model of every model type, by type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def composite_names() -> dict[str, str]:
    """Return the model that answers about pictures of every model type that has no causal one, by type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    others = {*class_names(), "shieldgemma2"}  # a classifier
    return {kind: name if isinstance(name, str) else name[0] for kind, name in NAMES.items() if kind not in others}


def tiny_config(model_type: str, **sizes: Any) -> Any:
    """Return a small config of the type. sizes: in place of those of `SIZES`. Raises what its class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**_shrunk(kind, {**SPECIAL.get(model_type, {}), **sizes}))


def make_class_model(path: Path, model_type: str, *, seed: int = 0, **sizes: Any) -> None:
    """Build a small model of the type with random weights, and save it in folder `path`. sizes: of its config."""
    import torch
    import transformers

    config = tiny_config(model_type, **sizes)
    config.dtype = torch.float32
    torch.manual_seed(seed)
    is_causal = model_type in class_names()
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or not parameter.any():  # some matrices begin as zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # experts of each token id, which are distinct
                table.copy_(torch.rand(len(table), config.n_routed_experts).argsort(1)[:, : table.shape[1]])
    model.save_pretrained(path, save_original_format=model_type not in OWN_NAMES)


def _shrunk(kind: Any, special: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a config class that make it small."""
    own = {name: value for name, value in special.items() if not isinstance(value, Mapping)}
    try:
        plain = vars(kind())
    except ValueError:  # some classes cannot be built with their defaults
        plain = vars(kind(**own))
    own |= {name: value for name, value in special.items() if not hasattr(plain.get(name), "to_dict")}
    depth = next((plain[name] for name in DEPTHS if isinstance(plain.get(name), int)), 0)
    kept = _kept_layers(plain, depth)
    small: dict[str, Any] = {}
    for name, value in plain.items():
        if name in DEPTHS:
            small[name] = len(kept)
        elif hasattr(value, "to_dict"):
            part = special.get(name)
            small[name] = {**_shrunk(type(value), part if isinstance(part, Mapping) else {})}
            small[name]["model_type"] = value.model_type
        elif name in SIZES and value is not None and not isinstance(value, list | dict):
            small[name] = SIZES[name]
        elif isinstance(value, list) and len(value) == depth and depth > 1:
            small[name] = [value[i] for i in kept]
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return {**small, **own}


def _kept_layers(plain: Mapping[str, Any], depth: int) -> list[int]:
    """Return layers of the default config: the first ones, and one of each kind by every list of kinds."""
    kept = {0, 1} if depth > 1 else {0}
    for value in plain.values():
        if isinstance(value, list) and len(value) == depth and all(isinstance(each, str) for each in value):
            kept |= {value.index(each) for each in value}
    first = (i for i in range(depth) if i not in kept)
    while len(kept) < min(2, depth, LAYERS):
        kept.add(next(first))
    return sorted(kept)
