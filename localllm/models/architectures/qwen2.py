"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; upper layers may have a window (arXiv:2407.10671). MiMo-7B is the
same with a layer that predicts further tokens (arXiv:2505.07608)."""

from __future__ import annotations

from typing import Any

from localllm.models.spec.family import Config, Family, Storage, windowed_layers
from localllm.models.spec.mtp import MIMO_MTP


def qwen_window(config: Config) -> dict[str, Any]:
    """Return the window fields: with use_sliding_window, layers from max_window_layers on are windowed."""
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    if window is None:
        return {}
    layers = windowed_layers(config, lambda layer: layer >= config["max_window_layers"])
    return {"sliding_window": window, "layer_is_windowed": layers}


def _differences(config: Config) -> dict[str, Any]:
    return {"attention_bias": True, **qwen_window(config)}


_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
FAMILY = Family("Qwen2", ("Qwen2ForCausalLM",), _differences, _DEFAULTS)
MIMO = Family(
    "MiMo",
    ("MiMoForCausalLM",),
    _differences,
    {**_DEFAULTS, "rms_norm_eps": 1e-5},
    storage=Storage(ignored=(r"model\.mtp_layers\..*",)),
    note="the multi-token prediction layer is run with --speculative mtp",
    mtp=MIMO_MTP,
)
