"""Typed readers for the fields of a config.json, and the norm that it describes.

Each reader returns a value of its type and range, or raises `CorruptModel`.
Does not know: which fields a family has, how a norm is computed (layers/norm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.errors import CorruptModel, UnsupportedModel

LARGEST = 1e30
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}


def size(config: Mapping[str, Any], name: str) -> int:
    """Return a field as an integer above 0."""
    value = config.get(name)
    if value is None:
        raise CorruptModel(f"config.json lacks {name}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a whole number above 0.")
    return value


def number(config: Mapping[str, Any], name: str) -> float:
    """Return a field as a finite number above 0."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a number above 0.")
    return float(value)


def optional_number(config: Mapping[str, Any], name: str) -> float | None:
    """Return a field as a finite number above 0; None if it is missing or null."""
    return None if config.get(name) is None else number(config, name)


def renamed(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `config` with fields renamed (own name -> common name). A field that has the common name already wins."""
    others = {common: config[own] for own, common in names.items() if config.get(own) is not None}
    return {**others, **config}


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norm of every layer, and of the output before the head."""

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"  # layer: LayerNorm, which also subtracts the mean
    weight: bool = True  # False: no learned weight (OLMo 1)
    bias: bool = False
    plus_one: bool = False  # weights are stored as w - 1 (Gemma, Nemotron)
    after_eps: float | None = None  # of the norms after a part; None: eps (Muse Glimmer)
    gate_rank: int = 0  # norms before attention and before experts are gated, through so many numbers; 0: none (A.X K2)


def layer_norm(config: Mapping[str, Any], eps_name: str, *, bias: bool = True) -> NormSpec:
    return NormSpec(number(config, eps_name), "layer", bias=bias)


def activation_of(name: object) -> str:
    """Return the name in localllm of an activation in a config. Raises `UnsupportedModel`."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"Activation {name!r} is not supported.", f"Supported: {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]
