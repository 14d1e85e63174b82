"""BLOOM: ALiBi instead of positions, LayerNorm also on the embeddings, biases, no gate; q, k and v stored head by head
(arXiv:2211.05100).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import renamed, size
from localllm.models.spec.norms import layer_norm

_SIZES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}


BLOOM_NAMES = (
    (r"^model\.", "transformer."),
    ("embed_tokens", "word_embeddings"),
    ("embed_norm", "word_embeddings_layernorm"),
    (r"transformer\.norm", "transformer.ln_f"),
    (r"\.layers\.", ".h."),
    (r"self_attn\.o_proj", "self_attention.dense"),
    ("self_attn", "self_attention"),
    ("up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
)


def _common_names(config: Config) -> Config:
    named = renamed(config, _SIZES)
    return {**named, "intermediate_size": 4 * size(named, "hidden_size")}


def _differences(config: Config) -> dict[str, Any]:
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModel(
            "apply_residual_connection_post_layernorm is not supported for BLOOM.", "No published checkpoint uses it."
        )
    return {
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "positions": "alibi",
        "embedding_norm": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
    }


FAMILY = Family(
    "BLOOM",
    ("BloomForCausalLM",),
    _differences,
    {"hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    Storage(
        renames=BLOOM_NAMES,
        fused_qkv="query_key_value",
        qkv_rows=grouped_qkv_rows,
        alternatives=((r"^transformer\.", ""),),
    ),
    _common_names,
)
