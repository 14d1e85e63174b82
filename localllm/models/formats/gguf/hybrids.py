"""The configs of hybrid decoders in GGUF: which layers are recurrent, and the sizes of what they keep.

Lists with a value per layer say which layers have attention, or a feed-forward part: 0 means none. The convolution's
and the state's sizes are in the keys `ssm.*`, whose meaning depends on the kind of recurrence.
Does not know: tensors' names and row orders (storage.py), block types.
"""

from __future__ import annotations

from localllm.errors import UnsupportedModel
from localllm.models.spec.gguf import Architecture, Config, GGUFTensors, Metadata, has

_PER_LAYER = ("attention.head_count_kv", "feed_forward_length")


def _lfm2(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    heads = _of_layers(metadata, "attention.head_count_kv", config)
    first = next((layer for layer, count in enumerate(heads) if not count), 0)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": has(checkpoint, "shortconv.conv.bias", first),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors),
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _qwen35(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of the delta net. Files of Qwen3.5 have the value heads of all key heads in turn."""
    key_heads, value_heads = metadata.count("ssm.group_count"), metadata.count("ssm.time_step_rank")
    recurrent = metadata.get("attention.recurrent_layers")
    layers: Config = {}
    if isinstance(recurrent, list):
        kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
        layers = {"layer_types": kinds[: config["num_hidden_layers"]]}
    return {
        **layers,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": _divided(metadata, "ssm.inner_size", value_heads),
        "tiled_value_heads": metadata.architecture != "qwen3next",
    }


def _qwen35_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    down, shared = (checkpoint.tensors.get(f"blk.0.ffn_down_{kind}.weight") for kind in ("exps", "shexp"))
    sizes = {} if down is None or len(down.shape) != 3 else {"moe_intermediate_size": down.shape[2]}
    if shared is not None:
        sizes["shared_expert_intermediate_size"] = shared.shape[1]
    width = config.get("intermediate_size") or sizes.get("moe_intermediate_size")
    return {**_qwen35(metadata, checkpoint, config), **sizes, "intermediate_size": width}


def _granite(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of Granite 4 H, and of Bamba, which computes alike: it rotates, and has no multipliers."""
    heads = _of_layers(metadata, "attention.head_count_kv", config)
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
        **_mamba2(metadata, checkpoint),
    }


def _falcon_h1(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of Falcon-H1; its multipliers are part of the matrices."""
    return {
        "mamba_rms_norm": has(checkpoint, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **_mamba2(metadata, checkpoint),
    }


def _mamba2(metadata: Metadata, checkpoint: GGUFTensors) -> Config:
    heads = metadata.count("ssm.time_step_rank")
    return {
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_n_groups": metadata.count("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": _divided(metadata, "ssm.inner_size", heads),
        "mamba_d_ssm": metadata.count("ssm.inner_size"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in checkpoint.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in checkpoint.tensors),
    }


def _nemotron_h(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of Nemotron-H, whose layers are one part each: what has neither KV heads nor a feed-forward
    part is recurrent."""
    heads, widths = (_of_layers(metadata, key, config) for key in _PER_LAYER)
    feed_forward = "moe" if metadata.architecture == "nemotron_h_moe" else "mlp"
    kinds = [
        "attention" if count else feed_forward if width else "mamba" for count, width in zip(heads, widths, strict=True)
    ]
    sizes = _mamba2(metadata, checkpoint)
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


def _of_layers(metadata: Metadata, key: str, config: Config) -> list[int]:
    """Return a count for each layer that is run; those above 0 are the same."""
    value, layers = metadata.get(key), config["num_hidden_layers"]
    stated = value if isinstance(value, list) else [value] * layers
    counts = [count for count in stated if isinstance(count, int) and not isinstance(count, bool) and count >= 0]
    if len(counts) != len(stated) or len(counts) < layers or not any(counts[:layers]):
        metadata.fail(key, f"It is {value!r}, not a whole number for each of {layers} layers.")
    counts = counts[:layers]
    if len(set(counts) - {0}) > 1:
        raise UnsupportedModel(
            f"{metadata.file.name} has layers that differ in {metadata.architecture}.{key}: {sorted(set(counts))}.",
            "Supported: the same value in every layer that has such a part.",
        )
    return counts


def _divided(metadata: Metadata, key: str, heads: int) -> int:
    """Return a head's share of a size."""
    size = metadata.count(key)
    if size % heads:
        metadata.fail(key, f"It is {size}, which does not divide into {heads} heads.")
    return size // heads


_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EVERY = {"full_attention_interval": "full_attention_interval"}
HYBRIDS: dict[str, Architecture] = {
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        {"norm_eps": "attention.layer_norm_rms_epsilon"},
        _lfm2,
        {"block_auto_adjust_ff_dim": False},
        _PER_LAYER,
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        {
            **_EXPERTS,
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        _lfm2,
        varying=_PER_LAYER,
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _EVERY, _qwen35),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", {**_EVERY, **_EXPERTS}, _qwen35_moe),
    "qwen3next": Architecture("Qwen3NextForCausalLM", {**_EVERY, **_EXPERTS}, _qwen35_moe),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
            "num_experts_per_tok": "expert_used_count",
        },
        _granite,
        varying=_PER_LAYER,
    ),
    "nemotron_h": Architecture("NemotronHForCausalLM", {}, _nemotron_h, varying=_PER_LAYER),
    "nemotron_h_moe": Architecture(
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
        _nemotron_h,
        varying=_PER_LAYER,
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", {}, _falcon_h1),
}
"""By general.architecture."""
