"""GGUF files of tiny models, written with the `gguf` package from the safetensors that tests/tiny.py makes.

Names come from the package's own table; what converters do to a tensor besides (rows of q and k moved, one added to
Gemma's norms, experts stacked) is done here again, from what they do. Matrices are quantised where the package can;
where it cannot, blocks are made of random bits with scales of the right size, and the model is what they stand for.
Does not know: how localllm reads any of it.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, RopeScalingType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

from tests import gguf_mixtures
from tests.tiny import CHATML, SPECIAL_TOKENS

ARCHITECTURES = {
    "llama": "llama",
    "smollm3": "smollm3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "phi3": "phi3",
    "stablelm": "stablelm",
    "glm4": "glm4",
    **gguf_mixtures.ARCHITECTURES,
}
"""model_type in config.json -> general.architecture."""
FP16_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "MXFP4": (),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where a block's fp16 numbers are, if not at 0: random bytes there would make NaN and infinities of them."""
_NOT_QUANTISED = "ffn_gate_inp|exp_probs_b|altup_|laurel_|per_layer_model_proj"
_PERMUTED = ("llama", "smollm3", "granitemoe")
_TINY = 0.1  # how large weights are

GGUF_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm": {},
    "smollm3": {},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 64},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
    "gemma3n": {"hidden_size_per_layer_input": 256},
    "gemma4": {"hidden_size_per_layer_input": 256},
    "gemma4_moe": {"moe_intermediate_size": 64},
    "phi3": {},
    "stablelm": {},
    "glm4": {},
    **gguf_mixtures.SIZES,
}


def write_gguf(
    source: Path,
    path: Path,
    block_type: str = "F32",
    *,
    others: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    tokenizer: bool = True,
    parts: int = 1,
) -> dict[str, Tensor]:
    """The model in folder `source` as `path`; returns the state that it stands for, in transformers' names.

    others: a pattern of GGUF names -> the block type of those that match. metadata: keys added, or replaced.
    tensors: the same of tensors, in their own type.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    split = {"split_max_tensors": -(-_count(source) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(path, architecture, **split)
    _write_config(writer, config, architecture)
    if tokenizer:
        _write_tokenizer(writer, source, config)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    meant = _write_tensors(writer, source, config, architecture, block_type, others or {}, set(tensors or {}))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def blocks_of(weight: Tensor, block_type: str) -> tuple[np.ndarray, Tensor]:
    """(what is stored, what it stands for fp32)"""
    kind = GGMLQuantizationType[block_type]
    flat = weight.reshape(-1, weight.shape[-1]).float().numpy()
    if block_type in ("F32", "F16"):
        stored: np.ndarray = flat.astype(np.float32 if block_type == "F32" else np.float16)
        return stored.reshape(weight.shape), torch.from_numpy(stored.astype(np.float32)).view(weight.shape)
    try:
        stored = quantize(flat, kind)
    except NotImplementedError:
        stored = random_blocks(block_type, *flat.shape)
    means = torch.from_numpy(dequantize(stored, kind).copy()).view(weight.shape)
    return stored.reshape(*weight.shape[:-1], -1), means


def random_blocks(block_type: str, rows: int, columns: int) -> np.ndarray:
    """[rows, bytes]: every bit random but scales, which make weights of the size that a tiny model has."""
    kind = GGMLQuantizationType[block_type]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(columns)
    blocks = random.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    if block_type == "IQ1_M":  # the four top nibbles of its scales together are one fp16
        scales = blocks[:, 48:56].view(np.uint16)
        scales &= 0x0FFF
        scales |= np.array([0, 0, 0, 0x2000], dtype=np.uint16)
        return blocks.reshape(rows, -1)
    for at in FP16_AT.get(block_type, (0,)):
        blocks[:, at : at + 2] = np.full(len(blocks), 0.01, dtype=np.float16).view(np.uint8).reshape(-1, 2)
    scale = 0.01 * _TINY / float(np.std(dequantize(blocks, kind)))
    for at in FP16_AT.get(block_type, (0,)):
        blocks[:, at : at + 2] = np.full(len(blocks), scale, dtype=np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def _count(source: Path) -> int:
    return len(load_file(source / "model.safetensors"))


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])  # a list for Gemma 3n
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("layer_norm_eps"):
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(full.get("rope_theta") or config.get("rope_theta") or 10_000.0))
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if full["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(float(rope["sliding_attention"]["rope_theta"]))
    if architecture.startswith("gemma") or architecture == "phi3":
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma3":
        writer.add_sliding_window_pattern(3)
    if architecture == "gemma3n":
        _write_gemma3n(writer, config)
    if architecture == "gemma4":
        _write_gemma4(writer, config)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts:
        writer.add_expert_count(experts)
        used = _first(config, "num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    keys = gguf_mixtures.KEYS.get(architecture)
    for key, value in ({} if keys is None else keys(config)).items():
        _add(writer, f"{architecture}.{key}", value)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def _write_gemma3n(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    shares = config["activation_sparsity_pattern"]
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(torch.tensor(shares)).tolist())
    _add(
        writer,
        "gemma3n.attention.sliding_window_pattern",
        [kind == "sliding_attention" for kind in config["layer_types"]],
    )


def _gemma3n_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names as the converter changes them, and the matrices of all streams together."""
    out = {f"{name}.weight" if name.endswith("_scale") else name: tensor for name, tensor in state.items()}
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        each = [out.pop(f"{stem}.{index}.weight") for index in range(config["altup_num_inputs"] - 1)]
        out[f"{stem}.weight"] = torch.stack(each)
    return out


def _write_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """What differs between layers; the general keys are those of the full layers."""
    types, shared = config["layer_types"], config["num_kv_shared_layers"]
    full = config["per_layer_config"][str(types.index("full_attention"))]
    width, first = config["intermediate_size"], len(types) - shared
    keys = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }
    if config["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [width * (1 + (layer >= first)) for layer in range(len(types))]
    if "num_key_value_heads" in full:
        counts = {"full_attention": full["num_key_value_heads"], "sliding_attention": config["num_key_value_heads"]}
        keys["attention.head_count_kv"] = [counts[kind] for kind in types]
    for key, value in keys.items():
        _add(writer, f"gemma4.{key}", value)


def _gemma4_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names as the converter changes them, gate and up of experts together, and the divisors of the frequencies."""
    out = {}
    for name, tensor in state.items():
        out[f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj")) else name] = tensor
    full = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"]
    turning = int(full * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return {**out, "rope_freqs.weight": torch.tensor([1.0] * turning + [1e30] * (full // 2 - turning))}


def _gemma4_name(name: str) -> str | None:
    """Names that are not in the package's table."""
    if name == "rope_freqs.weight":
        return name
    layer = re.search(r"layers\.(\d+)\.router\.(scale|per_expert_scale)$", name)
    kinds = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
    return None if layer is None else f"blk.{layer[1]}.{kinds[layer[2]]}.scale"


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, config: Mapping[str, Any]) -> None:
    raw = json.loads((source / "tokenizer.json").read_text())
    model = raw["model"]
    added = {token["id"]: token["content"] for token in raw["added_tokens"]}  # some vocabularies hold them, some do not
    by_id = {index: token for token, index in model["vocab"].items()} | added
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(config["vocab_size"])]
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds[t in SPECIAL_TOKENS] if i in by_id else gguf.TokenType.UNUSED for i, t in enumerate(tokens)]
    )
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(CHATML)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.data_alignment = value
    for entries in writer.kv_data:
        entries.pop(key, None)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _write_tensors(
    writer: gguf.GGUFWriter,
    source: Path,
    config: Mapping[str, Any],
    architecture: str,
    block_type: str,
    others: Mapping[str, str],
    replaced: set[str],
) -> dict[str, Tensor]:
    state = load_file(source / "model.safetensors")
    table = gguf_mixtures.NAMED_AS.get(architecture, architecture)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == table)
    is_mixture = architecture in gguf_mixtures.KEYS
    converted = gguf_mixtures.converted(state, config) if is_mixture else state
    name_of = partial(
        gguf.get_tensor_name_map(kind, config["num_hidden_layers"]).get_name, try_suffixes=(".weight", ".bias")
    )
    meant = {}
    as_stored = {"gemma3n": _gemma3n_tensors, "gemma4": _gemma4_tensors}.get(architecture, _stacked)
    for name, weight in as_stored(converted, config).items():
        stored_name = (_gemma4_name(name) if architecture == "gemma4" else None) or name_of(name)
        stored_name = name if name.startswith("blk.") else stored_name
        assert stored_name is not None, name
        order = _order(name, weight, config) if architecture in _PERMUTED else None
        moved = weight.float() if order is None else weight.float()[order]
        if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            moved = moved + 1
        own = next((t for pattern, t in others.items() if re.search(pattern, stored_name)), block_type)
        is_plain = weight.ndim == 1 or weight.shape[-1] == 1 or re.search(_NOT_QUANTISED, stored_name)
        own = "F32" if is_plain else own
        stored, means = blocks_of(moved, own)
        if stored_name in replaced:
            continue
        writer.add_tensor(stored_name, stored, raw_dtype=GGMLQuantizationType[own])
        if weight.ndim > 1:
            meant[name] = means if order is None else torch.empty_like(means).index_copy_(0, order, means)
    if not is_mixture:
        return _unstacked(meant, state)
    return gguf_mixtures.restored({**meant, **_unstacked(meant, state)}, config, state)


def _order(name: str, weight: Tensor, config: Mapping[str, Any]) -> Tensor | None:
    """Rows of q and k as ggml turns them, neighbours together: row 2 i + j of a head is row j * head_dim / 2 + i."""
    if not re.search(r"\.[qk]_proj\.", name):
        return None
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    return torch.arange(weight.shape[0]).view(heads, 2, -1).transpose(1, 2).flatten()


def _stacked(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Experts one tensor a matrix, as converters write them. transformers 5 has stacked them already, gate on up."""
    stacked: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stacked[name.replace("gate_up_proj", "gate_proj.weight")] = gate.contiguous()
            stacked[name.replace("gate_up_proj", "up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            stacked[f"{name}.weight"] = tensor
        elif (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)) is None:
            stacked[name] = tensor
        elif found[2] == "0":
            count = sum(
                re.fullmatch(rf"{re.escape(found[1])}\.\d+\.{found[3]}\.weight", each) is not None for each in state
            )
            each = [state[f"{found[1]}.{expert}.{found[3]}.weight"] for expert in range(count)]
            stacked[f"{found[1]}.{found[3]}.weight"] = torch.stack(each)
    return stacked


def _unstacked(meant: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Back to the names of the checkpoint."""
    meant = {**meant, **{name.removesuffix(".weight"): tensor for name, tensor in meant.items() if "gate_up" in name}}
    out = {name: tensor for name, tensor in meant.items() if ".experts." not in name}
    for name in state:
        if match := re.fullmatch(r"(model\.altup\w*_projections)\.(\d)\.weight", name):
            out[name] = meant[f"{match[1]}.weight"][int(match[2])]
        elif name in meant:
            out[name] = meant[name]
        elif name.endswith("experts.gate_up_proj"):
            halves = [meant[name.replace("gate_up_proj", f"{half}_proj.weight")] for half in ("gate", "up")]
            out[name] = torch.cat(halves, dim=1)
        elif name.endswith("experts.down_proj"):
            out[name] = meant[f"{name}.weight"]
        elif found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            out[name] = meant[f"{found[1]}.{found[3]}.weight"][int(found[2])]
    return out
