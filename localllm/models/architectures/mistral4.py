"""Mistral Small 4: DeepSeek's latent attention and small experts beside a shared one. Experts are scored by a softmax,
without groups, and their weights sum to one; queries grow with the logarithm of their position, as in Ministral 3.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.architectures.deepseek import STORAGE, fine_experts, latent_attention
from localllm.models.spec.family import Config, Family
from localllm.models.spec.fields import optional_number

_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
}


def differences(config: Config) -> dict[str, Any]:
    """Return the fields of ModelSpec. Also for a whole model of which this is the text part."""
    config = {**_DEFAULTS, **config}
    if (config.get("n_group") or 1) != 1:
        raise UnsupportedModel("n_group above 1 is not supported for Mistral 4.", "No released checkpoint uses it.")
    rope = config.get("rope_parameters") or {}
    # The share of a head that rotates: here the rotated dimensions are counted by themselves.
    plain = {**config, "rope_parameters": {name: rope[name] for name in rope if name != "partial_rotary_factor"}}
    return {
        **latent_attention(plain, interleaved=bool(config["rope_interleave"])),
        "query_scaling": optional_number(rope, "llama_4_scaling_beta"),
        "mixture": fine_experts(config, renormalize=bool(config["norm_topk_prob"])),
    }


FAMILY = Family("Mistral 4", ("Mistral4ForCausalLM",), differences, _DEFAULTS, STORAGE)
