"""Tiny random models, made from a transformers config and a seed: two to four layers, 64 wide, no download.

Each is saved the way a hub repository looks: config.json, generation_config.json, model.safetensors and a byte-level
BPE tokenizer with a ChatML template, trained here on a few lines of text. Norm weights and biases are shaken, so that
a norm or a bias applied in the wrong place changes the logits.
Does not know: localllm.
"""

from __future__ import annotations

import json
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

_COMMON: dict[str, Any] = {
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
_GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "final_logit_softcapping": 8.0,
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
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 24}),
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
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The family's transformers config; `overrides` win over the tiny defaults."""
    import transformers

    class_name, differences = FAMILIES[family]
    config_class = getattr(transformers, class_name)
    plain = config_class()
    common = {name: value for name, value in _COMMON.items() if hasattr(plain, name)}
    return config_class(**{**common, **differences, **overrides})


def make_tiny_model(
    path: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Build, shake and save one; returns `path`."""
    import torch
    import transformers

    config = tiny_config(family, **overrides)
    config.dtype = getattr(torch, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
    model.generation_config.temperature = 0.7
    model.generation_config.top_p = 0.9
    model.generation_config.do_sample = True
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return path


def load_reference(path: Path) -> Any:
    """The same model in transformers, eager attention, fp32: what the goldens compare with."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    # Falcon with ALiBi: eager attention adds the slopes twice, once in the mask (transformers 5.23).
    attention = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


def save_tiny_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json, ids below VOCAB_SIZE, specials first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
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
