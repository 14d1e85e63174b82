"""Phi-3, Phi-3.5 mini and Phi-4 (mini): Llama with q, k, v and gate, up stored fused, LongRoPE, and in Phi-4-mini only
part of each head rotates (arXiv:2404.14219).
"""

from __future__ import annotations

from localllm.models.spec.family import Family, Storage, one_window

FAMILY = Family(
    "Phi-3",
    ("Phi3ForCausalLM",),
    one_window,
    {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    storage=Storage(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
)
