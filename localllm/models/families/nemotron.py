"""Nemotron 4 and Minitron: LayerNorm stored as w - 1, squared ReLU without a gate, half of each head rotates
(arXiv:2402.16819).
Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one part behind one norm: Mamba-2, attention without
positions, a feed-forward part, or experts, which have no gate either (arXiv:2504.03624).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.models.families import text_part
from localllm.models.families.bamba import mamba2_gguf, time_step_limits
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import NormSpec, number, renamed, size
from localllm.models.spec.gguf import (
    LLAMA_ROWS,
    PER_LAYER,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    attention_biases,
    counts_of_layers,
)
from localllm.models.spec.mixture import grouping, mixture
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec, kinds_of_layers


def _common_names(config: Config) -> Config:
    return renamed(config, {"rope_percent": "partial_rotary_factor", "rotary_percent": "partial_rotary_factor"})


def _differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "norm": NormSpec(number(config, "norm_eps"), "layer", bias=True, plus_one=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "mlp_gated": False,
    }


FAMILY = Family(
    "Nemotron",
    ("NemotronForCausalLM",),
    _differences,
    {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    common_names=_common_names,
    gguf={
        "nemotron": GGUFFacts(
            "NemotronForCausalLM",
            {"norm_eps": "attention.layer_norm_epsilon"},
            attention_biases,
            added=(("norm.weight", 1.0),),
        )
    },
)

_KINDS: dict[str, LayerPart] = {
    "M": "recurrent",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "recurrent",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
    "linear_attention": "recurrent",
    "full_attention": "attention",
}
"""Kinds of layers: letters of hybrid_override_pattern, then names of layers_block_type, old and new."""
_H_NAMES = {
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "attention_head_dim": "head_dim",
}


def _h_names(config: Config) -> Config:
    config = renamed(config, _H_NAMES)
    stated = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    layers = {"num_hidden_layers": len(stated)} if isinstance(stated, list | str) else {}
    return {**config, **layers, "layers_block_type": stated}


def _h(config: Config) -> dict[str, Any]:
    kinds = kinds_of_layers(config["layers_block_type"], _KINDS)
    bias, inside = bool(config.get("mlp_bias")), bool(config["mamba_proj_bias"])
    if config.get("attention_bias") or (bias and "moe" in kinds) or bool(config["use_bias"]) != inside:
        raise UnsupportedModel("These biases are not supported for Nemotron-H.", "No released checkpoint uses them.")
    return {
        "topology": "single",
        "positions": "none",
        "norm": NormSpec(number(config, "layer_norm_epsilon")),
        "hidden_act": config["mlp_hidden_act"],
        "mlp_gated": False,
        "mlp_bias": bias,
        "layer_kinds": kinds,
        "mixture": _h_mixture(config, kinds) if "moe" in kinds else None,
        "recurrent": RecurrentSpec(
            "mamba2",
            size(config, "conv_kernel"),
            conv_bias=bool(config["use_conv_bias"]),
            projection_bias=inside,
            num_heads=size(config, "mamba_num_heads"),
            num_groups=size(config, "n_groups"),
            head_size=size(config, "mamba_head_dim"),
            state_size=size(config, "ssm_state_size"),
            norm="gate_then_norm",
            time_step_limits=time_step_limits(config),
        ),
    }


def _h_mixture(config: Config, kinds: tuple[LayerPart, ...]) -> Any:
    return mixture(
        config,
        layers=tuple(kind == "moe" for kind in kinds),
        scoring="sigmoid",
        correction_bias=True,
        router_in_fp32=True,
        renormalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        shared_size=size(config, "moe_shared_expert_intermediate_size") if config["n_shared_experts"] else 0,
        latent_size=config.get("moe_latent_size") or 0,
        **grouping(config),
    )


def _gguf_h(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of Nemotron-H, whose layers are one part each: what has neither KV heads nor a feed-forward
    part is recurrent."""
    heads_key, widths_key = PER_LAYER
    stated, widths = metadata.get(heads_key), counts_of_layers(metadata, widths_key, config)
    if isinstance(stated, list) and not any(stated):  # published files of Nemotron 3.5 Lightning state no heads at all
        keys = [checkpoint.tensors.get(f"blk.{layer}.attn_k.weight") for layer in range(len(widths))]
        heads = [0 if key is None else key.shape[0] // config["head_dim"] for key in keys]
    else:
        heads = counts_of_layers(metadata, heads_key, config)
    feed_forward = "moe" if metadata.architecture == "nemotron_h_moe" else "mlp"
    kinds = [
        "attention" if count else feed_forward if width else "mamba" for count, width in zip(heads, widths, strict=True)
    ]
    sizes = mamba2_gguf(metadata, checkpoint)
    return {
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.get("rms_norm_eps") or config.get("layer_norm_eps"),
        "conv_kernel": sizes["mamba_d_conv"],
        "ssm_state_size": sizes["mamba_d_state"],
        "n_groups": sizes["mamba_n_groups"],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mamba_proj_bias": sizes["mamba_proj_bias"],
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in checkpoint.tensors),
    }


H = Family(
    "Nemotron-H",
    ("NemotronHForCausalLM",),
    _h,
    {
        "intermediate_size": 21_504,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    storage=Storage(
        renames=(
            (r"^model\.embed_tokens\.", "backbone.embeddings."),
            (r"^model\.norm\.", "backbone.norm_f."),
            (r"^model\.layers\.", "backbone.layers."),
            (r"\.input_layernorm\.", ".norm."),
            (r"\.mlp\.shared_expert\.", ".mixer.shared_experts."),
            (r"\.mlp\.latent_down_proj\.", ".mixer.fc1_latent_proj."),
            (r"\.mlp\.latent_up_proj\.", ".mixer.fc2_latent_proj."),
            (r"\.(self_attn|mamba|mlp)\.", ".mixer."),
        ),
        alternatives=((r"^backbone\.", "model."),),
        ignored=(r"mtp\..*",),
    ),
    common_names=_h_names,
    note="multi-token prediction layers are not run",
    gguf={
        "nemotron_h": GGUFFacts("NemotronHForCausalLM", {}, _gguf_h, varying=PER_LAYER, rows=LLAMA_ROWS),
        "nemotron_h_moe": GGUFFacts(
            "NemotronHForCausalLM",
            {
                "n_routed_experts": "expert_count",
                "n_shared_experts": "expert_shared_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                "norm_topk_prob": "expert_weights_norm",
                "routed_scaling_factor": "expert_weights_scale",
                "n_group": "expert_group_count",
                "topk_group": "expert_group_used_count",
                "moe_latent_size": "moe_latent_size",
            },
            _gguf_h,
            varying=PER_LAYER,
            rows=LLAMA_ROWS,
        ),
    },
)
_OMNI = text_part.of_family("Nemotron 3 Nano Omni", ("NemotronH_Omni_Reasoning_V3",), H)
OMNI = replace(
    _OMNI,
    storage=replace(_OMNI.storage, ignored=(*_OMNI.storage.ignored, r"(mlp1|sound_encoder|sound_projection)\..*")),
    common_names=lambda config: _OMNI.common_names(renamed(config, {"llm_config": "text_config"})),
)
"""Its parts for pictures, videos and sound are not loaded. Released checkpoints have the text part's config as
llm_config."""
