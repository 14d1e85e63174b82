"""Llamas with LayerNorm: StableLM, StarCoder2 and Jais 2.

StableLM: a quarter of each head rotates; StableLM 2 12B norms q and k with a weight per head, and runs its two parts in
parallel (arXiv:2402.17834).
StarCoder2: LayerNorm and biases everywhere, a feed-forward part without a gate (arXiv:2402.19173).
Jais 2: likewise, with squared ReLU.
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage, one_window
from localllm.models.spec.fields import layer_norm
from localllm.models.spec.gguf import Fields, GGUFFacts, GGUFTensors, Metadata, has


def _stablelm_differences(config: Config) -> dict[str, Any]:
    return {
        "topology": "parallel_one_norm" if config.get("use_parallel_residual") else "pre_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": bool(config.get("use_qkv_bias")),
        "qk_norm": "each_head" if config.get("qk_layernorm") else None,
    }


def _gguf_stablelm(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {
        "use_qkv_bias": has(checkpoint, "attn_q.bias"),
        "qk_layernorm": has(checkpoint, "attn_q_norm.weight"),
        "use_parallel_residual": not has(checkpoint, "ffn_norm.weight"),  # the key for it is set in all files
    }


def _gguf_starcoder2(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    return {"use_bias": has(checkpoint, "attn_q.bias")}


STABLELM = Family(
    "StableLM",
    ("StableLmForCausalLM",),
    _stablelm_differences,
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    Storage(renames=((r"\.([qk])_norm\.(\d+)\.", r".\1_layernorm.norms.\2."),)),
    gguf={"stablelm": GGUFFacts("StableLmForCausalLM", more=_gguf_stablelm)},
)


def _starcoder2_differences(config: Config) -> dict[str, Any]:
    bias = bool(config["use_bias"])
    return {
        "norm": layer_norm(config, "norm_epsilon"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "mlp_gated": False,
        **one_window(config),
    }


STARCODER2 = Family(
    "StarCoder2",
    ("Starcoder2ForCausalLM",),
    _starcoder2_differences,
    {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    storage=Storage((("up_proj", "c_fc"), ("down_proj", "c_proj"))),
    gguf={
        "starcoder2": GGUFFacts(
            "Starcoder2ForCausalLM", {"norm_epsilon": "attention.layer_norm_epsilon"}, _gguf_starcoder2
        )
    },
)


def _jais2_differences(config: Config) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config["mlp_bias"]),
        "mlp_gated": False,
    }


JAIS2 = Family(
    "Jais 2",
    ("Jais2ForCausalLM",),
    _jais2_differences,
    {
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
)
