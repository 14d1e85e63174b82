"""GGUF files of tiny models of classes of transformers, as llama.cpp's converter makes them: keys of the metadata,
names, and what is done to values and to the order of rows and columns.

Does not know: how localllm reads any of it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.gguf_files import _add, _write_tokenizer, blocks_of
from tests.models.class_models import SPECIAL

ARRAY = GGUFValueType.ARRAY
_FLOATS = re.compile(
    r"norm|ffn_gate_inp|exp_probs|indexer|hc_\w*(fn|base|scale)|sinks|attn_[kv]_b\.|_ape|ssm_(a|dt|conv1d)|ple_conv1d"
)
"""Tensors that converters and llama-quantize leave in fp32."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _chunk(tensor: Tensor, count: int, at: int, dim: int = -2) -> Tensor:
    return tensor.chunk(count, dim)[at]


class Piece(NamedTuple):
    """Some rows of a parameter as a stored tensor."""

    stored: str
    rows: Callable[[Tensor], Tensor] = _same  # a view into the parameter
    there: Callable[[Tensor], Tensor] = _same  # what the converter does to it
    back: Callable[[Tensor], Tensor] = _same


class Written(NamedTuple):
    file: Path
    dense: Path  # the class's folder with the values that the file stands for
    quantized: dict[str, set[str]]  # the types of each parameter that is stored in blocks


def write_class(
    source: Path, folder: Path, block_type: str = "F32", *, others: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None, tokenizer: bool = False,
) -> Written:  # fmt: skip
    """Write the model in folder `source` as a GGUF file. others: a pattern of stored names -> the type of those that
    match. metadata: keys added, or replaced. tensors: those added."""
    whole = AutoConfig.from_pretrained(source)
    auto = AutoModelForCausalLM if whole.get_text_config() is whole else AutoModelForImageTextToText
    module = auto.from_pretrained(source, dtype=torch.float32)
    config, file, dense = whole.get_text_config(), folder / "model.gguf", folder / "dense"
    architecture, keys, pieces = KINDS[whole.model_type]
    writer, quantized = gguf.GGUFWriter(file, architecture), dict[str, set[str]]()
    for key, value in {**_common(config), **keys(config), **_constants(module, config)}.items():
        if isinstance(value, list) and type(value[0]) is int:
            writer.add_key_value(f"{architecture}.{key}", value, ARRAY, sub_type=GGUFValueType.UINT64)
        elif value is not None:
            _add(writer, f"{architecture}.{key}", value)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    if tokenizer:
        _write_tokenizer(writer, source, {"vocab_size": config.vocab_size})
    for name, parameter in module.state_dict().items():
        for piece in () if ".visual." in name else pieces(name.replace("model.language_model.", "model."), config):
            converted = piece.there(piece.rows(parameter))
            if not converted.is_floating_point():
                writer.add_tensor(piece.stored, converted.numpy())
                continue
            own = next(
                (kind for pattern, kind in (others or {}).items() if re.search(pattern, piece.stored)), block_type
            )
            fits = converted.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[own]][0] == 0
            own = own if converted.ndim > 1 and fits and not _FLOATS.search(piece.stored) else "F32"
            blocks, means = blocks_of(converted.contiguous(), own)
            writer.add_tensor(piece.stored, blocks, raw_dtype=GGMLQuantizationType[own])
            if own != "F32":
                piece.rows(parameter).copy_(piece.back(means))
                quantized.setdefault(name, set()).add(own)
    for stored, tensor in (tensors or {}).items():
        writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    module.save_pretrained(dense)
    return Written(file, dense, quantized)


def _common(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("main", rope)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]) if rope else None,
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_used_count": config.num_experts_per_tok,
    }


def _named(name: str, table: Mapping[str, str | Callable[[re.Match[str]], str]]) -> str | None:
    """Return the stored name of a parameter. table: patterns -> stored names in a layer or outside."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    inside = name if layer is None else layer[2]
    found = next(
        (re.sub(pattern, new, inside) for pattern, new in table.items() if re.fullmatch(pattern, inside)), None
    )
    return found if found is None or layer is None else f"blk.{layer[1]}.{found}"


_TABLE = {
    r"model\.embed_tokens\.weight": "token_embd.weight",
    r"model\.norm\.weight": "output_norm.weight",
    r"lm_head\.weight": "output.weight",
    r"input_layernorm\.weight": "attn_norm.weight",
    r"post_attention_layernorm\.weight": "ffn_norm.weight",
    r"self_attn\.([qkv])_proj\.weight": r"attn_\1.weight",
    r"self_attn\.([qk])_norm\.weight": r"attn_\1_norm.weight",
    r"self_attn\.o_proj\.weight": "attn_output.weight",
    r"mlp\.(gate|up|down)_proj\.weight": r"ffn_\1.weight",
    r"mlp\.gate\.weight": "ffn_gate_inp.weight",
    r"mlp\.gate\.e_score_correction_bias": "exp_probs_b.bias",
    r"mlp\.experts\.down_proj": "ffn_down_exps.weight",
    r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight": r"ffn_\1_shexp.weight",
}


def _halves(name: str) -> Iterator[Piece] | None:
    """Return gate and up, if a parameter is both."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(|shared_experts\.|experts\.)gate_up_proj(?:\.weight)?", name)
    if found is None:
        return None
    kind = {"": "", "shared_experts.": "_shexp", "experts.": "_exps"}[found[2]]
    halves = enumerate(("gate", "up"))
    return (Piece(f"blk.{found[1]}.ffn_{half}{kind}.weight", partial(_chunk, count=2, at=at)) for at, half in halves)


# -- MiniMax M3


def _minimax_keys(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.dense_intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_count": config.num_local_experts,
        "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk_blocks,
        "attention.indexer.block_size": config.index_block_size,
        "attention.indexer.local_blocks": config.index_local_blocks,
    }


def _minimax_pieces(name: str, config: Any) -> Iterator[Piece]:
    if (halves := _halves(name)) is not None:
        yield from halves
        return
    table = {**_TABLE, r"self_attn\.indexer\.([qk]_(?:proj|norm))\.weight": r"indexer.\1.weight"}
    stored = _named(name, table)
    assert stored is not None, name
    yield Piece(stored, there=lambda weight: weight + 1) if name.endswith("norm.weight") else Piece(stored)


# -- Hy4


def _latent_keys(config: Any) -> dict[str, Any]:
    """Latent attention is stored as that of one key head."""
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _fine_expert_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob or None,
    }


def _indexer_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
    }


def _hy_keys(config: Any) -> dict[str, Any]:
    groups = {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return {
        **_latent_keys(config),
        **_fine_expert_keys(config),
        **_indexer_keys(config),
        **(groups if config.n_group > 1 else {}),
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "expert_gating_func": 2,
        "swiglu_clamp_exp": [float(config.swiglu_limit)] * config.num_hidden_layers,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": float(config.hc_eps),
        "hyper_connection.magnitude": float(config.hc_magnitude),
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
    }


_STREAMS = {
    r"(attn|ffn)_hc\.(fn|base|scale)": r"hc_\1_\2.weight",
    r"model\.hc_head\.hc_(fn|base|scale)": r"output_hc_\1.weight",
}


def _hy_pieces(name: str, config: Any) -> Iterator[Piece]:
    if (halves := _halves(name)) is not None:
        yield from halves
        return
    if name.endswith(".kv_b_proj.weight"):
        layer, sizes = name.split(".")[2], (config.qk_nope_head_dim, config.v_head_dim)

        def keys_and_values(weight: Tensor) -> tuple[Tensor, ...]:
            return weight.unflatten(0, (config.num_attention_heads, -1)).split(sizes, dim=1)

        yield Piece(f"blk.{layer}.attn_k_b.weight", there=lambda weight: keys_and_values(weight)[0].transpose(1, 2))
        yield Piece(f"blk.{layer}.attn_v_b.weight", there=lambda weight: keys_and_values(weight)[1])
        return
    stored = _named(name, {**_TABLE, **_STREAMS, **_LATENT})
    assert stored is not None, name
    yield Piece(stored)


_LATENT = {
    r"self_attn\.sinks": "attn_sinks.weight",
    r"self_attn\.gate_proj\.weight": "attn_gate.weight",
    r"self_attn\.(q_a|q_b)_proj\.weight": r"attn_\1.weight",
    r"self_attn\.(q|kv)_a_layernorm\.weight": r"attn_\1_a_norm.weight",
    r"self_attn\.kv_a_proj_with_mqa\.weight": "attn_kv_a_mqa.weight",
    r"self_attn\.indexer\.wq_b\.weight": "indexer.attn_q_b.weight",
    r"self_attn\.indexer\.wk\.weight": "indexer.attn_k.weight",
    r"self_attn\.indexer\.k_norm\.(weight|bias)": r"indexer.k_norm.\1",
    r"self_attn\.indexer\.weights_proj\.weight": "indexer.proj.weight",
}


# -- GLM-5.3-Flash


def _glm_keys(config: Any) -> dict[str, Any]:
    linear = [kind == "linear_attention" for kind in config.layer_types]
    clamp = [float(config.swiglu_limit)] * config.num_hidden_layers
    return {
        **_latent_keys(config),
        **_fine_expert_keys(config),
        **_indexer_keys(config),
        "attention.head_count_kv": [0 if each else 1 for each in linear],
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool": config.index_kpool,
        "attention.indexer.kpool_select_tail": config.index_kpool_always_select_tail,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "swiglu_clamp_exp": clamp,
        "swiglu_clamp_shexp": clamp,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "kda.gate_lower_bound": float(config.linear_lower_bound),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": float(config.hc_eps),
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
    }


def _glm_pieces(name: str, config: Any) -> Iterator[Piece]:
    if ".self_attn." in name and config.layer_types[int(name.split(".")[2])] == "linear_attention":
        if name.endswith(".conv1d.weight"):
            layer = name.split(".")[2]
            for at, kind in enumerate("qkv"):
                stored, rows = f"blk.{layer}.ssm_conv1d_{kind}.weight", partial(_chunk, count=3, at=at, dim=0)
                yield Piece(stored, rows, lambda each: each.reshape(1, len(each), 1, -1))
            return
        table = {
            **_TABLE,
            r"self_attn\.forget_gate\.f_([ab])_proj\.weight": r"ssm_f_\1.weight",
            r"self_attn\.g_([ab])_proj\.weight": r"ssm_g_\1.weight",
            r"self_attn\.b_proj\.weight": "ssm_beta.weight",
            r"self_attn\.forget_gate\.A_log": "ssm_a",
            r"self_attn\.forget_gate\.dt_bias": "ssm_dt.bias",
            r"self_attn\.o_norm\.weight": "ssm_norm.weight",
        }
        stored = _named(name, table)
        assert stored is not None, name
        yield Piece(stored, there=lambda rates: -rates.exp()) if name.endswith("A_log") else Piece(stored)
    elif ".index_kpool_compress_" in name:
        layer, kind = name.split(".")[2], name.rpartition("_")[2]
        yield Piece(f"blk.{layer}.indexer_compressor_{kind}.weight")
    else:
        yield from _hy_pieces(name, config)


# -- DeepSeek V4


def _deepseek_keys(config: Any) -> dict[str, Any]:
    ratios = {"sliding_attention": 0, **config.compress_rates}
    clamp = [float(config.swiglu_limit)] * config.num_hidden_layers
    return {
        **_fine_expert_keys(config),
        **_indexer_keys(config),
        "expert_gating_func": 4,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.compress_ratios": [ratios[kind] for kind in config.layer_types],
        "attention.compress_rope_freq_base": float(config.compress_rope_theta),
        "swiglu_clamp_exp": clamp,
        "swiglu_clamp_shexp": clamp,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": float(config.hc_eps),
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "embedding_length_out": config.hidden_size * config.hc_mult,
    }


def _deepseek_pieces(name: str, config: Any) -> Iterator[Piece]:
    if (halves := _halves(name)) is not None:
        yield from halves
        return
    table = {
        **_TABLE,
        **_STREAMS,
        r"self_attn\.sinks": "attn_sinks.weight",
        r"self_attn\.(q_a|q_b|kv)_proj\.weight": r"attn_\1.weight",
        r"self_attn\.q_a_norm\.weight": "attn_q_a_norm.weight",
        r"self_attn\.kv_norm\.weight": "attn_kv_a_norm.weight",
        r"self_attn\.o_(a|b)_proj\.weight": r"attn_output_\1.weight",
        r"self_attn\.compressor\.(kv|gate)_proj\.weight": r"attn_compressor_\1.weight",
        r"self_attn\.compressor\.position_bias": "attn_compressor_ape.weight",
        r"self_attn\.compressor\.kv_norm\.weight": "attn_compressor_norm.weight",
        r"self_attn\.compressor\.indexer\.(kv|gate)_proj\.weight": r"indexer_compressor_\1.weight",
        r"self_attn\.compressor\.indexer\.position_bias": "indexer_compressor_ape.weight",
        r"self_attn\.compressor\.indexer\.kv_norm\.weight": "indexer_compressor_norm.weight",
        r"self_attn\.compressor\.indexer\.q_b_proj\.weight": "indexer.attn_q_b.weight",
        r"self_attn\.compressor\.indexer\.scorer\.weights_proj\.weight": "indexer.proj.weight",
        r"mlp\.gate\.tid2eid": "ffn_gate_tid2eid.weight",
    }
    stored = _named(name, table)
    assert stored is not None, name
    yield Piece(stored, there=lambda table: table.int()) if name.endswith("tid2eid") else Piece(stored)


# -- Qwen4-Exp


def _qwen_keys(config: Any) -> dict[str, Any]:
    linear = [kind == "linear_attention" for kind in config.layer_types]
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    return {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": linear,
        "rope.dimension_sections": [11, 11, 10, 0],
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
        "attention.compress_ratios": [0 if each else config.indexer_compress_ratio for each in linear],
        "ple.layers": [layer - 1 for layer in config.ple_layer_ids],
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "embedding_length_per_layer_input": config.ple_embed_dim // heads,
    }


def _grouped(config: Any, size: int, dim: int, start: int = 0) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return how value heads are moved from key head by key head to the first ones of all key heads, and back."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads

    def move(tensor: Tensor, groups: tuple[int, int]) -> Tensor:
        head, tail = tensor.split((start, tensor.shape[dim] - start), dim)
        moved = tail.unflatten(dim, (*groups, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        return torch.cat((head, moved), dim)

    return lambda each: move(each, (keys, heads // keys)), lambda each: move(each, (heads // keys, keys))


def _qwen_pieces(name: str, config: Any) -> Iterator[Piece]:
    if (halves := _halves(name)) is not None:
        yield from halves
        return
    layer, size = "".join(name.split(".")[2:3]), config.linear_value_head_dim
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith("indexer.index_qk_proj.weight"):
        queries = config.indexer_n_heads * config.indexer_head_dim
        yield Piece(f"blk.{layer}.indexer.q_proj.weight", lambda both: both[:queries])
        yield Piece(f"blk.{layer}.indexer.k_proj.weight", lambda both: both[queries:])
        return
    if ".ple_embedding." in name:
        if name.endswith("ngram_embedding.weight"):
            yield Piece("per_layer_token_embd.weight")
        return
    table = {
        **_TABLE,
        r"(attn|mlp)_hyper_connection\.(.*)": lambda found: f"hc_{_PARTS[found[1]]}_{_MIX[found[2]]}.weight",
        r"model\.hyper_connection_mixer\.(.*)": lambda found: f"output_hc_{_MIX[found[1]]}.weight",
        r"self_attn\.indexer\.([qk])_layernorm\.weight": r"indexer.\1_norm.weight",
        r"mlp\.shared_expert_gate\.weight": "ffn_gate_inp_shexp.weight",
        r"linear_attn\.in_proj_qkv\.weight": "attn_qkv.weight",
        r"linear_attn\.in_proj_z\.weight": "attn_gate.weight",
        r"linear_attn\.in_proj_a\.weight": "ssm_alpha.weight",
        r"linear_attn\.in_proj_b\.weight": "ssm_beta.weight",
        r"linear_attn\.A_log": "ssm_a",
        r"linear_attn\.dt_bias": "ssm_dt.bias",
        r"linear_attn\.(conv1d|norm)\.weight": r"ssm_\1.weight",
        r"linear_attn\.out_proj\.weight": "ssm_out.weight",
        r"ple\.(key|value)_proj\.weight": r"ple_\1.weight",
        r"ple\.(norm_(?:key|query|conv)|conv1d)\.weight": r"ple_\1.weight",
    }
    stored = _named(name, table)
    assert stored is not None, name
    moves = {
        "attn_qkv.weight": _grouped(config, size, 0, before),
        "attn_gate.weight": _grouped(config, size, 0),
        "ssm_out.weight": _grouped(config, size, 1),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"), _grouped(config, 1, 0)),
    }
    inside = stored.partition(".")[2].partition(".")[2]
    if inside in moves:
        yield Piece(stored, _same, *moves[inside])
    elif inside == "ssm_a":
        yield Piece(stored, there=lambda rates: -_grouped(config, 1, 0)[0](rates).exp())
    elif inside == "ssm_conv1d.weight":
        yield Piece(stored, there=lambda kernel: _grouped(config, size, 0, before)[0](kernel.squeeze()))
    elif inside == "ple_conv1d.weight":
        yield Piece(stored, there=torch.squeeze)
    elif ".linear_attn." not in name and re.search(r"norm(_key|_query|_conv)?\.weight$", name):
        yield Piece(stored, there=lambda weight: weight + 1)
    else:
        yield Piece(stored)


def _constants(module: Any, config: Any) -> dict[str, list[int]]:
    """Return what the converter reads from the checkpoint's tensors of integers."""
    if config.model_type != "qwen4_exp_text":
        return {}
    state, layer = module.state_dict(), config.ple_layer_ids[0] - 1
    names = {
        "layer_multipliers": "layer_multipliers",
        "ngram_heads_offsets": "head_offsets",
        "ngram_heads_vocab_sizes": "head_vocab_sizes",
    }
    stem = f"model.layers.{layer}.ple.ple_embedding"
    return {f"ple.{key}": state[f"{stem}.{name}"].tolist() for name, key in names.items()}


_PARTS = {"attn": "attn", "mlp": "ffn"}
_MIX = {
    "hc_norm.weight": "norm",
    "input_mix_weight_down.weight": "down",
    "input_mix_weight_up.weight": "up",
    "block_inject_weight.weight": "inject",
}
Kind = tuple[str, Callable[[Any], dict[str, Any]], Callable[[str, Any], Iterator[Piece]]]
KINDS: dict[str, Kind] = {
    "deepseek_v4": ("deepseek4", _deepseek_keys, _deepseek_pieces),
    "glm5_next": ("glm5-next", _glm_keys, _glm_pieces),
    "hy_v4": ("hy_v4", _hy_keys, _hy_pieces),
    "minimax_m3_vl_text": ("minimax-m3", _minimax_keys, _minimax_pieces),
    "qwen4_exp_text": ("qwen4exp", _qwen_keys, _qwen_pieces),
}
"""model_type -> general.architecture, the keys of the metadata, and the stored tensors of a parameter."""
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"moe_intermediate_size": 64},
    "glm5_next": {
        "text_config": {**SPECIAL["glm5_next"]["text_config"], "moe_intermediate_size": 64, "q_lora_rank": 32},
    },
    "hy_v4": {"moe_intermediate_size": 64, "q_lora_rank": 32},
    "minimax_m3_vl_text": {
        "intermediate_size": 64, "shared_intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "qwen4_exp_text": {
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "ple_layer_ids": [3], "ple_embed_dim": 128,
        "linear_value_head_dim": 24,
    },
}  # fmt: skip
"""Sizes of the tiny models, which fit blocks of 32."""
