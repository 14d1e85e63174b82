"""GGUF files of tiny hybrid decoders, as llama.cpp's converter makes them: keys of the metadata, names from the gguf
package's table, and what is done to a tensor's values and to the order of its rows and columns.

Does not know: how localllm reads any of it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_files import _write_tokenizer, blocks_of

Config = Mapping[str, Any]
ARCHITECTURES = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
}
"""model_type in config.json -> general.architecture; of Nemotron-H with experts nemotron_h_moe."""
_FLOATS = re.compile(r"norm|ssm_(a|d|dt|conv1d)|shortconv\.conv\b|ffn_gate_inp|exp_probs|bias")
"""Tensors that are never quantised."""

_MOE = {"moe_intermediate_size": 64}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"intermediate_size": 144, "block_multiple_of": 32}),
    "lfm2moe": ("lfm2_moe", {"conv_bias": False, **_MOE}),
    "qwen35, 2 value heads for a key head": ("qwen3_5", {"linear_value_head_dim": 32}),
    "qwen35, 3 value heads for a key head": (
        "qwen3_5",
        {"linear_num_value_heads": 6, "linear_value_head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen35moe": ("qwen3_5_moe", {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 32, **_MOE}),
    "qwen3next": (
        "qwen3_next",
        {"shared_expert_intermediate_size": 64, "linear_value_head_dim": 32, "mlp_only_layers": [], **_MOE},
    ),
    "granitehybrid": ("granite_hybrid", {}),
    "granitehybrid with experts": ("granite_hybrid_moe", {"shared_intermediate_size": 64}),
    "bamba": ("bamba", {}),
    "nemotron_h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "num_hidden_layers": 4,
        "head_dim": 32,
    }),
    "nemotron_h_moe": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 64, "head_dim": 32, "n_group": 1, "topk_group": 1, **_MOE,
    }),
    "falcon-h1": ("falcon_h1", {}),
}  # fmt: skip


def write_hybrid(
    source: Path,
    path: Path,
    block_type: str = "F32",
    *,
    dequantised: bool = False,
    left_out: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The model in folder `source` as `path`, which is returned.

    dequantised: store what the blocks stand for. left_out: a pattern of names that are not written. metadata: keys
    replaced.
    """
    config = json.loads((source / "config.json").read_text())
    config |= {"vocab_size": config["vocab_size"]}
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {**_common_keys(config), **_KEYS[architecture](config), **(metadata or {})}
    for key, value in keys.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    _write_tokenizer(writer, source, config)
    for name, tensor in _tensors(load_file(source / "model.safetensors"), config, architecture):
        if left_out and re.search(left_out, name):
            continue
        own = "F32" if tensor.ndim < 2 or _FLOATS.search(name) else block_type
        stored, means = blocks_of(tensor.float(), own)
        if dequantised:
            writer.add_tensor(name, means.contiguous().numpy())
        else:
            writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(config: Config) -> str:
    name = ARCHITECTURES[config["model_type"]]
    return f"{name}_moe" if name == "nemotron_h" and "moe" in config["layers_block_type"] else name


# -- metadata


def _common_keys(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    eps = config.get("rms_norm_eps") or config.get("norm_eps") or config.get("layer_norm_epsilon")
    return {
        "block_count": len(config["layers_block_type"]) if "layers_block_type" in config else _layers(config),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size", 0),
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(eps),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        **({"attention.key_length": config["head_dim"]} if config.get("head_dim") else {}),
    }


def _layers(config: Config) -> int:
    return int(config["num_hidden_layers"])


def _kv_heads(config: Config, kinds: list[str]) -> list[int]:
    return [config["num_key_value_heads"] if "attention" in kind and "linear" not in kind else 0 for kind in kinds]


def _experts(config: Config, count: str = "num_experts") -> dict[str, Any]:
    width = {"expert_feed_forward_length": config["moe_intermediate_size"]} if "moe_intermediate_size" in config else {}
    return {"expert_count": config[count], "expert_used_count": config["num_experts_per_tok"], **width}


def _lfm2(config: Config) -> dict[str, Any]:
    width = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        width = unit * -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // unit)
    keys = {
        "feed_forward_length": width,
        "attention.head_count_kv": _kv_heads(config, config["layer_types"]),
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" in config:
        keys |= {**_experts(config), "leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    return keys


def _delta_net(config: Config) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config["linear_value_head_dim"] * heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        **(_experts(config) if "num_experts" in config else {}),
    }


def _ssm(conv: int, state: int, groups: int, heads: int, head_size: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": conv,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": heads * head_size,
        "ssm.time_step_rank": heads,
    }


def _mamba_keys(config: Config) -> dict[str, Any]:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
    return _ssm(*(config[name] for name in names))


def _granite(config: Config) -> dict[str, Any]:
    is_bamba = config["model_type"] == "bamba"
    if is_bamba:
        kinds = ["attention" if layer in config["attn_layer_indices"] else "mamba" for layer in range(_layers(config))]
        own = {"rope.dimension_count": config["hidden_size"] // config["num_attention_heads"] // 2}
    else:
        kinds, own = config["layer_types"], {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }  # fmt: skip
    if config.get("num_local_experts"):
        own |= _experts(config, "num_local_experts")
        own |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
    elif not is_bamba:
        own |= {"feed_forward_length": config["shared_intermediate_size"]}
    rotates = is_bamba or config.get("position_embedding_type") == "rope"
    heads = {"attention.head_count_kv": _kv_heads(config, kinds)}
    return {**_mamba_keys(config), **heads, "rope.scaling.finetuned": rotates, **own}


def _nemotron(config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    is_moe = "moe" in kinds
    width = config["moe_intermediate_size"] if is_moe else config["intermediate_size"]
    keys = {
        **_ssm(*(config[name] for name in (
            "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"
        ))),
        "attention.head_count_kv": _kv_heads(config, kinds),
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
    }  # fmt: skip
    if is_moe:
        keys |= {
            **_experts(config, "n_routed_experts"),
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_group_count": config["n_group"],
        }
    return keys


_KEYS = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
    "qwen3next": _delta_net,
    "granitehybrid": _granite,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "falcon-h1": _mamba_keys,
}


# -- tensors


def _tensors(state: Mapping[str, Tensor], config: Config, architecture: str) -> Iterator[tuple[str, Tensor]]:
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, 16)
    for name, tensor in _stacked(state).items():
        for changed, values in _changed(name, tensor, config, architecture):
            if changed.startswith("blk."):
                yield changed, values
                continue
            stored = table.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert stored is not None, changed
            yield stored, values


def _stacked(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as one tensor a matrix."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if found is None:
            out[name] = tensor
        elif found[2] == "0":
            each = [state[key] for key in (f"{found[1]}.{i}.{found[3]}" for i in range(len(state))) if key in state]
            stem = found[1].replace("model.layers", "layers") if found[3][0] == "w" else found[1]
            stem = re.sub(r"^(backbone|model)\.(layers\.\d+)\.mixer\.", r"model.\2.mlp.", stem)
            out[f"{stem}.{found[3]}"] = torch.stack(each)
    return out


def _changed(name: str, tensor: Tensor, config: Config, architecture: str) -> Iterator[tuple[str, Tensor]]:
    layer = re.search(r"layers\.(\d+)\.", name)
    prefix = f"blk.{layer[1]}." if layer else ""
    is_delta = architecture.startswith("qwen3")
    if is_delta and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    if architecture == "qwen3next" and "in_proj_qkvz" in name:
        yield from _ungrouped(prefix, tensor, config)
        return
    if is_delta and architecture != "qwen3next" and "linear_attn." in name:
        tensor = _tiled(name, tensor, config)
    if not is_delta and name.endswith(("A_log", ".D")):
        tensor = tensor[:, None]
    if not is_delta and name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and re.search(r"\.[qk]_proj\.", name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if (fused := re.search(r"(block_sparse_moe|shared_mlp)\.input_linear", name)) is not None:
        ending = "_exps" if fused[1] == "block_sparse_moe" else "_shexp" if config["num_local_experts"] else ""
        for half, values in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"{prefix}ffn_{half}{ending}.weight", values.contiguous()
        return
    if "shared_mlp.output_linear" in name and not config["num_local_experts"]:
        yield f"{prefix}ffn_down.weight", tensor
        return
    if architecture == "falcon-h1":
        tensor = _multiplied(name, tensor, config)
    name = name.replace("dt_bias", "dt.bias" if architecture.startswith("nemotron") else "dt_proj.bias")
    name = re.sub(r"\.(expert_bias|e_score_correction_bias)$", lambda found: f".{found[1]}.bias", name)
    yield name.replace("e_score_correction_bias.bias", "e_score_correction.bias"), tensor


def _tiled(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Value heads in the order K0v0 K1v0 ... K0v1 K1v1 ..., in rows, and in columns of the last matrix."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, first = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def moved(part: Tensor, size: int, dim: int = 0) -> Tensor:
        order = torch.arange(values * size).view(keys, values // keys, size).transpose(0, 1).flatten()
        return part.index_select(dim, order)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:first], moved(tensor[first:], width)))
    if "in_proj_z" in name:
        return moved(tensor, width)
    if re.search(r"in_proj_[ab]|A_log|dt_bias", name):
        return moved(tensor, 1)
    return moved(tensor, width, 1) if "out_proj" in name else tensor


def _ungrouped(prefix: str, tensor: Tensor, config: Config) -> Iterator[tuple[str, Tensor]]:
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    q, k, v, z = tensor.view(keys, -1, tensor.shape[1]).split([key, key, value, value], dim=1)
    yield f"{prefix}attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield f"{prefix}attn_gate.weight", z.flatten(0, 1).contiguous()


def _multiplied(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Falcon-H1's multipliers as part of the matrices."""
    before = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors = {
        "q_proj": before, "k_proj": before * config["key_multiplier"], "v_proj": before,
        "o_proj": config["attention_out_multiplier"], "gate_proj": gate, "down_proj": down,
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    if "in_proj" in name:
        inner, columns = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, columns, columns, config["mamba_n_heads"])
        parts = zip(tensor.split(sizes), config["ssm_multipliers"], strict=True)
        return torch.cat([part * factor * config["ssm_in_multiplier"] for part, factor in parts])
    return tensor * next((factor for stem, factor in factors.items() if f"{stem}." in name), 1.0)
