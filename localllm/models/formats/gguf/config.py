"""The config.json that a GGUF file's metadata describes, with transformers' field names, for spec/.

Each number's type is checked here; whether the numbers fit each other is checked as for any config.
Does not know: tensors' names, block types.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NoReturn

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families.registry import GGUF_OF
from localllm.models.formats.checkpoint import FLOATS
from localllm.models.formats.gguf.classes import CLASSES
from localllm.models.formats.gguf.header import GGUFHeader, Strings, plain
from localllm.models.spec.gguf import Fields, GGUFTensors, Metadata

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
OF_CLASSES = {
    "jamba": "JambaForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
}
"""general.architecture of families that only a class of transformers computes, and that are not in `CLASSES` -> the
class in their config.json. In 16 bits their weights are several times as large as such a file."""
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_VISIBLE_ENDS = frozenset(("<|tool_response>",))
"""Gemma 4's, stored as user-defined tokens; the others are control tokens."""


def config_of_header(header: GGUFHeader, checkpoint: GGUFTensors) -> Fields:
    """Return the config. header: of the first part. Raises `UnsupportedModel`, `CorruptModel`."""
    metadata = Metadata(header.file, header.metadata)
    architecture = GGUF_OF.get(metadata.architecture) or CLASSES.get(metadata.architecture)
    if architecture is None:
        _refuse(metadata)
    metadata.varying = architecture.varying
    config = _common(metadata, checkpoint)
    config |= {name: metadata.get(key) for name, key in architecture.fields.items() if metadata.get(key) is not None}
    config |= architecture.always
    config |= architecture.more(metadata, checkpoint, config)
    config.setdefault("architectures", [architecture.name])
    config["quantization_config"] = _quantization(metadata, checkpoint)
    config["dtype"] = _dtype(config, checkpoint)
    return config


def _refuse(metadata: Metadata) -> NoReturn:
    """Refuse an architecture by name, and name the repository that the file was made from."""
    name, source = f"{metadata.file.name} is a GGUF file of {metadata.architecture!r}", _source_of(metadata)
    hint = f"Use {source}" if source else "Use the model's safetensors repository (its name without -GGUF)"
    if (made_for := OF_CLASSES.get(metadata.architecture)) is not None:
        raise UnsupportedModel(
            f"{name}, a family that is read from safetensors.",
            f"Only transformers' {made_for} computes it, from weights of 16 bits, several times as large.",
            f"{hint}, with {made_for} in its config.json.",
        )
    raise UnsupportedModel(
        f"{name}, which is not supported.",
        f"Supported in GGUF: {', '.join(sorted((*GGUF_OF, *CLASSES)))}.",
        f"{hint}: more architectures are supported there.",
    )


def _source_of(metadata: Metadata) -> str:
    """Return the repository on the Hugging Face hub that the file was made from; "": it does not say."""
    keys = ("general.source.huggingface.repository", "general.source.repo_url", "general.base_model.0.repo_url")
    for key in keys:
        path = str(metadata.values.get(key) or "").removeprefix("https://huggingface.co/")
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            return path
    return ""


def _common(metadata: Metadata, checkpoint: GGUFTensors) -> Fields:
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    config: Fields = {
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


def _rope(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    head_dim, rotary = config.get("head_dim"), metadata.optional_count("rope.dimension_count")
    rope: Fields = {"partial_rotary_factor": rotary / head_dim} if head_dim and rotary else {}
    scaling = _scaling(metadata, checkpoint, config)
    return rope | ({"rope_scaling": scaling} if scaling else {})


def _scaling(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields | None:
    kind, factor = metadata.get("rope.scaling.type"), metadata.number("rope.scaling.factor")
    original = metadata.optional_count("rope.scaling.original_context_length")
    short, long = (checkpoint.values(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
    factors = checkpoint.values("rope_freqs.weight")
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


def _yarn(metadata: Metadata, factor: float | None, original: int | None) -> Fields:
    scaling: Fields = {"rope_type": "yarn"}
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


def _quantization(metadata: Metadata, checkpoint: GGUFTensors) -> Fields | None:
    """Return the quantization_config; None if every matrix is unquantised."""
    types = Counter(info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1)
    if not types.keys() - FLOATS.keys():
        return None
    stated = metadata.values.get("general.file_type")
    name = FILE_TYPES.get(stated) if type(stated) is int else None
    return {"quant_method": "gguf", "label": name or types.most_common(1)[0][0], "types": dict(types.most_common())}


def _dtype(config: Fields, checkpoint: GGUFTensors) -> str:
    """Return the type to compute in. Block types imply none: bfloat16 has the range for any scales."""
    types = Counter(info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1)
    most = types.most_common(1)[0][0] if types else "F32"
    overflows = re.match("Gemma", config["architectures"][0])  # activations beyond float16's 65,504
    plain = {"F32": "float32", "F16": "bfloat16" if overflows else "float16"}
    return plain.get(most, "bfloat16")
