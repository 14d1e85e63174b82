"""Bamba: Llama with a Mamba-2 part instead of attention in most layers; half of each head rotates. Falcon-H1: attention
and Mamba-2 side by side in every layer, with multipliers on every part (arXiv:2507.22448).
`mamba2` also reads Granite's Mamba-2 parts, whose fields have the same names.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import number, size
from localllm.models.spec.gguf import Fields, GGUFFacts, GGUFTensors, Metadata, has, per_head
from localllm.models.spec.recurrent import RecurrentSpec


def mamba2(config: Config, **more: Any) -> RecurrentSpec:
    """Return the Mamba-2 part of a config whose fields begin with mamba_. Raises `CorruptModel`."""
    heads, head_size = size(config, "mamba_n_heads"), config["mamba_d_head"]
    inner = config.get("mamba_d_ssm") or size(config, "mamba_expand") * config["hidden_size"]
    if head_size == "auto":
        head_size = inner // heads
    if type(head_size) is not int or heads * head_size != inner:
        raise CorruptModel(
            f"config.json divides {inner} recurrent features into {heads} heads of {head_size!r}.",
            "mamba_n_heads times mamba_d_head must be mamba_expand times hidden_size.",
        )
    return RecurrentSpec(
        "mamba2",
        size(config, "mamba_d_conv"),
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        num_heads=heads,
        num_groups=size(config, "mamba_n_groups"),
        head_size=head_size,
        state_size=size(config, "mamba_d_state"),
        time_step_limits=time_step_limits(config),
        **{"norm": "gate_then_norm", **more},
    )


def time_step_limits(config: Config) -> tuple[float, float]:
    """Return the limits of Mamba-2's time step; missing: none. `time_step_min` is not one of them: it is the range of
    the initialisation, which the scans of transformers take for a limit, and their single steps do not."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    try:  # transformers 5 writes infinity as {"__float__": "Infinity"}, older ones as JSON's Infinity
        low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"config.json has time_step_limit = {limits!r}.", "It must be two numbers.") from error
    return low, high


def _bamba(config: Config) -> dict[str, Any]:
    with_attention = config.get("attn_layer_indices") or ()
    layers = range(size(config, "num_hidden_layers"))
    bias = bool(config.get("attention_bias"))
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "layer_kinds": tuple("attention" if layer in with_attention else "recurrent" for layer in layers),
        "recurrent": mamba2(config),
    }


def _falcon_h1(config: Config) -> dict[str, Any]:
    for name in ("attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedModel(f"{name} is not supported for Falcon-H1.", "No released checkpoint uses it.")
    before, key = number(config, "attention_in_multiplier"), number(config, "key_multiplier")
    inside = number(config, "ssm_in_multiplier")
    norm = "norm_then_gate" if config["mamba_norm_before_gate"] else "gate_then_norm"
    return {
        "layer_kinds": ("both",) * size(config, "num_hidden_layers"),
        "recurrent": mamba2(
            config,
            norm=norm if config["mamba_rms_norm"] else "gate",
            input_factors=tuple(inside * factor for factor in _factors(config, "ssm_multipliers", 5)),
            output_factor=number(config, "ssm_out_multiplier"),
        ),
        "attention_scale": config["head_dim"] ** -0.5 * before * before * key,
        "attention_factor": before * number(config, "attention_out_multiplier"),
        "mlp_factors": _factors(config, "mlp_multipliers", 2),
        "embedding_scale": number(config, "embedding_multiplier"),
        "logits_multiplier": number(config, "lm_head_multiplier"),
    }


def _with_head_dim(config: Config) -> Config:
    return {**config, "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def _factors(config: Config, name: str, count: int) -> tuple[float, ...]:
    """Return a list of multipliers, all 1 if it is missing."""
    stated = config.get(name)
    if stated is None:
        return (1.0,) * count
    if not isinstance(stated, list) or len(stated) != count:
        raise CorruptModel(f"config.json has {name} = {stated!r}.", f"It must be a list of {count} numbers.")
    return tuple(number({name: factor}, name) for factor in stated)


MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_STORAGE = Storage(
    renames=(
        (r"^model\.norm\.", "model.final_layernorm."),
        (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
        (r"\.mlp\.", ".feed_forward."),
    )
)
_DEFAULTS = {**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}


def mamba2_gguf(metadata: Metadata, checkpoint: GGUFTensors) -> Fields:
    heads = metadata.count("ssm.time_step_rank")
    return {
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_n_groups": metadata.count("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": per_head(metadata, "ssm.inner_size", heads),
        "mamba_d_ssm": metadata.count("ssm.inner_size"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in checkpoint.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in checkpoint.tensors),
    }


def _gguf_falcon_h1(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of Falcon-H1; its multipliers are part of the matrices."""
    return {
        "mamba_rms_norm": has(checkpoint, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **mamba2_gguf(metadata, checkpoint),
    }


BAMBA = Family(
    "Bamba",
    ("BambaForCausalLM",),
    _bamba,
    {**_DEFAULTS, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.5},
    storage=_STORAGE,
)
_MULTIPLIERS = (
    "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
    "embedding_multiplier", "lm_head_multiplier",
)  # fmt: skip
FALCON_H1 = Family(
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    _falcon_h1,
    {
        **_DEFAULTS,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "max_position_embeddings": 8192,
    },
    storage=_STORAGE,
    common_names=_with_head_dim,
    gguf={"falcon-h1": GGUFFacts("FalconH1ForCausalLM", {}, _gguf_falcon_h1)},
)
