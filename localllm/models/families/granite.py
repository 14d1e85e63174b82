"""Granite 3 and its successors: Llama with four multipliers, on embeddings, attention scores, the parts' outputs, and
(as a divisor) the logits. They are fields of config.json, and are not rounded (arXiv:2405.04324; muP,
arXiv:2203.03466).
Granite-MoE also has a mixture in every layer, with its experts stored as one tensor, and some checkpoints a shared
expert.
Granite 4 H has Mamba-2 instead of attention in most layers, usually no positions, and a feed-forward part beside the
experts, or alone.
"""

from __future__ import annotations

from typing import Any

from localllm.models.families.bamba import MAMBA_DEFAULTS, mamba2, mamba2_gguf
from localllm.models.families.llama import llama_gguf
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number, size
from localllm.models.spec.gguf import (
    LLAMA_ROWS,
    LOCAL_EXPERTS,
    PER_LAYER,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    counts_of_layers,
)
from localllm.models.spec.mixture import mixture
from localllm.models.spec.recurrent import LayerPart, kinds_of_layers


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "embedding_scale": number(config, "embedding_multiplier"),
        "scales_given_embeds": True,
        "attention_scale": number(config, "attention_multiplier"),
        "residual_multiplier": number(config, "residual_multiplier"),
        "logits_multiplier": 1 / number(config, "logits_scaling"),
    }


def _moe(config: Config) -> dict[str, Any]:
    shared = config.get("shared_intermediate_size") or 0
    return {**_differences(config), "mixture": mixture(config, size="intermediate_size", shared_size=shared)}


_KINDS: dict[str, LayerPart] = {
    "mamba": "recurrent",
    "attention": "attention",
    "linear_attention": "recurrent",
    "full_attention": "attention",
}
"""Kinds of layers: the first two in published checkpoints, the others as transformers 5 writes them."""


def _hybrid(config: Config) -> dict[str, Any]:
    shared = size(config, "shared_intermediate_size")
    experts = None
    if config["num_local_experts"]:
        experts = mixture(config, size="intermediate_size", shared_size=shared)
    stated = config.get("layer_types") or config.get("layers_block_type")
    return {
        **_differences(config),
        "intermediate_size": shared,
        "positions": "rope" if config.get("position_embedding_type") == "rope" else "none",
        "layer_kinds": kinds_of_layers(stated or ["mamba"] * size(config, "num_hidden_layers"), _KINDS),
        "recurrent": mamba2(config),
        "mixture": experts,
    }


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_DEFAULTS = dict.fromkeys(_MULTIPLIERS, 1.0)
_GGUF_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _gguf_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    shared = checkpoint.tensors.get("blk.0.ffn_gate_shexp.weight")
    return {} if shared is None else {"shared_intermediate_size": shared.shape[0]}


def _gguf_hybrid(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of Granite 4 H, and of Bamba, which computes alike: it rotates, and has no multipliers."""
    heads = counts_of_layers(metadata, "attention.head_count_kv", config)
    rotates = bool(metadata.get("rope.scaling.finetuned"))
    scale = config.get("attention_multiplier") or config["head_dim"] ** -0.5
    shared = metadata.optional_count("expert_shared_feed_forward_length") or config.get("intermediate_size")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": scale,
        "attention_bias": any(name.endswith("attn_q.bias") for name in checkpoint.tensors),
        "shared_intermediate_size": shared,
        "num_local_experts": metadata.optional_count("expert_count") or 0,
        **mamba2_gguf(metadata, checkpoint),
    }


FAMILY = Family(
    "Granite",
    ("GraniteForCausalLM",),
    _differences,
    _DEFAULTS,
    gguf={"granite": GGUFFacts("GraniteForCausalLM", _GGUF_MULTIPLIERS, llama_gguf, rows=LLAMA_ROWS)},
)
_STORAGE = Storage(
    renames=(
        (r"\.mlp\.gate\.", ".block_sparse_moe.router.layer."),
        (r"\.mlp\.experts\.gate_up_proj\.", ".block_sparse_moe.input_linear."),
        (r"\.mlp\.experts\.down_proj\.", ".block_sparse_moe.output_linear."),
        (r"\.mlp\.(shared_expert\.)?gate_up_proj\.", ".shared_mlp.input_linear."),
        (r"\.mlp\.(shared_expert\.)?down_proj\.", ".shared_mlp.output_linear."),
    ),
    fused_gate_up="gate_up_proj",
)
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MOE = Family(
    "Granite-MoE",
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _moe,
    {**_DEFAULTS, **_EXPERTS},
    storage=_STORAGE,
    gguf={
        "granitemoe": GGUFFacts(
            "GraniteMoeForCausalLM", {**_GGUF_MULTIPLIERS, **LOCAL_EXPERTS}, _gguf_moe, rows=LLAMA_ROWS
        )
    },
)
HYBRID = Family(
    "Granite 4 H",
    ("GraniteMoeHybridForCausalLM",),
    _hybrid,
    {**_DEFAULTS, **_EXPERTS, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
    storage=_STORAGE,
    gguf={
        "granitehybrid": GGUFFacts(
            "GraniteMoeHybridForCausalLM",
            {
                "attention_multiplier": "attention.scale",
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
                "num_experts_per_tok": "expert_used_count",
            },
            _gguf_hybrid,
            varying=PER_LAYER,
            rows=LLAMA_ROWS,
        )
    },
)
