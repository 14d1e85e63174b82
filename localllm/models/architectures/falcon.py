"""Falcon 1 and 2: LayerNorm, no gate; attention and feed-forward in parallel after one norm (7B, 11B) or two (40B,
180B), or one after the other with ALiBi (the RefinedWeb models); q, k and v stored group by group (arXiv:2311.16867).
ALiBi's slopes are multiplied by the softmax scale, as Falcon adds them before it scales the scores. Falcon 3 is a
Llama.
"""

from __future__ import annotations

from typing import Any

from localllm.models.architectures.bloom import BLOOM_NAMES
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import renamed, size
from localllm.models.spec.norms import layer_norm

_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}


def _common_names(config: Config) -> Config:
    named = renamed({"activation": "gelu", **config}, _SIZES)
    return {
        "intermediate_size": 4 * size(named, "hidden_size"),
        **named,
        "num_key_value_heads": _num_kv_heads(named),
    }


def _num_kv_heads(config: Config) -> Any:
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or config.get("n_head_kv")
    return 1 if config.get("multi_query", True) else None


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("bias"))
    positions: dict[str, Any] = {}
    if config.get("alibi"):
        head_dim = size(config, "hidden_size") // size(config, "num_attention_heads")
        positions = {"positions": "alibi", "alibi_scale": head_dim**-0.5}
    return {
        "topology": _topology(config),
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "mlp_gated": False,
        **positions,
    }


def _topology(config: Config) -> str:
    if config.get("new_decoder_architecture"):
        return "parallel_one_norm" if config.get("num_ln_in_parallel_attn") == 1 else "parallel"
    return "parallel_one_norm" if config["parallel_attn"] else "pre_norm"


FAMILY = Family(
    "Falcon",
    ("FalconForCausalLM",),
    _differences,
    {"layer_norm_epsilon": 1e-5, "parallel_attn": True, "tie_word_embeddings": True},
    Storage(
        renames=BLOOM_NAMES,
        fused_qkv="query_key_value",
        qkv_rows=grouped_qkv_rows,
        alternatives=(("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")),
    ),
    _common_names,
)
