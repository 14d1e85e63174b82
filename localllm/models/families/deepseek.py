"""DeepSeek-V2 to V3.2, models trained with V3's code, A.X K2, Youtu-LLM, and dots.llm1.

DeepSeek-V2 and V2-Lite, V3, Moonlight, GLM-4.7-Flash: latent attention, with one cached key and value for all heads,
and many small experts beside shared ones; the first layers are dense (arXiv:2405.04434). V3 scores experts by sigmoids
with a correction for the choice, in groups (arXiv:2412.19437).
DeepSeek-V3.2 and GLM-5 add an indexer that chooses the index_topk earlier tokens to attend to (arXiv:2512.02556). Up to
index_topk tokens it chooses all of them, and attention is V3's: there the context of a GGUF file without the indexer
ends. The indexer's kernels have not run on a GPU yet. In GLM-5.2 most layers attend to what an earlier layer has chosen
(arXiv:2603.12201).
A.X K2 is DeepSeek-V3.2 with a gate on what attention returns, made with the queries from their latent before and after
its norm, and low-rank gates on the norms before attention and before experts (SK Telecom, 2026).
Youtu-LLM 2B: V3's latent attention with a dense feed-forward part in every layer (arXiv:2512.24618).
dots.llm1 (142B-A14B): the attention of Qwen3 with the mixture of DeepSeek-V3 (arXiv:2506.05767).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.spec.family import DEEPSEEK_MTP, Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import (
    EXPERT_GROUPS,
    FINE_EXPERTS,
    SIGMOID,
    SOFTMAX,
    Fields,
    GGUFFacts,
    GGUFTensors,
    Metadata,
    expert_scoring,
    has,
    mixed_layers,
    sigmoid_experts,
)
from localllm.models.spec.latent import IndexSpec, LatentSpec, latent
from localllm.models.spec.mixture import by_method, grouping, layers_after, mixture, sigmoid_mixture, typed_layers
from localllm.models.spec.rope import RopeSpec, context_length, read_ropes
from localllm.units import format_count

STORAGE = Storage(renames=((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),), more_layers=True)


def _v2(config: Config) -> dict[str, Any]:
    if config.get("norm_topk_prob"):
        raise UnsupportedModel("norm_topk_prob is not supported for DeepSeek-V2.", "No released checkpoint uses it.")
    groups = by_method(config, {"greedy": {}, "group_limited_greedy": grouping(config)})
    return {**latent_attention(config, interleaved=True), "mixture": fine_experts(config, renormalize=False, **groups)}


def _v3(config: Config) -> dict[str, Any]:
    routing = {"scoring": "sigmoid", "correction_bias": True, "renormalize": bool(config["norm_topk_prob"])}
    return {
        **latent_attention(config, interleaved=bool(config["rope_interleave"])),
        "mixture": fine_experts(config, **routing, **grouping(config)),
    }


def _indexed(config: Config, *, interleaved: bool) -> dict[str, Any]:
    """Return V3's fields and the indexer's; without an indexer the context up to which it would choose all tokens.
    interleaved: neighbouring dimensions rotate together in the indexer, too."""
    differences, most = _v3({**config, "rope_interleave": True}), size(config, "index_topk")
    sizes: LatentSpec = differences["latent"]
    if config["index_n_heads"]:
        if sizes.q_latent_size is None:
            raise CorruptModel("config.json has an indexer and no q_lora_rank.", "The indexer reads that latent.")
        heads, head_dim = size(config, "index_n_heads"), size(config, "index_head_dim")
        index = IndexSpec(most, heads, head_dim, interleaved, _with_indexer(config))
        return {**differences, "latent": replace(sizes, index=index)}
    if context_length(config, differences["rope"]) <= most:
        return differences
    limit = (
        f"Beyond {format_count(most)} tokens this model attends only to those that its indexer chooses, and the file "
        "does not contain the indexer."
    )
    return {**differences, "max_position": most, "context_limit": limit}


def _axk2(config: Config) -> dict[str, Any]:
    differences = _indexed(config, interleaved=False)
    norm = NormSpec(number(config, "rms_norm_eps"), gate_rank=size(config, "gated_norm_rank"))
    return {**differences, "latent": replace(differences["latent"], gated=True), "norm": norm}


def _with_indexer(config: Config) -> tuple[bool, ...]:
    """Return which layers have an indexer: listed one by one, as a pattern of letters, or every few layers."""
    count, every = config["num_hidden_layers"], max(1, config.get("index_topk_freq") or 1)
    begin = config.get("index_skip_topk_offset", 2)
    spaced = ["full" if max(layer - begin + 1, 0) % every == 0 else "shared" for layer in range(count)]
    kinds = config.get("indexer_types") or config.get("index_topk_pattern") or spaced
    layers = tuple(kind in ("full", "F") for kind in kinds)
    if len(layers) != count or not layers[0]:
        raise CorruptModel(
            f"config.json describes the indexers of {len(layers)} layers, the first of them as {kinds[0]!r}.",
            f"The model has {count} layers, and the first needs an indexer.",
        )
    return layers


def fine_experts(config: Config, **routing: Any) -> Any:
    """Return the mixture that these models have in common. routing: how experts are chosen and weighted."""
    if (config.get("moe_layer_freq") or 1) != 1:
        raise UnsupportedModel(
            "moe_layer_freq above 1 is not supported for DeepSeek.", "No released checkpoint uses it."
        )
    return mixture(
        config,
        layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
        scale=float(config["routed_scaling_factor"]),
        router_in_fp32=True,
        shared_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        **routing,
    )


def latent_attention(config: Config, *, interleaved: bool) -> dict[str, Any]:
    """Return the fields of latent attention. interleaved: neighbouring dimensions rotate together."""
    if config.get("attention_bias"):
        raise UnsupportedModel("attention_bias is not supported for DeepSeek.", "No released checkpoint uses it.")
    sizes = latent(config, interleaved=interleaved)
    rope, _ = read_ropes(config, sizes.rope_size)
    return {
        "latent": sizes,
        "num_kv_heads": 1,
        "head_dim": sizes.cached_size,
        "rope": rope,
        "attention_scale": (sizes.nope_size + sizes.rope_size) ** -0.5 * _yarn_mscale(rope),
    }


def _yarn_mscale(rope: RopeSpec) -> float:
    """Return YaRN's correction of the softmax for long contexts, for keys and queries."""
    weight = rope.parameters.get("mscale_all_dim") if rope.variant == "yarn" else None
    factor = rope.parameters.get("factor", 1.0)
    return 1.0 if not weight or factor <= 1 else (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


_DEFAULTS = {"n_shared_experts": None, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0}
GGUF_LATENT = {**FINE_EXPERTS, "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"}


_GGUF_INDEXED = {
    **GGUF_LATENT,
    "index_topk": "attention.indexer.top_k",
    "index_head_dim": "attention.indexer.key_length",
}


def latent_gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of DeepSeek-V2 and V3, and of models trained with their code.

    key_length is the cache's size and key_length_mla a head's; older files only have a head's, in key_length.
    """
    rope_size = metadata.count("rope.dimension_count")
    head, value = (
        metadata.optional_count(f"attention.{kind}_length_mla") or metadata.count(f"attention.{kind}_length")
        for kind in ("key", "value")
    )
    scoring = expert_scoring(metadata, SOFTMAX, SIGMOID)
    is_v3 = scoring == SIGMOID or has(checkpoint, "exp_probs_b.bias", config["num_hidden_layers"] - 1)
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    groups = metadata.optional_count("expert_group_count") or 1
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": head - rope_size,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": metadata.optional_count("expert_group_used_count") or 1,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        **mixed_layers(checkpoint, config),
        **({"norm_topk_prob": bool(metadata.get("expert_weights_norm"))} if is_v3 else {}),
    }


def _gguf_indexed(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields of DeepSeek-V3.2 and GLM-5: V3's, and the tokens that the indexer chooses."""
    metadata.count("attention.indexer.top_k")
    name = "DeepseekV32ForCausalLM" if metadata.architecture == "deepseek32" else "GlmMoeDsaForCausalLM"
    fields, layers = latent_gguf(metadata, checkpoint, config), range(config["num_hidden_layers"])
    kinds = ["full" if has(checkpoint, "indexer.attn_k.weight", layer) else "shared" for layer in layers]
    heads = metadata.optional_count("attention.indexer.head_count") if "full" in kinds else 0
    fields |= {"index_n_heads": heads, "indexer_types": kinds}
    return {**fields, "norm_topk_prob": bool(metadata.get("expert_weights_norm")), "architectures": [name]}


V2 = Family(
    "DeepSeek-V2",
    ("DeepseekV2ForCausalLM",),
    _v2,
    {**_DEFAULTS, "topk_method": "greedy"},
    storage=STORAGE,
    gguf={"deepseek2": GGUFFacts("DeepseekV2ForCausalLM", GGUF_LATENT, latent_gguf)},
)
_V3_DEFAULTS = {
    **_DEFAULTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "n_group": 8,
    "topk_group": 4,
}
_PREDICTION = "the multi-token prediction layer is run with --speculative mtp"
V3 = Family(
    "DeepSeek-V3", ("DeepseekV3ForCausalLM",), _v3, _V3_DEFAULTS, storage=STORAGE, note=_PREDICTION, mtp=DEEPSEEK_MTP
)
GLM_LITE = Family(
    "GLM-4.7-Flash",
    ("Glm4MoeLiteForCausalLM",),
    _v3,
    {
        **_V3_DEFAULTS,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
    },
    storage=STORAGE,
    note=_PREDICTION,
    mtp=DEEPSEEK_MTP,
)
_INDEXED_NOTE = f"its indexer has not run on a GPU yet; {_PREDICTION}"
V32 = Family(
    "DeepSeek-V3.2",
    ("DeepseekV32ForCausalLM",),
    partial(_indexed, interleaved=False),
    {**_V3_DEFAULTS, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    storage=STORAGE,
    note=_INDEXED_NOTE,
    mtp=DEEPSEEK_MTP,
    gguf={"deepseek32": GGUFFacts("DeepseekV32ForCausalLM", _GGUF_INDEXED, _gguf_indexed)},
)
GLM5 = Family(
    "GLM-5",
    ("GlmMoeDsaForCausalLM",),
    partial(_indexed, interleaved=True),
    {
        **_V3_DEFAULTS,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
    },
    storage=STORAGE,
    note=_INDEXED_NOTE,
    mtp=DEEPSEEK_MTP,
    gguf={"glm-dsa": GGUFFacts("GlmMoeDsaForCausalLM", _GGUF_INDEXED, _gguf_indexed)},
)

AXK2 = Family(
    "A.X K2",
    ("AXK2ForCausalLM",),
    _axk2,
    {
        **_V3_DEFAULTS,
        "first_k_dense_replace": 1,
        "n_group": None,
        "topk_group": None,
        "index_topk": 2048,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "gated_norm_rank": 16,
    },
    storage=STORAGE,
    note="its indexer has not run on a GPU yet",
)


def _youtu(config: Config) -> dict[str, Any]:
    return latent_attention(config, interleaved=bool(config["rope_interleave"]))


YOUTU = Family(
    "Youtu-LLM",
    ("YoutuForCausalLM",),
    _youtu,
    {"q_lora_rank": 1536, "rope_interleave": True, "tie_word_embeddings": True},
)


def _differences(config: Config) -> dict[str, Any]:
    bias, window = bool(config.get("attention_bias")), config.get("sliding_window")
    below = config["max_window_layers"]
    windowed = windowed_layers(config, lambda layer: layer >= below) if window is not None else ()
    return {
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": window,
        "layer_is_windowed": windowed,
        "mixture": sigmoid_mixture(
            config,
            layers=typed_layers(config) or layers_after(config, config["first_k_dense_replace"]),
            renormalize=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
            shared_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
            **grouping(config),
        ),
    }


DOTS1 = Family(
    "dots.llm1",
    ("Dots1ForCausalLM",),
    _differences,
    {
        "sliding_window": None,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    storage=STORAGE,
    gguf={"dots1": GGUFFacts("Dots1ForCausalLM", {**FINE_EXPERTS, **EXPERT_GROUPS}, sigmoid_experts)},
)
