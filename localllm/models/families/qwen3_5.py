"""Qwen3-Next, and Qwen3.5 to 3.8, dense and with experts: a gated delta net in three of four layers (arXiv:2412.06464).

The other layers have full attention, with a gate on each head's output and a quarter of each head that rotates. Norms
are stored as w - 1, except in the delta nets. Qwen3-Next stores the delta net's inputs in two matrices whose rows are
grouped by key head, Qwen3.5 in four. `delta_net` also reads OLMo Hybrid's fields, which have the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from localllm.models.families import text_part
from localllm.models.spec.family import QWEN_MTP, Config, Family, FusedRecurrent, Storage
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import EXPERTS, NORM_BEFORE_MLP, Fields, GGUFFacts, GGUFTensors, Metadata, per_head
from localllm.models.spec.mixture import mixture, sparse_layers
from localllm.models.spec.recurrent import LayerPart, RecurrentSpec, kinds_of_layers


def _rows_of_inputs(sizes: RecurrentSpec) -> list[int]:
    """Return the stored positions of q, k, v and z: a key head's own rows, then its value heads' rows."""
    values = sizes.inner_size // sizes.num_groups
    return _ungrouped(sizes.num_groups, (sizes.state_size, sizes.state_size, values, values))


def _rows_of_rates(sizes: RecurrentSpec) -> list[int]:
    """Return the stored positions of b and a: per key head, b of its value heads, then a."""
    value_heads = sizes.num_heads // sizes.num_groups
    return _ungrouped(sizes.num_groups, (value_heads, value_heads))


def _ungrouped(groups: int, widths: Sequence[int]) -> list[int]:
    """Return the stored positions of all groups' first parts, then of their second parts, and so on."""
    starts, stride = [0, *accumulate(widths)], sum(widths)
    return [
        group * stride + start + row
        for start, width in zip(starts, widths, strict=False)
        for group in range(groups)
        for row in range(width)
    ]


INPUTS = FusedRecurrent("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), _rows_of_inputs)
RATES = FusedRecurrent("in_proj_ba", ("in_proj_b", "in_proj_a"), _rows_of_rates)


_KINDS: dict[str, LayerPart] = {"linear_attention": "recurrent", "full_attention": "attention"}


def delta_net(config: Config, **more: Any) -> dict[str, Any]:
    """Return which layers are gated delta nets, and their sizes. more: further fields of `RecurrentSpec`."""
    return {
        "layer_kinds": kinds_of_layers(_layer_types(config), _KINDS),
        "recurrent": RecurrentSpec(
            "gated_delta",
            size(config, "linear_conv_kernel_dim"),
            num_heads=size(config, "linear_num_value_heads"),
            num_groups=size(config, "linear_num_key_heads"),
            head_size=size(config, "linear_value_head_dim"),
            state_size=size(config, "linear_key_head_dim"),
            **more,
        ),
    }


def _dense(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "norm": NormSpec(number(config, "rms_norm_eps"), plus_one=True),
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_gate": "interleaved",
        **delta_net(config, tiled_heads=bool(config.get("tiled_value_heads"))),
    }


def _layer_types(config: Config) -> object:
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    every, layers = size(config, "full_attention_interval"), size(config, "num_hidden_layers")
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _moe(config: Config) -> dict[str, Any]:
    return {
        **_dense(config),
        "mixture": mixture(
            config,
            layers=sparse_layers(config),
            renormalize=bool(config["norm_topk_prob"]),
            shared_size=config["shared_expert_intermediate_size"],
            shared_gate=True,
        ),
    }


def _moe_text(config: Config) -> Config:
    """Return the text part's fields. All of its layers have experts: intermediate_size, which is missing, is unused."""
    text = text_part.text_config(config) if config.get("text_config") is not None else config
    return {"intermediate_size": text.get("moe_intermediate_size"), **text}


def _dense_text(config: Config) -> Config:
    return text_part.text_config(config) if config.get("text_config") is not None else config


_DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "norm_topk_prob": True,
}
_STORAGE = Storage(
    alternatives=text_part.STORAGE.alternatives,
    ignored=(r"(model\.)?visual\..*", r"(model\.)?mtp\..*"),
)
_NOTE = "the multi-token prediction layer is run with --speculative mtp"
_TEXT_NOTE = f"{text_part.NOTE} The multi-token prediction layer is run with --speculative mtp."
_NORMS_PLUS_ONE = tuple(
    (f"{norm}norm.weight", 1.0)
    for norm in ("attn_", "post_attention_", "output_", "attn_q_", "attn_k_", "nextn.e", "nextn.h", "shared_head_")
)  # all but ssm_norm


_GGUF_EVERY = {"full_attention_interval": "full_attention_interval"}


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of the delta net. Files of Qwen3.5 have the value heads of all key heads in turn."""
    key_heads, value_heads = metadata.count("ssm.group_count"), metadata.count("ssm.time_step_rank")
    recurrent = metadata.get("attention.recurrent_layers")
    layers: Fields = {}
    if isinstance(recurrent, list):
        kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
        layers = {"layer_types": kinds[: config["num_hidden_layers"]]}
    return {
        **layers,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": per_head(metadata, "ssm.inner_size", value_heads),
        "tiled_value_heads": metadata.architecture != "qwen3next",
    }


def _gguf_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    down, shared = (checkpoint.tensors.get(f"blk.0.ffn_down_{kind}.weight") for kind in ("exps", "shexp"))
    sizes = {} if down is None or len(down.shape) != 3 else {"moe_intermediate_size": down.shape[2]}
    if shared is not None:
        sizes["shared_expert_intermediate_size"] = shared.shape[1]
    width = config.get("intermediate_size") or sizes.get("moe_intermediate_size")
    return {**_gguf(metadata, checkpoint, config), **sizes, "intermediate_size": width}


DENSE = Family(
    "Qwen3.5 (text)",
    ("Qwen3_5ForCausalLM",),
    _dense,
    _DEFAULTS,
    _STORAGE,
    _dense_text,
    _NOTE,
    mtp=QWEN_MTP,
    gguf={"qwen35": GGUFFacts("Qwen3_5ForCausalLM", _GGUF_EVERY, _gguf, norms=NORM_BEFORE_MLP, added=_NORMS_PLUS_ONE)},
)
MOE = Family(
    "Qwen3.5-MoE (text)",
    ("Qwen3_5MoeForCausalLM",),
    _moe,
    _MOE_DEFAULTS,
    _STORAGE,
    _moe_text,
    _NOTE,
    mtp=QWEN_MTP,
    gguf={
        "qwen35moe": GGUFFacts(
            "Qwen3_5MoeForCausalLM", {**_GGUF_EVERY, **EXPERTS}, _gguf_moe, norms=NORM_BEFORE_MLP, added=_NORMS_PLUS_ONE
        )
    },
)
DENSE_VISION = Family(
    "Qwen3.5", ("Qwen3_5ForConditionalGeneration",), _dense, _DEFAULTS, _STORAGE, _dense_text, _TEXT_NOTE, mtp=QWEN_MTP
)
MOE_VISION = Family(
    "Qwen3.5-MoE", ("Qwen3_5MoeForConditionalGeneration",), _moe, _MOE_DEFAULTS, _STORAGE, _moe_text, _TEXT_NOTE,
    mtp=QWEN_MTP,
)  # fmt: skip
NEXT = Family(
    "Qwen3-Next",
    ("Qwen3NextForCausalLM",),
    _moe,
    {**_MOE_DEFAULTS, "intermediate_size": 5632, "num_experts_per_tok": 10, "num_experts": 512},
    Storage(
        fused_recurrent=(INPUTS, RATES),
        ignored=_STORAGE.ignored,
    ),
    note=_NOTE,
    mtp=QWEN_MTP,
    gguf={
        "qwen3next": GGUFFacts(
            "Qwen3NextForCausalLM", {**_GGUF_EVERY, **EXPERTS}, _gguf_moe, norms=NORM_BEFORE_MLP, added=_NORMS_PLUS_ONE
        )
    },
)
