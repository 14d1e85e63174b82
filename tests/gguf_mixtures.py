"""What converters write for models with small experts and for latent attention: keys of the metadata, and tensors.

Does not know: how localllm reads any of it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gguf import ExpertGatingFuncType
from torch import Tensor

Config = Mapping[str, Any]
State = Mapping[str, Tensor]

ARCHITECTURES = {
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v32": "deepseek32",
    "mistral4": "mistral4",
    "afmoe": "afmoe",
    "mimo_v2_flash": "mimo2",
    "llama4_text": "llama4",
    "glm_moe_dsa": "glm-dsa",
    "ernie4_5_moe": "ernie4_5-moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "solar_open": "glm4moe",
    "glm4_moe": "glm4moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "hy_v3": "hy_v3",
    "cohere2_moe": "cohere2moe",
    "exaone_moe": "exaone-moe",
    "granitemoeshared": "granitemoe",
    "laguna": "laguna",
    "mellum": "mellum",
    "phimoe": "phimoe",
}
"""model_type in config.json -> general.architecture."""
NAMED_AS = {
    "deepseek32": "glm-dsa", "hy_v3": "exaone-moe", "cohere2moe": "dots1", "laguna": "dots1", "mellum": "qwen3moe",
}  # fmt: skip
"""Architectures that the gguf package does not have -> one whose table has the same names."""
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 64},
    "glm4_moe_lite": {"qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 64},
    "mistral4": {
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 64,
    },
    "llama4": {"head_dim": 32, "intermediate_size": 64, "attention_chunk_size": 8192, "floor_scale": 8192},
    "mimo_v2": {
        "head_dim": 64,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    },
    "afmoe": {"head_dim": 32, "moe_intermediate_size": 64, "layer_types": None, "num_hidden_layers": 4},
    "deepseek_v32": {
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": 32,
        "moe_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {"qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64, "moe_norm_min": 1e-12},
    "dots1": {"moe_intermediate_size": 64, "sliding_window": None, "n_group": 1, "topk_group": 1},
    "minimax_m2": {},
    "solar_open": {"moe_intermediate_size": 64},
    "hunyuan_dense": {"head_dim": 32},
    "hunyuan_moe": {"head_dim": 32},
    "hy_v3": {"head_dim": 32, "moe_intermediate_size": 64},
    "cohere2_moe": {"head_dim": 32, "prefix_dense_intermediate_size": 64},
    "exaone_moe": {"moe_intermediate_size": 64},
    "granite_moe_shared": {"shared_intermediate_size": 64},
    "laguna": {"head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "phimoe": {"sliding_window": None, "router_jitter_noise": 0.01},
    "mellum": {"moe_intermediate_size": 64, "mlp_layer_types": None},
}
"""Families of tests/tiny.py with sizes of whole blocks; what a file cannot say is set to what is assumed then."""


def _experts(config: Config, shared: str, scale: str = "routed_scaling_factor") -> dict[str, Any]:
    return {
        "expert_shared_count": config[shared],
        "expert_weights_scale": float(config[scale]),
        "expert_weights_norm": bool(config.get("norm_topk_prob", True)),
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
    }


def _dense(config: Config) -> int:
    return list(config["mlp_layer_types"]).count("dense")


def _latent(config: Config) -> dict[str, Any]:
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    dense = _dense(config) if config.get("mlp_layer_types") else config["first_k_dense_replace"]
    indexer = {"top_k": "index_topk", "head_count": "index_n_heads", "key_length": "index_head_dim"}
    indexed = {f"attention.indexer.{key}": config[name] for key, name in indexer.items() if config.get(name)}
    return {
        **_experts(config, "n_shared_experts"),
        "leading_dense_block_count": dense,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        **indexed,
    }


def _mistral4(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        **_latent(config),
        "expert_gating_func": int(ExpertGatingFuncType.SOFTMAX),
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }


def _afmoe(config: Config) -> dict[str, Any]:
    dense = {"leading_dense_block_count": config["num_dense_layers"]}
    window = {"attention.sliding_window": config["sliding_window"]}
    return {**_experts(config, "num_shared_experts", "route_scale"), **dense, **window}


def _mimo2(config: Config) -> dict[str, Any]:
    """The window of published configs, which counts the tokens before the query."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    groups = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [groups * (1 + slides) for slides in windowed],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": float(config["attention_value_scale"]),
        "attention.sliding_window": config["sliding_window"] - 1,
        "attention.sliding_window_pattern": windowed,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
    }


def _llama4(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _ernie(config: Config) -> dict[str, Any]:
    return {
        "expert_shared_count": config["moe_num_shared_experts"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
    }


def _glm4(config: Config) -> dict[str, Any]:
    """Solar Open's files do not count dense layers, of which it has none."""
    dense = {"leading_dense_block_count": config.get("first_k_dense_replace")}
    groups = {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return {
        **_experts(config, "n_shared_experts"),
        **({} if dense["leading_dense_block_count"] is None else dense),
        **groups,
    }


def _minimax(config: Config) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
    }


def _hunyuan_rope(config: Config) -> dict[str, Any]:
    rope, dim = config.get("rope_parameters") or {}, config["head_dim"]
    base = float(rope.get("rope_theta", 10_000.0))
    return {"rope.freq_base": base * rope["alpha"] ** (dim / (dim - 2)) if rope.get("alpha") else base}


def _hunyuan(config: Config) -> dict[str, Any]:
    sizes = dict.fromkeys(("expert_feed_forward_length",), config["intermediate_size"])
    return {**_hunyuan_rope(config), **sizes, "expert_shared_count": 1}


def _hunyuan3(config: Config) -> dict[str, Any]:
    shared = config["moe_intermediate_size"] * config["num_shared_experts"]
    keys = _experts(config, "num_shared_experts", "router_scaling_factor")
    keys.pop("expert_shared_count")
    return {**keys, "expert_shared_feed_forward_length": shared}


def _cohere2(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "logit_scale": float(config["logit_scale"]),
        "leading_dense_block_count": _dense(config),
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
    }


def _exaone(config: Config) -> dict[str, Any]:
    return {
        **_experts(config, "num_shared_experts"),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "leading_dense_block_count": _dense(config),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _granite(config: Config) -> dict[str, Any]:
    return {
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }


def _windows(config: Config) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": kinds}


def _laguna(config: Config) -> dict[str, Any]:
    ropes = config["rope_parameters"]
    return {
        **_windows(config),
        "attention.head_count": config["num_attention_heads_per_layer"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["moe_routed_scaling_factor"]),
        "expert_gating_func": int(ExpertGatingFuncType.SIGMOID),
        "leading_dense_block_count": _dense(config),
        "rope.dimension_count_swa": config["head_dim"],
        "rope.scaling.yarn_attn_factor": ropes["full_attention"]["attention_factor"],
    }


KEYS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek2": _latent,
    "deepseek32": _latent,
    "glm-dsa": _latent,
    "mistral4": _mistral4,
    "afmoe": _afmoe,
    "mimo2": _mimo2,
    "llama4": _llama4,
    "ernie4_5-moe": _ernie,
    "dots1": _glm4,
    "glm4moe": _glm4,
    "minimax-m2": _minimax,
    "hunyuan-dense": _hunyuan_rope,
    "hunyuan-moe": _hunyuan,
    "hy_v3": _hunyuan3,
    "cohere2moe": _cohere2,
    "exaone-moe": _exaone,
    "granitemoe": _granite,
    "laguna": _laguna,
    "mellum": _windows,
    "phimoe": lambda config: {},
}
"""general.architecture -> keys of its metadata without the prefix, beside the general ones."""


def converted(state: State, config: Config) -> dict[str, Tensor]:
    """The tensors under the names that the package's table knows: halves of fused matrices by themselves, and latent
    attention's expansion as keys, transposed, and values."""
    out: dict[str, Tensor] = {}
    if config["model_type"] == "llama4_text":  # here experts are stored transposed
        state = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in state.items()}
    for name, tensor in state.items():
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
            out[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
            out[name.replace("kv_b", "v_b")] = values.contiguous()
        elif "input_linear" in name:  # Granite's experts, or its shared one
            gate, up = tensor.chunk(2, dim=-2)
            out[_granite_half(name, "gate")], out[_granite_half(name, "up")] = gate.contiguous(), up.contiguous()
        else:
            out[_renamed(name)] = tensor
    return out


def restored(meant: State, config: Config, state: State) -> dict[str, Tensor]:
    """The matrices under the checkpoint's names: what `converted` has divided is whole, and turned back."""
    out: dict[str, Tensor] = {}
    for name in state:
        if name.endswith("kv_b_proj.weight"):
            keys, values = (meant[name.replace("kv_b", half)] for half in ("k_b", "v_b"))
            out[name] = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        elif "input_linear" in name:
            out[name] = torch.cat([meant[_granite_half(name, half)] for half in ("gate", "up")], dim=-2)
        elif (stored := _renamed(name)) in meant:
            is_turned = config["model_type"] == "llama4_text" and ".experts." in name
            out[name] = meant[stored].transpose(1, 2) if is_turned else meant[stored]
    return out


def _renamed(name: str) -> str:
    if (gate := re.search(r"layers\.(\d+)\.self_attn\.g_proj\.", name)) is not None:  # not in the package's table
        return f"blk.{gate[1]}.attn_gate.weight"
    name = name.replace(".mlp.experts.e_score", ".mlp.gate.e_score")
    renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
    renamed = renamed.replace("attention_sink_bias", "attention_sink_bias.weight")
    return renamed.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.shared_mlp.", ".mlp.shared_experts.")


def _granite_half(name: str, half: str) -> str:
    layer = re.match(r"model\.layers\.\d+\.", name)
    assert layer is not None, name
    kind = "shared_experts" if "shared_mlp" in name else "experts"
    return f"{layer[0]}mlp.{kind}.{half}_proj.weight"
