"""GPT-NeoX and Pythia: LayerNorm, biases, no gate; attention and feed-forward in parallel, each with its own norm,
unless config.json says otherwise; q, k and v stored head by head (arXiv:2204.06745).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import renamed
from localllm.models.spec.norms import layer_norm

STORAGE = Storage(
    renames=(
        (r"^lm_head", "embed_out"),
        (r"^model\.", "gpt_neox."),
        ("embed_tokens", "embed_in"),
        (r"^gpt_neox\.norm", "gpt_neox.final_layer_norm"),
        (r"self_attn\.o_proj", "attention.dense"),
        ("self_attn", "attention"),
        ("up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    ),
    fused_qkv="query_key_value",
    qkv_rows=grouped_qkv_rows,
    ignored=(r".*\.attention\.(masked_)?bias",),
)


def _common_names(config: Config) -> Config:
    return renamed(config, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {
        "topology": "parallel" if config["use_parallel_residual"] else "pre_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": True,
        "mlp_gated": False,
    }


FAMILY = Family(
    "GPT-NeoX, Pythia",
    ("GPTNeoXForCausalLM",),
    _differences,
    {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
    },
    STORAGE,
    _common_names,
)
