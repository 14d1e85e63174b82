"""Qwen 1 to 3, dense and with experts, and the vision-language models whose text part is one of them.

Qwen 1: Llama with other names and biases on q, k and v. The supported context is seq_length: beyond it the model
changes its rotary base and scales its queries, which only its own code on the hub does (arXiv:2309.16609).
Qwen2 and Qwen2.5: Llama with biases on q, k and v; upper layers may have a window (arXiv:2407.10671). MiMo-7B is the
same with a layer that predicts further tokens (arXiv:2505.07608).
Qwen3 (dense): RMSNorm over each head of q and k, no biases by default (arXiv:2505.09388).
Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B): Qwen2 with experts whose weights need not sum to one, and a shared expert with its
own gate (arXiv:2407.10671). Qwen3-MoE: Qwen3 with up to 128 small experts and no shared one (arXiv:2505.09388).
Mellum 2 (JetBrains, 2026): Qwen3-MoE with windowed layers, which rotate by another base and without scaling.
Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and InternVL 2.5 to 3.5 in the form that transformers has a class for: their multimodal
rotary embedding gives text the same position in every section, which is the plain rotary embedding. GGUF files of them
hold only the text part. LLaVA 1.5, 1.6 and OneVision, Pixtral and Granite Vision also have another family's text part
(arXiv:2304.08485, arXiv:2408.03326).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import CorruptModel
from localllm.models.families import granite
from localllm.models.families.gpt2 import GPT_NAMES
from localllm.models.families.llama import LLAMA
from localllm.models.families.mistral import MISTRAL
from localllm.models.families.text_part import of_families, of_family
from localllm.models.spec.family import MIMO_MTP, QWEN_MTP, Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import (
    EXPERTS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    layer_types,
    ropes_of_windows,
)
from localllm.models.spec.mixture import mixture, sparse_layers, typed_layers


def _common_names(config: Config) -> Config:
    return {
        "head_dim": config.get("kv_channels"),
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.get("rotary_pct"),
        **config,
        "hidden_act": "silu",
        "intermediate_size": size(config, "intermediate_size") // 2,  # the config counts gate and up together
        "max_position_embeddings": config.get("seq_length", 2048),
    }


def _qwen_differences(config: Config) -> dict[str, Any]:
    return {
        "norm": NormSpec(number(config, "layer_norm_epsilon")),
        "attention_bias": True,
        "attention_out_bias": not config["no_bias"],
        "mlp_bias": not config["no_bias"],
    }


def _gguf_qwen1(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return Qwen 1's fields as Qwen2's, which computes alike; Qwen 1 counts gate and up together."""
    return {"intermediate_size": config["intermediate_size"] // 2}


QWEN = Family(
    "Qwen",
    ("QWenLMHeadModel",),
    _qwen_differences,
    {"layer_norm_epsilon": 1e-6, "no_bias": True},
    Storage(
        renames=(
            *GPT_NAMES,
            (r"self_attn\.o_proj", "attn.c_proj"),
            ("self_attn", "attn"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        fused_qkv="c_attn",
    ),
    _common_names,
    gguf={"qwen": GGUFFacts("Qwen2ForCausalLM", more=_gguf_qwen1)},
)


def qwen_window(config: Config) -> dict[str, Any]:
    """Return the window fields: with use_sliding_window, layers from max_window_layers on are windowed."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    if window is None:
        return {}
    layers = windowed_layers(config, lambda layer: layer >= config["max_window_layers"])
    return {"sliding_window": window, "layer_is_windowed": layers}


def _qwen2_differences(config: Config) -> dict[str, Any]:
    return {"attention_bias": True, **qwen_window(config)}


_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
QWEN2 = Family(
    "Qwen2",
    ("Qwen2ForCausalLM",),
    _qwen2_differences,
    _DEFAULTS,
    gguf={"qwen2": GGUFFacts("Qwen2ForCausalLM"), "qwen2vl": GGUFFacts("Qwen2ForCausalLM")},
)
MIMO = Family(
    "MiMo",
    ("MiMoForCausalLM",),
    _qwen2_differences,
    {**_DEFAULTS, "rms_norm_eps": 1e-5},
    storage=Storage(ignored=(r"model\.mtp_layers\..*",)),
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=MIMO_MTP,
)


def _qwen3_differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qk_norm": "head", "attention_bias": bias, "attention_out_bias": bias, **qwen_window(config)}


QWEN3 = Family(
    "Qwen3",
    ("Qwen3ForCausalLM",),
    _qwen3_differences,
    {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    gguf={"qwen3": GGUFFacts("Qwen3ForCausalLM"), "qwen3vl": GGUFFacts("Qwen3ForCausalLM")},
)


def _mixture(config: Config, **shared: Any) -> Any:
    renormalize = bool(config.get("norm_topk_prob"))
    layers = sparse_layers(config)
    return mixture(config, layers=layers, renormalize=renormalize, **shared)


def _qwen2_window(config: Config) -> dict[str, Any]:
    """Return the window fields: with use_sliding_window, every other layer below max_window_layers is windowed."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    if not window:
        return {}
    below = config["max_window_layers"]
    layers = windowed_layers(config, lambda layer: layer % 2 == 0 and layer < below)
    return {"sliding_window": window, "layer_is_windowed": layers}


def _qwen2(config: Config) -> dict[str, Any]:
    mixture = _mixture(config, shared_size=config["shared_expert_intermediate_size"], shared_gate=True)
    return {"attention_bias": bool(config["qkv_bias"]), "mixture": mixture, **_qwen2_window(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    windowed = (window is not None,) * config["num_hidden_layers"]
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": window,
        "layer_is_windowed": windowed,
        "mixture": _mixture(config),
    }


_SLIDING = "sliding_attention"


def _mellum(config: Config) -> dict[str, Any]:
    bias, windowed = bool(config.get("attention_bias")), windowed_layers(config, lambda layer: False)
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed,
        "mtp_is_windowed": any(windowed) and (config.get("mtp_layer_types") or [_SLIDING])[0] == _SLIDING,
        **({} if any(windowed) else {"local_rope": None}),
        "mixture": mixture(config, layers=typed_layers(config), renormalize=bool(config["norm_topk_prob"])),
    }


def _gguf_mellum(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    window = {} if config.get("sliding_window") is None else {"layer_types": layer_types(metadata)}
    return {**_gguf_experts(metadata, checkpoint, config), **ropes_of_windows(metadata, config), **window}


def _gguf_experts(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return sizes that some files omit, from the shapes of the experts' tensors."""
    gate, shared = (checkpoint.tensors.get(f"blk.0.ffn_gate_{kind}.weight") for kind in ("exps", "shexp"))
    if gate is None or len(gate.shape) != 3:
        raise CorruptModel(
            f"{metadata.file.name} has no experts: blk.0.ffn_gate_exps.weight is not a stack of matrices."
        )
    sizes = {"moe_intermediate_size": gate.shape[1]}
    if shared is not None:
        sizes["shared_expert_intermediate_size"] = shared.shape[0]
    return {"intermediate_size": config.get("intermediate_size", gate.shape[1]), **sizes}


QWEN2_MOE = Family(
    "Qwen2-MoE",
    ("Qwen2MoeForCausalLM",),
    _qwen2,
    {
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    gguf={"qwen2moe": GGUFFacts("Qwen2MoeForCausalLM", EXPERTS, _gguf_experts)},
)
QWEN3_MOE = Family(
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    _qwen3,
    {
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
    },
    gguf={
        "qwen3moe": GGUFFacts("Qwen3MoeForCausalLM", EXPERTS, _gguf_experts, {"norm_topk_prob": True}),
        "qwen3vlmoe": GGUFFacts("Qwen3MoeForCausalLM", EXPERTS, _gguf_experts, {"norm_topk_prob": True}),
    },
)
MELLUM = Family(
    "Mellum 2",
    ("MellumForCausalLM",),
    _mellum,
    {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    Storage(ignored=(r"mtp\..*",)),
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=QWEN_MTP,
    gguf={"mellum": GGUFFacts("MellumForCausalLM", EXPERTS, _gguf_mellum)},
)
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
QWEN2_VL = of_family(
    "Qwen2-VL, Qwen2.5-VL",
    ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    QWEN2,
    rope_theta=1_000_000.0,
)
QWEN3_VL = of_family("Qwen3-VL", ("Qwen3VLForConditionalGeneration",), QWEN3, rope_theta=500_000.0)
QWEN3_VL_MOE = of_family(
    "Qwen3-VL-MoE",
    ("Qwen3VLMoeForConditionalGeneration",),
    replace(QWEN3_MOE, storage=replace(QWEN3_MOE.storage, transposed=_STACKED)),
    rope_theta=500_000.0,
    norm_topk_prob=True,
)
INTERNVL = of_families(
    "InternVL",
    ("InternVLForConditionalGeneration",),
    {"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "llama": LLAMA},
)
LLAVA = of_families(
    "LLaVA, Pixtral",
    (
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
    ),
    {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "granite": granite.FAMILY},
)
