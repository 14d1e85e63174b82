"""GGUF files of architectures that a class of transformers computes: its config, and its parameters' names.

Names are looked up by what follows `blk.N.` and `model.layers.N.`. Several stored tensors of one name are the rows of
one parameter, in the order of the table. What the converter did to a tensor's values or rows is undone.
Does not know: how files and blocks are read (checkpoint.py, matrices.py), how the class is loaded.
Source: conversion/*.py and src/models/*.cpp of llama.cpp, for what is stored; the classes of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm.errors import UnsupportedModel
from localllm.models.spec.gguf import (
    EXPERT_GROUPS,
    EXPERTS,
    FINE_EXPERTS,
    LOCAL_EXPERTS,
    SCORES,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    has,
    mixed_layers,
    per_head,
)

if TYPE_CHECKING:
    from torch import Tensor


_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def _nothing(_: object) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Inverse:
    """A change that gives a stored tensor the values that the class expects."""

    change: Callable[[Tensor], Tensor]
    moves_rows: bool = False  # it only moves rows: blocks stay as they are. Otherwise they are dequantised before.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts(GGUFFacts):
    """Facts of GGUF files of one `general.architecture` that a class of transformers computes."""

    layers: Mapping[str, str]  # stored name -> the class's, in a layer
    others: Mapping[str, str]  # the same outside the layers
    within: str = ""  # what follows `model.` in the class's names
    undone: Callable[[Fields], Mapping[str, Inverse]] = _nothing  # by the stored name, in a layer or outside
    moved: Callable[[Metadata], Mapping[str, str]] = _nothing  # stored names -> those as tensors of a layer
    constants: Callable[[Metadata], Mapping[str, Sequence[int]]] = _nothing  # tensors that are in the metadata

    def name_of(self, stored: str) -> str:
        """Return the name of the parameter; of a tensor that the class does not have, its stored name."""
        layer, inside = _LAYER.fullmatch(stored), inside_layer(stored)
        found = (self.others if layer is None else self.layers).get(inside)
        if found is None:
            return stored
        name = found if layer is None else f"model.layers.{layer[1]}.{found}"
        return re.sub(r"^model\.", f"model.{self.within}", name)

    def order(self) -> Callable[[str], tuple[int, int]]:
        """Return the key that sorts stored names by layer and by the table."""
        places = {name: place for place, name in enumerate((*self.others, *self.layers))}

        def key(stored: str) -> tuple[int, int]:
            layer = _LAYER.fullmatch(stored)
            return -1 if layer is None else int(layer[1]), places.get(inside_layer(stored), len(places))

        return key


def inside_layer(stored: str) -> str:
    """Return what follows the number of the layer in a stored name; of a tensor outside the layers, its name."""
    layer = _LAYER.fullmatch(stored)
    return stored if layer is None else layer[2]


_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
_ATTENTION = {f"attn_{kind}.weight": f"self_attn.{kind}_proj.weight" for kind in "qkv"} | {
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_LATENT = {
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_DENSE = {f"ffn_{kind}.weight": f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
_SHARED = {f"ffn_{kind}_shexp.weight": f"mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up", "down")}
_STREAMS = {
    f"hc_{part}_{kind}.weight": f"{part}_hc.{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")
}
_HEAD_OF_STREAMS = {f"output_hc_{kind}.weight": f"model.hc_head.hc_{kind}" for kind in ("fn", "base", "scale")}
_INDEXER = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
}
_INDEXER_OF_LATENT = {
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
}
_NORMS_OF_HEADS = ("attn_q_norm.weight", "attn_k_norm.weight", "indexer.q_norm.weight", "indexer.k_norm.weight")
_LESS_ONE = Inverse(lambda stored: stored - 1)
"""Weights of norms that the class adds one to: the converter has added it."""


def _rope(config: Fields, *, whole: bool = False) -> Fields:
    """Return the rotary embedding as classes describe it, in place of its general fields. whole: the class's own sizes
    say how much of a head turns."""
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 10_000.0)}
    share, scaling = config.pop("partial_rotary_factor", None), config.pop("rope_scaling", None)
    if share is not None and not whole:
        rope["partial_rotary_factor"] = share
    return {"rope_parameters": rope | (scaling or {})}


def _layer_range(config: Fields) -> range:
    return range(config["num_hidden_layers"])


def _swiglu_limit(metadata: Metadata) -> float:
    """Return where the activations of routed experts are clamped; 0: they are not."""
    stated = metadata.get("swiglu_clamp_exp")
    limits = set(stated if isinstance(stated, list) else [stated or 0.0])
    if len(limits) != 1 or not isinstance(limit := limits.pop(), float | int):
        metadata.fail("swiglu_clamp_exp", f"It is {stated!r}, not one number for all layers.")
    return float(limit)


# -- MiniMax M3


def _minimax_m3(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of the text part. Of the layers with an indexer, each query head of a key head sees the blocks
    that the indexer's head chose."""
    expert_scoring(metadata, SIGMOID)
    width = metadata.count("expert_feed_forward_length")
    indexed = [has(checkpoint, "indexer.q_proj.weight", layer) for layer in _layer_range(config)]
    return {
        **_rope(config),
        **mixed_layers(checkpoint, config),
        "layer_types": ["minimax_m3_sparse" if each else "full_attention" for each in indexed],
        "dense_intermediate_size": metadata.count("feed_forward_length"),
        "intermediate_size": width,
        "shared_intermediate_size": width * metadata.count("expert_shared_count"),
    }


_MINIMAX_M3 = ClassFacts(
    "MiniMaxM3VLForCausalLM",
    {
        **LOCAL_EXPERTS,
        **_INDEXER,
        "routed_scaling_factor": "expert_weights_scale",
        "rotary_dim": "rope.dimension_count",
        "index_block_size": "attention.indexer.block_size",
        "index_topk_blocks": "attention.indexer.top_k",
        "index_local_blocks": "attention.indexer.local_blocks",
    },
    _minimax_m3,
    {"model_type": "minimax_m3_vl_text"},
    layers={
        **_NORMS,
        **_ATTENTION,
        **_EXPERTS,
        "ffn_gate.weight": "mlp.gate_up_proj.weight",
        "ffn_up.weight": "mlp.gate_up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
        "ffn_gate_shexp.weight": "mlp.shared_experts.gate_up_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_experts.gate_up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
        **{
            f"indexer.{kind}.weight": f"self_attn.indexer.{kind}.weight"
            for kind in ("q_proj", "k_proj", "q_norm", "k_norm")
        },
    },
    others=_OTHERS,
    undone=lambda _: dict.fromkeys((*_NORMS, "output_norm.weight", *_NORMS_OF_HEADS), _LESS_ONE),
)


# -- Hy4


def _hy_v4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of latent attention with an indexer. Layers without one use the keys that the layer before
    chose."""
    expert_scoring(metadata, SIGMOID)
    rotary = metadata.count("rope.dimension_count")
    config.pop("head_dim", None)
    indexed = metadata.optional_count("attention.indexer.top_k") is not None
    owns = [has(checkpoint, "indexer.attn_k.weight", layer) for layer in _layer_range(config)]
    return {
        **_rope(config, whole=True),
        **mixed_layers(checkpoint, config),
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": metadata.count("attention.key_length_mla") - rotary,
        "v_head_dim": metadata.count("attention.value_length_mla"),
        "layer_types": ["indexed_attention" if indexed else "full_attention"] * len(owns),
        "indexer_types": ["full" if each else "shared" for each in owns],
        "pad_token_id": metadata.token_id("padding"),
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "swiglu_limit": _swiglu_limit(metadata),
    }


_HY_V4 = ClassFacts(
    "HYV4ForCausalLM",
    {
        **FINE_EXPERTS,
        **EXPERT_GROUPS,
        **_INDEXER,
        "index_topk": "attention.indexer.top_k",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "hc_mult": "hyper_connection.count",
        "hc_eps": "hyper_connection.epsilon",
        "hc_magnitude": "hyper_connection.magnitude",
    },
    _hy_v4,
    {"model_type": "hy_v4"},
    layers={
        **_NORMS,
        **_LATENT,
        **_STREAMS,
        **_EXPERTS,
        **_DENSE,
        **_SHARED,
        "attn_sinks.weight": "self_attn.sinks",
        "attn_gate.weight": "self_attn.gate_proj.weight",
        **_INDEXER_OF_LATENT,
    },
    others={**_OTHERS, **_HEAD_OF_STREAMS},
)


# -- DeepSeek V4


def _deepseek4(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of compressed attention. Layers that compress keys turn them by another base, which alone is
    scaled."""
    scoring = expert_scoring(metadata, SQRT_SOFTPLUS, SIGMOID, SOFTMAX) or SQRT_SOFTPLUS
    layers = len(_layer_range(config))
    ratios = metadata.get("attention.compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers or not all(type(each) is int for each in ratios):
        metadata.fail("attention.compress_ratios", f"It is {ratios!r}, not a whole number for each of {layers} layers.")
    kinds = [_COMPRESSED.get(each, "heavily_compressed_attention") for each in ratios[:layers]]
    heavily = sorted(set(ratios[:layers]) - set(_COMPRESSED))
    if len(heavily) > 1:
        raise UnsupportedModel(
            f"{metadata.file.name} has layers that differ in how much they compress: {heavily} tokens to one.",
            "Supported: 4, and one larger number.",
        )
    config.pop("intermediate_size", None)
    hashed = metadata.optional_count("hash_layer_count") or 0
    share = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["attention_factor"] = 1.0
    base = metadata.number("attention.compress_rope_freq_base") or config["rope_theta"]
    return {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": config["rope_theta"], **share},
            "compress": {**scaling, "rope_theta": base, **share},
        },
        "compress_rope_theta": base,
        "layer_types": kinds,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": heavily[0] if heavily else 128,
        },
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "scoring_func": SCORES[scoring],
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "swiglu_limit": _swiglu_limit(metadata),
    }


_COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention"}
_COMPRESSOR = {"kv.weight": "kv_proj.weight", "gate.weight": "gate_proj.weight", "ape.weight": "position_bias"} | {
    "norm.weight": "kv_norm.weight"
}
_DEEPSEEK4 = ClassFacts(
    "DeepseekV4ForCausalLM",
    {
        **FINE_EXPERTS,
        **_INDEXER,
        "index_topk": "attention.indexer.top_k",
        "q_lora_rank": "attention.q_lora_rank",
        "o_groups": "attention.output_group_count",
        "o_lora_rank": "attention.output_lora_rank",
        "hc_mult": "hyper_connection.count",
        "hc_eps": "hyper_connection.epsilon",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    },
    _deepseek4,
    {"model_type": "deepseek_v4"},
    ignored=(r"blk\.\d+\.exp_probs_b_vl\.bias",),  # for tokens of pictures
    layers={
        **_NORMS,
        **_STREAMS,
        **_EXPERTS,
        **_SHARED,
        "attn_sinks.weight": "self_attn.sinks",
        "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_kv.weight": "self_attn.kv_proj.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
        "attn_output_a.weight": "self_attn.o_a_proj.weight",
        "attn_output_b.weight": "self_attn.o_b_proj.weight",
        **{f"attn_compressor_{name}": f"self_attn.compressor.{inside}" for name, inside in _COMPRESSOR.items()},
        **{
            f"indexer_compressor_{name}": f"self_attn.compressor.indexer.{inside}"
            for name, inside in _COMPRESSOR.items()
        },
        "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
        "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    },
    others={**_OTHERS, **_HEAD_OF_STREAMS},
    undone=lambda _: {"ffn_gate_tid2eid.weight": Inverse(lambda stored: stored.long(), moves_rows=True)},
)


# -- GLM-5.3-Flash


def _glm5_next(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of KDA and of latent attention that nothing turns, as the text part of a whole model."""
    expert_scoring(metadata, SIGMOID)
    general = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
    kept: Fields = {name: config[name] for name in general if name in config}
    for name in ("head_dim", "partial_rotary_factor", "rope_theta"):
        config.pop(name, None)
    layers = _layer_range(config)
    indexed = [has(checkpoint, "attn_q_a.weight", layer) for layer in layers]
    owns = [has(checkpoint, "indexer.attn_k.weight", layer) for layer in layers]
    text = {
        **config,
        **mixed_layers(checkpoint, config),
        "model_type": "glm5_next_text",
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": metadata.count("attention.key_length_mla"),
        "v_head_dim": metadata.count("attention.value_length_mla"),
        "layer_types": ["indexed_attention" if each else "linear_attention" for each in indexed],
        "indexer_types": ["full" if own or not each else "shared" for own, each in zip(owns, indexed, strict=True)],
        "pad_token_id": metadata.token_id("padding"),
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1),
        "linear_num_heads": config["num_attention_heads"],
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "swiglu_limit": _swiglu_limit(metadata),
    }
    config.clear()
    return {**kept, "model_type": "glm5_next", "text_config": text}


_GLM5_NEXT = ClassFacts(
    "Glm5NextForConditionalGeneration",
    {
        **FINE_EXPERTS,
        **EXPERT_GROUPS,
        **_INDEXER,
        "index_topk": "attention.indexer.top_k",
        "index_kpool": "attention.indexer.kpool",
        "index_kpool_always_select_tail": "attention.indexer.kpool_select_tail",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_head_dim": "kda.head_dim",
        "linear_lower_bound": "kda.gate_lower_bound",
        "hc_mult": "hyper_connection.count",
        "hc_eps": "hyper_connection.epsilon",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    },
    _glm5_next,
    varying=("attention.head_count_kv",),  # 0: KDA
    layers={
        **_NORMS,
        **_ATTENTION,
        **_LATENT,
        **_STREAMS,
        **_EXPERTS,
        **_DENSE,
        **_SHARED,
        **_INDEXER_OF_LATENT,
        "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
        "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
        **{f"ssm_conv1d_{kind}.weight": f"self_attn.{kind}_conv1d.weight" for kind in "qkv"},
        **{f"ssm_f_{part}.weight": f"self_attn.forget_gate.f_{part}_proj.weight" for part in "ab"},
        **{f"ssm_g_{part}.weight": f"self_attn.g_{part}_proj.weight" for part in "ab"},
        "ssm_beta.weight": "self_attn.b_proj.weight",
        "ssm_a": "self_attn.forget_gate.A_log",
        "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
        "ssm_norm.weight": "self_attn.o_norm.weight",
    },
    others=_OTHERS,
    within="language_model.",
    undone=lambda _: {
        "ssm_a": Inverse(lambda stored: (-stored.flatten()).log()),
        **{
            f"ssm_conv1d_{kind}.weight": Inverse(lambda stored: stored.reshape(-1, 1, stored.shape[-1]))
            for kind in "qkv"
        },
    },
)


# -- Qwen4-Exp

_TABLE = "per_layer_token_embd.weight"  # embeddings of n-grams


def _qwen4exp(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of delta nets, of attention with pooled keys, and of embeddings of n-grams."""
    layers, recurrent = _layer_range(config), metadata.get("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        every = metadata.optional_count("full_attention_interval") or 4
        recurrent = [(layer + 1) % every != 0 for layer in layers]
    ratios = metadata.get("attention.compress_ratios")
    value_heads = metadata.count("ssm.time_step_rank")
    config.pop("intermediate_size", None)
    return {
        **_rope(config),
        **_ngrams(metadata, checkpoint, config),
        "layer_types": ["linear_attention" if recurrent[layer] else "indexed_attention" for layer in layers],
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": metadata.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": per_head(metadata, "ssm.inner_size", value_heads),
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": max(ratios) if isinstance(ratios, list) else ratios,
        "output_gate_type": "sigmoid",
        "norm_topk_prob": True,
    }


def _ngrams(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of the layer that reads embeddings of n-grams. The class finds the sizes of the vocabularies
    again, which are prime numbers that follow one another."""
    if not metadata.get("ple.layers"):
        return {"ple_layer_ids": []}
    (layer,), table = _ngram_layers(metadata), checkpoint.tensors.get(_TABLE)
    size, heads = metadata.count("ple.ngram_size"), metadata.count("ple.heads_per_ngram")
    vocabularies = metadata.get("ple.head_vocab_sizes")
    if table is None or not isinstance(vocabularies, list) or len(vocabularies) != (size - 1) * heads:
        metadata.fail("ple.head_vocab_sizes", f"{(size - 1) * heads} numbers, and per_layer_token_embd, belong to it.")
    own, ends = metadata.optional_count("ple.eos_token_id"), config.get("eos_token_id") or []
    return {
        "ple_layer_ids": [layer + 1],  # counted from 1
        "ple_embed_dim": table.shape[1] * len(vocabularies),
        "ple_conv_kernel_size": metadata.count("ple.conv_kernel"),
        "ngram_size": size,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": min(vocabularies),
        "make_ngram_vocab_size_divisible_by": table.shape[0],  # the table has padding
        "split_ngram_parts": 1,
        "eos_token_id": list(dict.fromkeys([*([] if own is None else [own]), *ends])),  # n-grams end at the first
    }


def _ngram_layers(metadata: Metadata) -> list[int]:
    layers = metadata.get("ple.layers") or []
    if not isinstance(layers, list) or len(layers) > 1:
        raise UnsupportedModel(
            f"{metadata.file.name} has embeddings of n-grams in several layers: {metadata.architecture}.ple.layers = "
            f"{layers}.",
            "Supported: one layer, as files have one table.",
        )
    return layers


def _ngram_constants(metadata: Metadata) -> Mapping[str, Sequence[int]]:
    return {
        f"blk.{layer}.ple.{name}": metadata.get(f"ple.{name}") or []
        for layer in _ngram_layers(metadata)
        for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
    }


def _value_heads_in_order(config: Fields) -> Mapping[str, Inverse]:
    """Return what undoes the order of value heads: the converter has put the first ones of all key heads first."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * keys * config["linear_key_head_dim"]  # queries and keys, which stay

    def order(size: int, offset: int = 0) -> list[int]:
        each = heads // keys
        places = [(inside * keys + key) * size for key in range(keys) for inside in range(each)]
        return [*range(offset), *(offset + place + row for place in places for row in range(size))]

    size = config["linear_value_head_dim"]
    rows = {"attn_qkv.weight": order(size, before), "attn_gate.weight": order(size)}
    of_heads = order(1)
    rows |= dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"), of_heads)
    return {
        **{name: Inverse(partial(_moved, order=own), moves_rows=True) for name, own in rows.items()},
        "ssm_a": Inverse(lambda stored: (-stored[of_heads]).log()),
        "ssm_conv1d.weight": Inverse(lambda stored: stored[order(size, before)].unsqueeze(1)),
        "ssm_out.weight": Inverse(lambda stored: stored[:, order(size)]),
    }


def _moved(stored: Tensor, order: list[int]) -> Tensor:
    return stored[order]


def _undone_of_qwen4exp(config: Fields) -> Mapping[str, Inverse]:
    norms = (*_NORMS_OF_HEADS, *_HYPER_NORMS, "ple_norm_key.weight", "ple_norm_query.weight", "ple_norm_conv.weight")
    return {
        **_value_heads_in_order(config),
        **dict.fromkeys(norms, _LESS_ONE),
        "ple_conv1d.weight": Inverse(lambda stored: stored.unsqueeze(1)),
        "ffn_gate_inp_shexp.weight": Inverse(lambda stored: stored.reshape(1, -1)),
    }


_HYPER_NORMS = ("hc_attn_norm.weight", "hc_ffn_norm.weight", "output_hc_norm.weight")
_MIX = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_QWEN4EXP = ClassFacts(
    "Qwen4ExpForCausalLM",
    {
        **EXPERTS,
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "hc_count": "hyper_connection.count",
        "hc_lowrank": "hyper_connection.low_rank",
        "indexer_n_heads": "attention.indexer.head_count",
        "indexer_head_dim": "attention.indexer.key_length",
        "indexer_budget": "attention.indexer.top_k",
    },
    _qwen4exp,
    {"model_type": "qwen4_exp_text"},
    layers={
        **_ATTENTION,
        **_EXPERTS,
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        **{name: inside.replace("experts", "expert") for name, inside in _SHARED.items()},
        "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
        **{
            f"hc_{part}_{kind}.weight": f"{module}_hyper_connection.{inside}.weight"
            for part, module in (("attn", "attn"), ("ffn", "mlp"))
            for kind, inside in {**_MIX, "inject": "block_inject_weight"}.items()
        },
        "indexer.q_proj.weight": "self_attn.indexer.index_qk_proj.weight",
        "indexer.k_proj.weight": "self_attn.indexer.index_qk_proj.weight",
        "indexer.q_norm.weight": "self_attn.indexer.q_layernorm.weight",
        "indexer.k_norm.weight": "self_attn.indexer.k_layernorm.weight",
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_beta.weight": "linear_attn.in_proj_b.weight",
        "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d.weight": "linear_attn.conv1d.weight",
        "ssm_norm.weight": "linear_attn.norm.weight",
        "ssm_out.weight": "linear_attn.out_proj.weight",
        "ple_key.weight": "ple.key_proj.weight",
        "ple_value.weight": "ple.value_proj.weight",
        "ple_norm_key.weight": "ple.norm_key.weight",
        "ple_norm_query.weight": "ple.norm_query.weight",
        "ple_norm_conv.weight": "ple.norm_conv.weight",
        "ple_conv1d.weight": "ple.conv1d.weight",
        _TABLE: "ple.ple_embedding.ngram_embedding.weight",
        "ple.layer_multipliers": "ple.ple_embedding.layer_multipliers",
        "ple.head_offsets": "ple.ple_embedding.ngram_heads_offsets",
        "ple.head_vocab_sizes": "ple.ple_embedding.ngram_heads_vocab_sizes",
    },
    others={
        **_OTHERS,
        **{
            f"output_hc_{kind}.weight": f"model.hyper_connection_mixer.{inside}.weight" for kind, inside in _MIX.items()
        },
    },
    undone=_undone_of_qwen4exp,
    moved=lambda metadata: {_TABLE: f"blk.{layer}.{_TABLE}" for layer in _ngram_layers(metadata)},  # noqa: B035
    constants=_ngram_constants,
)


CLASSES: Mapping[str, ClassFacts] = {
    "deepseek4": _DEEPSEEK4,
    "glm5-next": _GLM5_NEXT,
    "hy_v4": _HY_V4,
    "minimax-m3": _MINIMAX_M3,
    "qwen4exp": _QWEN4EXP,
}
"""By `general.architecture`."""
