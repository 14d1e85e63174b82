"""InternLM 2 to 3: Llama with other names; q, k and v stored group by group (arXiv:2403.17297)."""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage, grouped_qkv_rows


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("bias"))
    return {"attention_bias": bias, "attention_out_bias": bias}


FAMILY = Family(
    "InternLM 2",
    ("InternLM2ForCausalLM",),
    _differences,
    {},
    Storage(
        renames=(
            ("embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"self_attn\.o_proj", "attention.wo"),
            ("self_attn", "attention"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ),
        fused_qkv="wqkv",
        qkv_rows=grouped_qkv_rows,
    ),
)
