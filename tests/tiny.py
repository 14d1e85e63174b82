"""Tiny random models, made from a transformers config and a seed: two to four layers, 64 wide, no download.

Each is saved the way a hub repository looks: config.json, generation_config.json, model.safetensors and a byte-level
BPE tokenizer with a ChatML template, trained here on a few lines of text. Norm weights and biases are shaken, so that
a norm or a bias applied in the wrong place changes the logits.
Does not know: localllm.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

CHATML = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 512
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A block holds the keys and values of sixteen tokens.",
    "Hello! How are you today? I am fine, thank you. What is the capital of France? Paris is the capital of France.",
    "Paged attention reads the cache through a block table, so memory is not wasted. 0 1 2 3 4 5 6 7 8 9 10 100 2024",
    'def add(a, b):\n    return a + b\n\n{"name": "value", "list": [1, 2, 3]}\n',
    "Grüße aus München, naïve café, 你好世界, こんにちは, привет, 🙂🚀",
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # large enough that logits differ by more than rounding
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_INDEXER = {"q_lora_rank": 24, "index_topk": 24, "index_head_dim": 32, "index_n_heads": 8}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "final_logit_softcapping": 8.0,
}
_DELTA_NET = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "smollm": (
        "LlamaConfig",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "yi": (
        "LlamaConfig",
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
            "num_key_value_heads": 1,
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 20,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE - 4,
            "altup_active_idx": 1,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.0, 0.8, 0.0, 0.0],
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma4": (  # as E2B and E4B
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_moe": (  # as 26B-A4B, and 31B with experts
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": _GEMMA4["layer_types"][:3],
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "sliding_window": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 24, "num_key_value_heads": 1}),
    "ministral": (
        "MinistralConfig",
        {"sliding_window": 20, "head_dim": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 24}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
        },
    ),
    "olmo": ("OlmoConfig", {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo_hybrid": (  # as released, without positions
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 24}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "cohere": ("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2Config",
        {
            "head_dim": 24,
            "sliding_window": 20,
            "logit_scale": 0.5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm2": ("StableLmConfig", {"qk_layernorm": True, "use_parallel_residual": True}),
    "falcon": ("FalconConfig", {"ffn_hidden_size": 96}),
    "falcon_40b": (
        "FalconConfig",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 96,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_rw": (
        "FalconConfig",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
    ),
    "bloom": ("BloomConfig", {}),
    "gpt2": ("GPT2Config", {"n_inner": 96, "n_positions": 256}),
    "bigcode": ("GPTBigCodeConfig", {"n_positions": 256, "num_key_value_heads": 1}),
    "gptj": ("GPTJConfig", {"rotary_dim": 8, "n_inner": 96}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox_serial": ("GPTNeoXConfig", {"use_parallel_residual": False, "num_attention_heads": 2}),
    "phi": ("PhiConfig", {}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}),
    "mpt": ("MptConfig", {"n_heads": 3, "d_model": 48, "attn_config": {"clip_qkv": 1.5}}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "arcee": ("ArceeConfig", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24, "use_bias": True}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24}),
    "cwm": ("CwmConfig", {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 20}),
    "jais2": ("Jais2Config", {"head_dim": 16}),
    "youtu": ("YoutuConfig", {**_LATENT, "q_lora_rank": 24, "embedding_initializer_range": 0.2}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 24}),
    "phimoe": (
        "PhimoeConfig",
        {
            "num_local_experts": 6,
            "sliding_window": 24,
            "router_jitter_noise": 0.3,  # so that several experts are near the best one
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "shared_expert_intermediate_size": 56,
            "sliding_window": 20,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "mellum": (
        "MellumConfig",
        {
            **_EXPERTS,
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite_moe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_GROUPS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_GROUPS,
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_GROUPS, **_LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mup_enabled": True,
        },
    ),
    "laguna": (  # as XS.2, with more heads in windowed layers
        "LagunaConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_attention_heads_per_layer": [4, 8, 8],
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "shared_expert_intermediate_size": 56,
            "moe_routed_scaling_factor": 1.5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "partial_rotary_factor": 0.5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                    "attention_factor": 1.1,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "intermediate_size": 40,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 40,
            "floor_scale": 24,
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **_GROUPS,
            **_LATENT,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "moe_norm_min": 0.7,  # more than three of six experts have together
            "moe_layer_interval": 2,
        },
    ),
    "mimo_v2": (
        "MiMoV2FlashConfig",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "v_head_dim": 16,  # narrower than keys
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "dots1": (
        "Dots1Config",
        {
            **_GROUPS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "solar_open": ("SolarOpenConfig", {**_GROUPS, "n_shared_experts": 1, "head_dim": 24}),
    "hunyuan_dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 24, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"head_dim": 24, "num_experts": 6, "moe_topk": [3, 3]}),
    "hy_v3": (
        "HYV3Config",
        {**_EXPERTS, "head_dim": 24, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 72,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "logit_scale": 0.5,
        },
    ),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 4, "shared_intermediate_size": 56, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 5, "num_experts_per_tok": 3}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "num_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek_v32": ("DeepseekV32Config", {**_GROUPS, **_LATENT, **_INDEXER, "mlp_layer_types": ["sparse", "dense"]}),
    "axk2": (
        "AXK2Config",
        {**_GROUPS, **_LATENT, **_INDEXER, "mlp_layer_types": ["dense", "sparse"], "gated_norm_rank": 8},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_GROUPS, **_LATENT, "q_lora_rank": 24, "n_shared_experts": 1}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_GROUPS,
            **_LATENT,
            **_INDEXER,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 24},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "conv_L_cache": 4,
            "conv_bias": True,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "head_dim": 16,
            "sliding_window": 20,
            "conv_L_cache": 5,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "mamba_n_groups": 1,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 56,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{name: value for name, value in _GROUPS.items() if name != "moe_intermediate_size"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "num_hidden_layers": 5,
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "time_step_min": 1e-9,  # transformers clamps to it in the scan alone, not in single steps
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_MAMBA,
            "head_dim": 16,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.3,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [1.4, 0.8],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
}


_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
RECOGNISED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_swa": (
        "GraniteSWAConfig",
        {**_MULTIPLIERS, **_WINDOWS, "layer_rope_theta": [0, 1e4, 1e4, 5e5], "tie_word_embeddings": False},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {**_MULTIPLIERS, **_WINDOWS, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 56},
    ),
    "flint": (
        "FlintConfig",
        {**_EXPERTS, **_WINDOWS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1], "head_dim": 24},
    ),
    "hyperclovax": ("HyperCLOVAXConfig", {**_MULTIPLIERS, "residual_multiplier": 1.0, "head_dim": 24}),
    "cohere_compass": (
        "CohereCompassTextConfig",
        {
            **_WINDOWS,
            "head_dim": 24,
            "logit_scale": 0.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
"""Of classes that no family of localllm describes and that it recognises (transformers_backend/recognition.py)."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """The family's transformers config; `overrides` win over the tiny defaults."""
    import transformers

    class_name, differences = (FAMILIES | RECOGNISED)[family]
    config_class = getattr(transformers, class_name)
    plain = config_class()
    common = {name: value for name, value in COMMON.items() if hasattr(plain, name)}
    fields = {**common, **differences, **overrides}
    return config_class(**deepcopy(fields))  # config classes change the dicts that they are given


def make_tiny_model(
    path: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Build, shake and save one; returns `path`."""
    import torch

    config = tiny_config(family, **overrides)
    config.dtype = getattr(torch, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = class_of(config)._from_config(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("A_log", "dt_bias")):  # states that decay by factors from 0.01 to 0.999 per token
                    parameter.copy_(torch.empty_like(parameter).uniform_(*((-3, 1) if "A_log" in name else (-4, 1))))
                elif parameter.ndim == 1 or name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, value in [*model.named_buffers(), *model.named_parameters()]:
                if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                    value.add_(torch.randn_like(value) * 0.3)
    model.generation_config.temperature = 0.7
    model.generation_config.top_p = 0.9
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return path


def fill_biases(path: Path) -> None:
    """Give a model's biases values: many of a tiny model's are zeros."""
    import torch
    from safetensors.torch import load_file, save_file

    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name, values in tensors.items():
        if name.endswith("bias"):
            values.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    save_file(tensors, file, {"format": "pt"})


def load_reference(path: Path) -> Any:
    """The same model in transformers, eager attention, fp32: what the goldens compare with."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    # Falcon with ALiBi: eager attention adds the slopes twice, once in the mask (transformers 5.23).
    attention = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    model = class_of(config).from_pretrained(path, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


def class_of(config: Any) -> Any:
    """The class of a model that generates text; transformers' own list leaves some out."""
    import transformers

    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in known:
        return known[type(config)]
    saved = config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")]
    return getattr(transformers, saved[0])


def save_tiny_tokenizer(path: Path, special_tokens: Sequence[str] | None = None) -> None:
    """tokenizer.json and tokenizer_config.json, ids below VOCAB_SIZE, specials first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special_tokens or SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHATML,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
