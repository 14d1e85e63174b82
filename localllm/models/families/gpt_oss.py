"""gpt-oss 20b and 120b: a mixture in every layer, alternating windowed and full layers, biases everywhere, and a sink
per head: an extra score in the softmax without a value (arXiv:2508.10925). Experts are published in 4 bits (MXFP4), and
are kept so.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.gguf import LOCAL_EXPERTS, NORM_BEFORE_MLP, GGUFFacts, attention_biases
from localllm.models.spec.mixture import mixture

LIMIT, ALPHA = 7.0, 1.702  # constants of the activation, as kernels/moe/grouped_gemm.py computes it


def _differences(config: Config) -> dict[str, Any]:
    if (config["swiglu_limit"], config["swiglu_alpha"]) != (LIMIT, ALPHA):
        raise UnsupportedModel(
            f"swiglu_limit {config['swiglu_limit']} with alpha {config['swiglu_alpha']} is not supported for gpt-oss.",
            f"Supported: {LIMIT} with {ALPHA}, as in the released checkpoints.",
        )
    bias = bool(config["attention_bias"])
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_sinks": True,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed_layers(config, lambda layer: layer % 2 == 0),
        "mixture": mixture(
            config,
            size="intermediate_size",
            router_bias=True,
            expert_bias=True,
            activation="swiglu_clamped",
        ),
    }


FAMILY = Family(
    "gpt-oss",
    ("GptOssForCausalLM",),
    _differences,
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": LIMIT,
        "swiglu_alpha": ALPHA,
        "num_experts_per_tok": 4,
    },
    storage=Storage(
        renames=((r"\.mlp\.gate\.", ".mlp.router."),),
        transposed=(".experts.gate_up_proj", ".experts.down_proj"),
        interleaved_experts=True,
    ),
    gguf={
        "gpt-oss": GGUFFacts(
            "GptOssForCausalLM",
            {**LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
            attention_biases,
            norms=NORM_BEFORE_MLP,
        )
    },
)
