"""The config.json that a GGUF file's metadata describes, with transformers' field names, for spec/.

Each number's type is checked here; whether the numbers fit each other is checked as for any config.
Does not know: tensors' names, block types.
"""

from __future__ import annotations

import re
from collections import Counter
from statistics import NormalDist

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.formats.checkpoint import FLOATS
from localllm.models.formats.gguf.header import Header, Strings, plain
from localllm.models.formats.gguf.hybrids import HYBRIDS
from localllm.models.formats.gguf.mixtures import MIXTURES
from localllm.models.spec.gguf import Architecture, Config, GGUFTensors, Metadata, has, layer_types

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
"""Names by general.file_type: the quantisation that was requested when the file was made."""
ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "</s>", "<eos>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>", "<turn|>", "<|tool_response>",
))  # fmt: skip
"""Tokens that always end an answer: metadata names one, but chat models have two or three."""
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_VISIBLE_ENDS = frozenset(("<|tool_response>",))
"""Gemma 4's, stored as user-defined tokens; the others are control tokens."""


def config_of_header(header: Header, checkpoint: GGUFTensors) -> Config:
    """Return the config. header: of the first part. Raises `UnsupportedModel`, `CorruptModel`."""
    metadata = Metadata(header)
    if metadata.architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.file.name} is a GGUF file of {metadata.architecture!r}, which is not supported.",
            f"Supported in GGUF: {', '.join(sorted(_ARCHITECTURES))}.",
            "Use the model's safetensors repository: more architectures are supported there.",
        )
    architecture = _ARCHITECTURES[metadata.architecture]
    metadata.varying = architecture.varying
    config = _common(metadata, checkpoint)
    config |= {name: metadata.get(key) for name, key in architecture.fields.items() if metadata.get(key) is not None}
    config |= architecture.always
    config |= architecture.more(metadata, checkpoint, config)
    config.setdefault("architectures", [architecture.name])
    config["quantization_config"] = _quantization(metadata, checkpoint)
    config["dtype"] = _dtype(config, checkpoint)
    return config


def _common(metadata: Metadata, checkpoint: GGUFTensors) -> Config:
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    config: Config = {
        "vocab_size": _vocab_size(metadata, checkpoint),
        "hidden_size": hidden,
        "num_hidden_layers": metadata.count("block_count") - (metadata.optional_count("nextn_predict_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.optional_count("attention.head_count_kv") or heads,
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
        "eos_token_id": _end_ids(metadata) or None,
        "bos_token_id": metadata.token_id("bos"),
    }
    for name, key in (
        ("intermediate_size", "feed_forward_length"),
        ("head_dim", "attention.key_length"),
        ("sliding_window", "attention.sliding_window"),
    ):
        config[name] = metadata.optional_count(key) or None
    every = metadata.get("attention.sliding_window_pattern")
    config["sliding_window_pattern"] = every if type(every) is int else None  # a list is the architecture's matter
    for name, key in (
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("rope_theta", "rope.freq_base"),
    ):
        config[name] = metadata.number(key)
    if config["head_dim"] is None and hidden % heads == 0:
        config["head_dim"] = hidden // heads  # overrides the family's default
    config = {name: value for name, value in config.items() if value is not None}
    return config | _rope(metadata, checkpoint, config)


def _vocab_size(metadata: Metadata, checkpoint: GGUFTensors) -> int:
    table = checkpoint.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CorruptModel(f"{metadata.file.name} has no matrix token_embd.weight.")
    return table.shape[0]


def _end_ids(metadata: Metadata) -> list[int]:
    """Return the end tokens that the metadata names, then special tokens that are known to end an answer."""
    named = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    tokens, stored = (metadata.values.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    types = None if stored is None else plain(stored)
    found: dict[str, int] = {}
    if isinstance(tokens, Strings) and isinstance(types, list):
        ends = {_CONTROL: ENDS, _USER_DEFINED: _VISIBLE_ENDS}
        special = [(index, ends[int(kind)]) for index, kind in enumerate(types[: len(tokens)]) if kind in ends]
        found = {text: index for index, known in special if (text := tokens[index]) in known}
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)  # here it ends a message, not the answer
    return list(dict.fromkeys([token_id for token_id in (*named, *found.values()) if token_id is not None]))


# -- rotary embedding


def _rope(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    head_dim, rotary = config.get("head_dim"), metadata.optional_count("rope.dimension_count")
    rope: Config = {"partial_rotary_factor": rotary / head_dim} if head_dim and rotary else {}
    scaling = _scaling(metadata, checkpoint, config)
    return rope | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config | None:
    kind, factor = metadata.get("rope.scaling.type"), metadata.number("rope.scaling.factor")
    original = metadata.optional_count("rope.scaling.original_context_length")
    short, long = (checkpoint.rope_factors(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
    factors = checkpoint.rope_factors("rope_freqs.weight")
    if factors is not None:  # Llama 3's scaling, precomputed per dimension
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    if kind == "linear" and factor not in (None, 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata, factor, original)
    if kind not in (None, "none", "linear", "longrope"):
        raise UnsupportedModel(f"{metadata.file.name} scales its rotary embedding by {kind!r}, which is not supported.")
    return None


def _yarn(metadata: Metadata, factor: float | None, original: int | None) -> Config:
    scaling: Config = {"rope_type": "yarn"}
    named = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow"),
    }
    log_multiplier = metadata.number("rope.scaling.yarn_log_multiplier")
    if log_multiplier:  # these models have one value for both; some files store a tenth of it
        times = 1 if metadata.architecture == "mistral3" else 10
        named["mscale"] = named["mscale_all_dim"] = round(log_multiplier * times, 6)
    if metadata.architecture == "gpt-oss":
        scaling["truncate"] = False
    return scaling | {name: value for name, value in named.items() if value is not None}


# -- quantisation


def _quantization(metadata: Metadata, checkpoint: GGUFTensors) -> Config | None:
    """Return the quantization_config; None if every matrix is unquantised."""
    types = Counter(info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1)
    if not types.keys() - FLOATS.keys():
        return None
    return {"quant_method": "gguf", "label": _label(metadata, types), "types": dict(types.most_common())}


def _label(metadata: Metadata, types: Counter[str]) -> str:
    stated = metadata.values.get("general.file_type")
    name = FILE_TYPES.get(stated) if type(stated) is int else None
    return name or types.most_common(1)[0][0]


def _dtype(config: Config, checkpoint: GGUFTensors) -> str:
    """Return the type to compute in. Block types imply none: bfloat16 has the range for any scales."""
    types = Counter(info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1)
    most = types.most_common(1)[0][0] if types else "F32"
    overflows = re.match("Gemma", config["architectures"][0])  # activations beyond float16's 65,504
    plain = {"F32": "float32", "F16": "bfloat16" if overflows else "float16"}
    return plain.get(most, "bfloat16")


# -- architectures


def _llama(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the fields of Llama, Mistral, Mixtral and models that compute alike: files do not distinguish them."""
    bias, out_bias = has(checkpoint, "attn_q.bias"), has(checkpoint, "attn_output.bias")
    if bias != out_bias:
        raise UnsupportedModel(f"{metadata.file.name} has biases on some of q, k, v and output only.")
    if metadata.optional_count("expert_count"):
        return {"architectures": ["MixtralForCausalLM"]}
    return {"attention_bias": bias, "mlp_bias": has(checkpoint, "ffn_up.bias")}


def _granite_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    shared = checkpoint.tensors.get("blk.0.ffn_gate_shexp.weight")
    return {} if shared is None else {"shared_intermediate_size": shared.shape[0]}


def _baichuan(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return the 13B models' fields: they have ALiBi, which a missing field of their config.json implies."""
    return {"model_max_length": config.pop("max_position_embeddings")} if config["num_hidden_layers"] == 40 else {}


def _minicpm(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return MiniCPM's fields as Granite's, which computes alike; the first files omit the multipliers of its 2B."""
    scales = {
        "embedding_multiplier": metadata.number("embedding_scale") or 12.0,
        "residual_multiplier": metadata.number("residual_scale") or 1.4 / config["num_hidden_layers"] ** 0.5,
        "logits_scaling": metadata.number("logit_scale") or config["hidden_size"] / 256,
    }
    return {**_llama(metadata, checkpoint, config), **scales, "attention_multiplier": config["head_dim"] ** -0.5}


def _mistral3(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    scaling = {"llama_4_scaling_beta": metadata.number("attention.temperature_scale"), **config.pop("rope_scaling", {})}
    return {"sliding_window": None, "rope_parameters": {"rope_theta": config.get("rope_theta", 10_000.0), **scaling}}


def _qwen1(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Qwen 1's fields as Qwen2's, which computes alike; Qwen 1 counts gate and up together."""
    return {"intermediate_size": config["intermediate_size"] // 2}


def _mpt(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    clip, most = metadata.number("attention.clamp_kqv"), metadata.number("attention.max_alibi_bias")
    return {
        "attn_config": {"clip_qkv": clip or None, "alibi": bool(most), "alibi_bias_max": most},
        "no_bias": not any(name.endswith(".bias") for name in checkpoint.tensors),
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
    }


def _ernie(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {"use_bias": has(checkpoint, "attn_q.bias")}


def _gemma(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return query_pre_attn_scalar, which files omit: head_dim, or hidden_size / heads for two models."""
    is_27b = (metadata.architecture, config["num_hidden_layers"]) in {("gemma2", 46), ("gemma3", 62)}
    head_dim = config.setdefault("head_dim", 256)
    scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else head_dim
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma4(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Gemma 4's fields: sizes of heads are stated for full layers and, as *_swa, for windowed ones."""
    layers, types = config["num_hidden_layers"], layer_types(metadata)
    if len(types) != layers:
        metadata.fail("attention.sliding_window_pattern", f"It has {len(types)} values for {layers} layers.")
    heads = metadata.counts("attention.head_count_kv", layers)
    by_type = {kind: {count for count, other in zip(heads, types, strict=True) if other == kind} for kind in set(types)}
    if any(len(counts) > 1 for counts in by_type.values()):
        raise UnsupportedModel(f"{metadata.file.name} has different numbers of KV heads in layers of one kind.")
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    shape = {"head_dim": metadata.count("attention.key_length"), "num_key_value_heads": heads[-1]}
    windowed_heads = next(iter(by_type.get("sliding_attention", {heads[0]})))
    widths = metadata.counts("feed_forward_length", layers)
    for name in ("head_dim", "partial_rotary_factor", "rope_scaling", "rope_theta"):
        config.pop(name, None)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "head_dim": metadata.count("attention.key_length_swa"),
        "num_key_value_heads": windowed_heads,
        "per_layer_config": {str(layer): shape for layer in full},
        "rope_parameters": _gemma4_ropes(metadata, checkpoint, shape["head_dim"]),
        "attention_k_eq_v": bool(full) and not has(checkpoint, "attn_v.weight", full[0]),
        "num_kv_shared_layers": metadata.optional_count("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": len(set(widths)) > 1,
        **_per_layer_embedding(metadata, checkpoint),
        **({"enable_moe_block": True} if config.get("num_experts") else {}),
    }


def _gemma3n(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return Gemma 3n's fields. Files state the cut-off of a sparse gate in standard deviations, not as a share."""
    layers, cuts = config["num_hidden_layers"], metadata.get("activation_sparsity_scale")
    if not isinstance(cuts, list) or len(cuts) != layers or not all(isinstance(cut, int | float) for cut in cuts):
        metadata.fail("activation_sparsity_scale", f"It is {cuts!r}, not a number for each of {layers} layers.")
    rank = checkpoint.tensors.get("blk.0.laurel_l.weight")
    if rank is None:
        raise CorruptModel(f"{metadata.file.name} has no blk.0.laurel_l.weight.")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types(metadata),
        "intermediate_size": metadata.counts("feed_forward_length", layers),
        "activation_sparsity_pattern": [0.0 if cut < -10 else NormalDist().cdf(cut) for cut in cuts],
        "num_kv_shared_layers": metadata.optional_count("attention.shared_kv_layers") or 0,
        "altup_active_idx": metadata.optional_count("altup.active_idx") or 0,
        "altup_num_inputs": metadata.count("altup.num_inputs"),
        "altup_correct_scale": has(checkpoint, "altup_correct_scale.weight"),
        "laurel_rank": rank.shape[0],
        "rope_local_base_freq": metadata.number("rope.freq_base_swa") or 10_000.0,
        **_per_layer_embedding(metadata, checkpoint),
    }


def _gemma4_ropes(metadata: Metadata, checkpoint: GGUFTensors, head_dim: int) -> Config:
    """Return the ropes of both kinds of layers. Which frequencies turn is a tensor of divisors: 1, or 1e30 for none."""
    divisors = checkpoint.rope_factors("rope_freqs.weight")
    turning = head_dim // 8 if divisors is None else divisors.count(1.0)  # a quarter, as in all released models
    if divisors is not None and (len(divisors) != head_dim // 2 or any(each < 1e20 for each in divisors[turning:])):
        raise UnsupportedModel(f"{metadata.file.name} scales single frequencies of its rotary embedding.")
    local_dim = metadata.count("attention.key_length_swa")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turning / head_dim,
            "rope_theta": metadata.number("rope.freq_base") or 1_000_000.0,
        },
        "sliding_attention": {
            "rope_type": "default",
            "partial_rotary_factor": (metadata.optional_count("rope.dimension_count_swa") or local_dim) / local_dim,
            "rope_theta": metadata.number("rope.freq_base_swa") or 10_000.0,
        },
    }


def _per_layer_embedding(metadata: Metadata, checkpoint: GGUFTensors) -> Config:
    table = checkpoint.tensors.get("per_layer_token_embd.weight")
    size = metadata.optional_count("embedding_length_per_layer_input") or 0
    if not size or table is None:
        return {"hidden_size_per_layer_input": 0}
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


def _olmo2(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    if config.get("sliding_window") is None:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "layer_types": layer_types(metadata)}


def _exaone4(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    if config.get("sliding_window") is None:
        return {"sliding_window": None}
    return {"layer_types": layer_types(metadata)}


def _stablelm(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {
        "use_qkv_bias": has(checkpoint, "attn_q.bias"),
        "qk_layernorm": has(checkpoint, "attn_q_norm.weight"),
        "use_parallel_residual": not has(checkpoint, "ffn_norm.weight"),  # the key for it is set in all files
    }


def _falcon(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    two_norms = has(checkpoint, "attn_norm_2.weight")
    return {
        "new_decoder_architecture": two_norms,
        "multi_query": not two_norms,
        "num_kv_heads": config["num_key_value_heads"],
        "bias": has(checkpoint, "attn_qkv.bias"),
    }


def _starcoder2(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {"use_bias": has(checkpoint, "attn_q.bias")}


def _seed_oss(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {
        "attention_bias": has(checkpoint, "attn_q.bias"),
        "attention_out_bias": has(checkpoint, "attn_output.bias"),
        "mlp_bias": has(checkpoint, "ffn_up.bias"),
    }


def _biases(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {"attention_bias": has(checkpoint, "attn_q.bias") or has(checkpoint, "attn_qkv.bias")}


def _glm4(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    """Return GLM-4's fields. In files of models that also see, dimensions that rotate together are moved apart."""
    sees = metadata.get("rope.dimension_sections") is not None
    return {**_biases(metadata, checkpoint, config), "rope_interleave": not sees}


def _cohere(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {"use_qk_norm": has(checkpoint, "attn_q_norm.weight")}


def _qwen_moe(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
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


_LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        _LOCAL_EXPERTS,
        _llama,
    ),
    "baichuan": Architecture("BaichuanForCausalLM", more=_baichuan),
    "internlm2": Architecture("LlamaForCausalLM", more=_llama),
    "minicpm": Architecture("GraniteForCausalLM", more=_minicpm),
    "arcee": Architecture("ArceeForCausalLM", more=_llama),
    "seed_oss": Architecture("SeedOssForCausalLM", more=_seed_oss),
    "mistral3": Architecture("Ministral3ForCausalLM", more=_mistral3),
    "qwen": Architecture("Qwen2ForCausalLM", more=_qwen1),
    "exaone": Architecture("ExaoneForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"}),
    "exaone4": Architecture("Exaone4ForCausalLM", more=_exaone4),
    "nemotron": Architecture("NemotronForCausalLM", {"norm_eps": "attention.layer_norm_epsilon"}, _biases),
    "mpt": Architecture("MPTForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"}, _mpt),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", more=_ernie),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM", more=_gemma),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        _gemma,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {"rope_local_base_freq": "rope.freq_base_swa", "final_logit_softcapping": "final_logit_softcapping"},
        _gemma,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        {"final_logit_softcapping": "final_logit_softcapping"},
        _gemma3n,
        varying=("feed_forward_length",),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        _gemma4,
        varying=("attention.head_count_kv", "feed_forward_length"),
    ),
    "phi2": Architecture("PhiForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM"),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon", "n_positions": "context_length"}
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {"norm_epsilon": "attention.layer_norm_epsilon"}, _starcoder2),
    "stablelm": Architecture("StableLmForCausalLM", more=_stablelm),
    "granite": Architecture("GraniteForCausalLM", _MULTIPLIERS, _llama),
    "granitemoe": Architecture("GraniteMoeForCausalLM", {**_MULTIPLIERS, **_LOCAL_EXPERTS}, _granite_moe),
    "olmo": Architecture("OlmoForCausalLM", {"clip_qkv": "attention.clamp_kqv"}),
    "olmo2": Architecture("Olmo2ForCausalLM", more=_olmo2),
    "command-r": Architecture("CohereForCausalLM", {"logit_scale": "logit_scale"}, _cohere),
    "cohere2": Architecture("Cohere2ForCausalLM", {"logit_scale": "logit_scale"}),
    "chatglm": Architecture("GlmForCausalLM", more=_biases),
    "glm4": Architecture("Glm4ForCausalLM", more=_glm4),
    "gptneox": Architecture("GPTNeoXForCausalLM", {"use_parallel_residual": "use_parallel_residual"}, _biases),
    "gpt2": Architecture(
        "GPT2LMHeadModel", {"layer_norm_epsilon": "attention.layer_norm_epsilon", "n_positions": "context_length"}
    ),
    "falcon": Architecture("FalconForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"}, _falcon),
    "bloom": Architecture("BloomForCausalLM", {"layer_norm_epsilon": "attention.layer_norm_epsilon"}),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _EXPERTS, _qwen_moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _EXPERTS, _qwen_moe, {"norm_topk_prob": True}),
    "olmoe": Architecture("OlmoeForCausalLM", _EXPERTS),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {**_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
        _biases,
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),  # these hold only the text part
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _EXPERTS, _qwen_moe, {"norm_topk_prob": True}),
    **MIXTURES,
    **HYBRIDS,
}
"""By general.architecture."""
