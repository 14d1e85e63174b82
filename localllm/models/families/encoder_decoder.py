"""Encoder-decoders of text (BART, mBART, Marian, Pegasus, M2M-100, NLLB, T5, Flan-T5, mT5, UMT5), and the decoders of
Whisper and Moonshine.

The encoder reads the prompt, and transformers' code computes it (models/encoders/source.py); the families describe the
decoder. Each of its layers attends to the answer so far, then to the encoder's states, the source.
BART: learned positions whose table starts two rows late; each sum is normed (Lewis et al. 2020, arXiv:1910.13461).
mBART: norms before the parts and a final one, embeddings scaled (Liu et al. 2020, arXiv:2001.08210).
Marian: BART with sinusoids as positions, without a norm of the embeddings (Junczys-Dowmunt et al. 2018).
Pegasus: Marian with mBART's norms (Zhang et al. 2020, arXiv:1912.08777).
M2M-100 and NLLB: mBART with sinusoids, without a norm of the embeddings (Fan et al. 2020, arXiv:2010.11125).
T5: RMSNorm, no biases, unscaled scores with a bias for each bucket of distances, which the first layer holds for all;
the 1.0 checkpoints tie the head and scale its input (Raffel et al. 2020, arXiv:1910.10683). T5 1.1, Flan-T5 and mT5:
gated, with a head of their own. UMT5: each layer has its own bias (Chung et al. 2023, arXiv:2304.09151).
Whisper: mBART with one learned position less, keys without a bias, and a tied head (Radford et al. 2022,
arXiv:2212.04356); models/encoders/whisper.py drives it.
Moonshine: rotary positions of neighbouring dimensions, norms without a bias, a gated feed-forward part whose gate is
stored last (Jeffries et al. 2024, arXiv:2410.15608); models/encoders/moonshine.py drives it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.spec.family import Config, Family, Storage
from localllm.models.spec.fields import NormSpec, renamed, size
from localllm.models.spec.model_spec import SourceSpec

T5_CONTEXT = 2048
"""Tokens of a prompt, and of an answer. T5's distances have no end; its published checkpoints were trained with 512."""


_WISHES = ("num_beams", "length_penalty", "no_repeat_ngram_size", "min_length")
"""Fields of generation_config.json that other checkpoints seldom have."""


def source_of(config: Config, generation: Config, max_length: int) -> SourceSpec:
    """Return the encoder's limits. Raises `CorruptModel` if no token starts an answer."""
    start, first = (_token(generation, config, f"{name}_token_id") for name in ("decoder_start", "forced_bos"))
    if start is None:
        start = _token(generation, config, "bos_token_id")
    if start is None:
        what = "The checkpoint does not say which token an answer begins with."
        raise CorruptModel(what, "Neither of its files has decoder_start_token_id.")
    asked = tuple(f"{name}={generation[name]}" for name in _WISHES if generation.get(name) not in (None, 0, 1))
    starts, end = (start,) if first is None else (start, first), _token(generation, config, "forced_eos_token_id")
    return SourceSpec(max_length, starts, forced_end=end, not_used=asked)


def _token(generation: Config, config: Config, name: str) -> int | None:
    found = generation.get(name) if generation.get(name) is not None else config.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


_BART_SIZES = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
}
_BART_DEFAULTS = {"scale_embedding": False, "activation_function": "gelu", "tie_word_embeddings": True}
_BART_STORAGE = Storage(
    renames=(
        (r"^lm_head\.bias", "final_logits_bias"),
        (r"^model\.norm", "model.decoder.layer_norm"),
        (r"^model\.embed_norm", "model.decoder.layernorm_embedding"),
        (r"^model\.embed_tokens", "model.shared"),
        (r"^model\.(layers|embed_positions)", r"model.decoder.\1"),
        ("input_layernorm", "self_attn_layer_norm"),
        ("cross_layernorm", "encoder_attn_layer_norm"),
        ("post_attention_layernorm", "final_layer_norm"),
        ("cross_attn", "encoder_attn"),
        ("o_proj", "out_proj"),
        (r"mlp\.up_proj", "fc1"),
        (r"mlp\.down_proj", "fc2"),
    ),
    alternatives=((r"^model\.shared", "model.decoder.embed_tokens"),),
    ignored=(
        r"model\.encoder\..*", r"model\.(shared|decoder\.embed_tokens)\.weight",
        r"model\.decoder\.embed_positions\.weights?",
    ),
)  # fmt: skip


def _bart_names(config: Config) -> Config:
    named = renamed({**_BART_DEFAULTS, **config}, _BART_SIZES)
    if named.get("share_encoder_decoder_embeddings") is False:
        why = "Its encoder and its decoder have vocabularies of their own."
        raise UnsupportedModel("This Marian model is not supported.", why)
    return named


def _bart_differences(config: Config) -> dict[str, Any]:
    return {
        "topology": "sum_norm",
        "norm": NormSpec(1e-5, "layer", bias=True),
        "positions": "learned",
        "position_offset": 2,
        "embedding_norm": "weighted",
        "embedding_scale": size(config, "hidden_size") ** 0.5 if config["scale_embedding"] else None,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "lm_head_bias": True,
    }


def _marian_differences(config: Config) -> dict[str, Any]:
    return {**_bart_differences(config), "positions": "sinusoids", "position_offset": 0, "embedding_norm": None}


def _mbart_differences(config: Config) -> dict[str, Any]:
    return {**_bart_differences(config), "topology": "pre_norm"}


def _m2m_differences(config: Config) -> dict[str, Any]:
    return {
        **_bart_differences(config),
        "topology": "pre_norm",
        "positions": "sinusoids_to_end",
        "position_offset": 1 + config.get("pad_token_id", 1),  # padding has the position before the first one
        "embedding_norm": None,
        "lm_head_bias": False,
    }


def _bart_like(name: str, architecture: str, differences: Any) -> Family:
    return Family(name, (architecture,), differences, {}, _BART_STORAGE, _bart_names)


def _pegasus_differences(config: Config) -> dict[str, Any]:
    return {**_marian_differences(config), "topology": "pre_norm"}


BART = _bart_like("BART", "BartForConditionalGeneration", _bart_differences)
MBART = _bart_like("mBART", "MBartForConditionalGeneration", _mbart_differences)
MARIAN = _bart_like("Marian", "MarianMTModel", _marian_differences)
PEGASUS = _bart_like("Pegasus", "PegasusForConditionalGeneration", _pegasus_differences)
M2M = _bart_like("M2M-100, NLLB", "M2M100ForConditionalGeneration", _m2m_differences)

_T5_SIZES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_T5_DEFAULTS = {"feed_forward_proj": "relu", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-6}


def _t5_names(config: Config) -> Config:
    named = renamed({**_T5_DEFAULTS, **config}, _T5_SIZES)
    layers = named.get("num_decoder_layers")
    act = str(named["feed_forward_proj"])
    return {
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        **named,
        "tie_word_embeddings": True,  # a checkpoint that stores a head of its own is read with it (loader.py)
        "scale_decoder_outputs": named.get("scale_decoder_outputs", named["tie_word_embeddings"]),
        "num_hidden_layers": named.get("num_layers") if layers is None else layers,
        "max_position_embeddings": T5_CONTEXT,
        "hidden_act": "gelu_new" if act == "gated-gelu" else act.removeprefix("gated-"),
    }


def _t5_differences(config: Config) -> dict[str, Any]:
    buckets = size(config, "relative_attention_num_buckets"), size(config, "relative_attention_max_distance")
    return {
        "positions": "buckets",
        "position_buckets": buckets,
        "attention_scale": 1.0,
        "mlp_gated": str(config["feed_forward_proj"]).startswith("gated-"),
        "logits_multiplier": size(config, "hidden_size") ** -0.5 if config["scale_decoder_outputs"] else None,
    }


_T5_STORAGE = Storage(
    renames=(
        (r"^model\.norm", "decoder.final_layer_norm"),
        (r"^model\.embed_tokens", "shared"),
        (r"^model\.layers\.(\d+)\.input_layernorm", r"decoder.block.\1.layer.0.layer_norm"),
        (r"^model\.layers\.(\d+)\.cross_layernorm", r"decoder.block.\1.layer.1.layer_norm"),
        (r"^model\.layers\.(\d+)\.post_attention_layernorm", r"decoder.block.\1.layer.2.layer_norm"),
        (r"^model\.layers\.(\d+)\.self_attn\.", r"decoder.block.\1.layer.0.SelfAttention."),
        (r"^model\.layers\.(\d+)\.cross_attn\.", r"decoder.block.\1.layer.1.EncDecAttention."),
        (r"^model\.layers\.(\d+)\.mlp\.", r"decoder.block.\1.layer.2.DenseReluDense."),
        (r"Attention\.([qkvo])_proj", r"Attention.\1"),
        ("gate_proj", "wi_0"),
        ("up_proj", "wi"),
        ("down_proj", "wo"),
    ),
    alternatives=((r"\.wi\.", ".wi_1."), (r"^shared", "decoder.embed_tokens")),
    ignored=(
        r"encoder\..*", r"(shared|decoder\.embed_tokens)\.weight",
        r"decoder\..*\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)  # fmt: skip
T5 = Family("T5, Flan-T5", ("T5ForConditionalGeneration",), _t5_differences, {}, _T5_STORAGE, _t5_names)
MT5 = Family(
    "mT5", ("MT5ForConditionalGeneration",), _t5_differences, {}, _T5_STORAGE,
    lambda config: _t5_names({"feed_forward_proj": "gated-gelu", **config, "scale_decoder_outputs": False}),
)  # fmt: skip
UMT5 = replace(
    T5, name="UMT5", architectures=("UMT5ForConditionalGeneration",),
    common_names=lambda config: _t5_names({"feed_forward_proj": "gated-gelu", **config}),
)  # fmt: skip

_WHISPER_NAMES = {**_BART_SIZES, "max_target_positions": "max_position_embeddings"}
_WHISPER_STORAGE = replace(
    _BART_STORAGE,
    renames=(
        (r"^lm_head", "proj_out"),
        (r"^model\.embed_tokens", "model.decoder.embed_tokens"),
        *_BART_STORAGE.renames,
    ),
    alternatives=(),
    ignored=(r"model\.encoder\..*", r"proj_out\.weight"),
    without_bias=("k_proj",),
)
WHISPER = Family(
    "Whisper", ("WhisperForConditionalGeneration",),
    lambda config: {
        **_mbart_differences(config), "position_offset": 0, "embedding_norm": None, "lm_head_bias": False
    },
    {}, _WHISPER_STORAGE, lambda config: renamed({**_BART_DEFAULTS, **config}, _WHISPER_NAMES),
    note="it transcribes",
)  # fmt: skip
_MOONSHINE_SIZES = {
    "decoder_num_hidden_layers": "num_hidden_layers",
    "decoder_num_attention_heads": "num_attention_heads",
    "decoder_num_key_value_heads": "num_key_value_heads",
    "decoder_hidden_act": "hidden_act",
}
_MOONSHINE_DEFAULTS = {"tie_word_embeddings": True, "partial_rotary_factor": 0.9, "max_position_embeddings": 512}
_STREAMING_DEFAULTS = {"tie_word_embeddings": False, "partial_rotary_factor": 0.8, "max_position_embeddings": 4096}
_MOONSHINE_STORAGE = Storage(
    renames=(
        (r"^lm_head", "proj_out"),
        (r"^model\.(layers|norm|embed_tokens)", r"model.decoder.\1"),
        (r"cross_layernorm", "CROSS"),
        (r"post_attention_layernorm", "final_layernorm"),
        (r"CROSS", "post_attention_layernorm"),
        (r"cross_attn", "encoder_attn"),
        (r"mlp\.down_proj", "mlp.fc2"),
    ),
    fused_gate_up="fc1",
    gate_is_last=True,
    ignored=(r"model\.encoder\..*", r"proj_out\.weight", r"model\.decoder\.(pos_emb|proj)\.weight"),
)


def _moonshine_names(defaults: Config, config: Config) -> Config:
    named = renamed({**defaults, **config}, _MOONSHINE_SIZES)
    heads, kv_heads = named.get("num_attention_heads"), named.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        why = f"Its {heads} heads share {kv_heads} keys; supported: each head has its own."
        raise UnsupportedModel("This Moonshine model is not supported.", why)
    return named


def _moonshine_differences(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {
        "norm": NormSpec(1e-5, "layer", bias=False), "rope_interleaved": True, "attention_bias": bias, "mlp_bias": True,
    }  # fmt: skip


MOONSHINE = Family(
    "Moonshine", ("MoonshineForConditionalGeneration",), _moonshine_differences, {}, _MOONSHINE_STORAGE,
    partial(_moonshine_names, _MOONSHINE_DEFAULTS), note="it transcribes",
)  # fmt: skip
MOONSHINE_STREAMING = replace(
    MOONSHINE, name="Moonshine Streaming", architectures=("MoonshineStreamingForConditionalGeneration",),
    common_names=partial(_moonshine_names, _STREAMING_DEFAULTS),
)  # fmt: skip
ENCODER_DECODERS = (
    BART, MBART, MARIAN, PEGASUS, M2M, T5, MT5, UMT5, WHISPER, MOONSHINE, MOONSHINE_STREAMING
)  # fmt: skip
