"""Phi 1 to 4.

Phi-1, 1.5 and 2: attention and feed-forward in parallel after one LayerNorm, biases everywhere including the head, half
of each head rotates (arXiv:2309.05463).
Phi-3, Phi-3.5 mini and Phi-4 (mini): Llama with q, k, v and gate, up stored fused, LongRoPE, and in Phi-4-mini only
part of each head rotates (arXiv:2404.14219).
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, one_window
from localllm.models.spec.fields import layer_norm
from localllm.models.spec.gguf import GGUFFacts


def _differences(config: Config) -> dict[str, Any]:
    if config.get("qk_layernorm"):
        raise UnsupportedModel("qk_layernorm is not supported for Phi.", "No published checkpoint uses it.")
    return {
        "topology": "parallel_one_norm",
        "norm": layer_norm(config, "layer_norm_eps"),
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "lm_head_bias": True,
    }


PHI = Family(
    "Phi-1, Phi-2",
    ("PhiForCausalLM",),
    _differences,
    {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    Storage(
        renames=(
            (r"^model\.norm", "model.final_layernorm"),
            (r"self_attn\.o_proj", "self_attn.dense"),
            ("up_proj", "fc1"),
            ("down_proj", "fc2"),
        )
    ),
    gguf={"phi2": GGUFFacts("PhiForCausalLM")},
)
PHI3 = Family(
    "Phi-3",
    ("Phi3ForCausalLM",),
    one_window,
    {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    storage=Storage(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
    gguf={"phi3": GGUFFacts("Phi3ForCausalLM", fused_gate_up="up_proj")},
)
