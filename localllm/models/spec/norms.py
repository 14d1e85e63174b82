"""The norm of a model as described by config.json.

Does not know: how a norm is computed (layers/norm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.models.spec.fields import number


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm of every layer, and of the output before the head."""

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"  # layer: LayerNorm, which also subtracts the mean
    weight: bool = True  # False: no learned weight (OLMo 1)
    bias: bool = False
    plus_one: bool = False  # weights are stored as w - 1 (Gemma, Nemotron)


def layer_norm(config: Mapping[str, Any], eps_name: str, *, bias: bool = True) -> NormSpec:
    return NormSpec(number(config, eps_name), "layer", bias=bias)
