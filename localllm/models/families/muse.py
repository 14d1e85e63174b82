"""Muse Glimmer (text): Trinity's shape without experts, norms before and after each part and a gate on what attention
returns. Three windowed layers that rotate are followed by a full one without positions, counted from the last layer.
Embeddings, and q and k of every layer, pass an RMSNorm without a weight; queries are scaled besides
(Meta's model card and `MuseGlimmerText*` of transformers, 2026).
"""

from __future__ import annotations

from typing import Any

from localllm.models.families.text_part import of_family
from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.fields import NormSpec, number, size
from localllm.models.spec.gguf import SANDWICH_NORMS, Fields, GGUFFacts, GGUFTensors, Metadata

_EVERY = 4  # layers from one without positions to the next


def _differences(config: Config) -> dict[str, Any]:
    count, scale = size(config, "num_hidden_layers"), number(config, "qk_scale_factor")

    def is_near(layer: int) -> bool:
        return (count - 1 - layer) % _EVERY != 0

    thetas = config.get("layer_rope_theta") or [is_near(layer) for layer in range(count)]
    bias = bool(config.get("attention_bias"))
    return {
        "hidden_act": config["hidden_activation"],
        "topology": "sandwich",
        "norm": NormSpec(number(config, "rms_norm_eps"), plus_one=True, part_eps=number(config, "post_norm_eps")),
        "qk_norm": "unweighted_all",
        "attention_scale": scale * config["head_dim"] ** -0.5,
        "attention_gate": "matrix",
        "attention_bias": bias,
        "attention_out_bias": bias,
        "sliding_window": config["sliding_window"],
        "layer_is_windowed": windowed_layers(config, is_near),
        "layer_has_rope": tuple(bool(theta) for theta in thetas),
        "embedding_row_norm": True,
        "logits_multiplier": number(config, "output_multiplier"),
        "final_softcap": number(config, "final_logit_softcapping"),
    }


def _gguf(metadata: Metadata, checkpoint: GGUFTensors, config: Fields) -> Fields:
    """Return the fields that files omit. The norm of q is a row of one value there, the scale of queries."""
    scales = checkpoint.values("blk.0.attn_q_norm.weight")
    stated = metadata.number("logit_scale")
    return {
        **({} if scales is None else {"qk_scale_factor": scales[0]}),
        "output_multiplier": (config["hidden_size"] / 256) ** -0.5 if stated is None else stated,
    }


TEXT = Family(
    "Muse Glimmer (text)",
    ("MuseGlimmerForCausalLM",),
    _differences,
    {
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "rope_theta": 500_000.0,
        "hidden_activation": "silu",
        "head_dim": 128,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
    Storage(added=(("model.norm.weight", 1.0),)),  # stored as w, while the norms of the layers are stored as w - 1
    gguf={
        name: GGUFFacts(
            "MuseGlimmerForCausalLM",
            {"final_logit_softcapping": "final_logit_softcapping"},
            _gguf,
            norms=SANDWICH_NORMS,
            added=(("norm.weight", 1.0),),
            ignored=(r"blk\.\d+\.attn_[qk]_norm\.weight",),
        )
        for name in ("muse-glimmer", "muse_glimmer")
    },
)
VISION = of_family("Muse Glimmer", ("MuseGlimmerForConditionalGeneration",), TEXT)
