"""GLM-4, in the form for which transformers has a class (repositories ending in -hf): biases on q, k and v, half of
each head rotates, neighbouring dimensions together, gate and up stored fused; the 0414 series also norms the outputs of
the parts (arXiv:2406.12793).
"""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage

_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}
_SANDWICH = (
    (r"post_attention_layernorm", "post_self_attn_layernorm"),
    (r"pre_feedforward_layernorm", "post_attention_layernorm"),
    (r"post_feedforward_layernorm", "post_mlp_layernorm"),
)


def _glm(config: Config) -> dict[str, Any]:
    return {
        "attention_bias": bool(config["attention_bias"]),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
    }


def _glm4(config: Config) -> dict[str, Any]:
    return {**_glm(config), "topology": "sandwich"}


GLM = Family("GLM-4", ("GlmForCausalLM",), _glm, _DEFAULTS, Storage(fused_gate_up="gate_up_proj"))
GLM4 = Family(
    "GLM-4 0414", ("Glm4ForCausalLM",), _glm4, _DEFAULTS, Storage(renames=_SANDWICH, fused_gate_up="gate_up_proj")
)
