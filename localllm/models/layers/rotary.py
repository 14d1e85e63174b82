"""Compute the table of cosines and sines that all layers share from a RopeSpec. Each variant follows transformers, so
that logits agree to rounding. Does not know: layers, requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec


def rope_tables(spec: ModelSpec, num_positions: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the table of all layers, and the table of windowed layers if theirs differs; None where there is none."""
    ropes = (spec.rope if spec.positions == "rope" else None, spec.local_rope)
    full, local = (None if rope is None else _table_on(rope, num_positions, device) for rope in ropes)
    return full, local


def _table_on(rope: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    if device.type == "meta":  # arithmetic on `meta` first imports torch's compiler, for seconds
        return torch.empty((num_positions, rope.rotary_dim), device=device)
    return rope_table(rope, num_positions).to(device)


def rope_table(rope: RopeSpec, num_positions: int) -> Tensor:
    """Return [num_positions, rotary_dim] fp32 on CPU: cosines of rotary_dim / 2 angles, then their sines.

    num_positions is the served context, which chooses LongRoPE's factors (`RopeSpec.has_long_factors`).
    """
    frequencies, scale = _frequencies(rope, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
    angles = positions * frequencies  # frequencies: [rotary_dim / 2], or one row per position
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale)


def half_split_order(rotary_dim: int, head_dim: int) -> Tensor:
    """Return [head_dim] int64 on CPU: an order that moves rotated neighbours rotary_dim / 2 apart."""
    order = torch.arange(head_dim, device="cpu")
    return torch.cat((order[:rotary_dim:2], order[1:rotary_dim:2], order[rotary_dim:]))


def _frequencies(rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """Return radians per position of each pair of dimensions, and the factor on cosines and sines."""
    numbers = rope.parameters
    if rope.variant == "linear":
        return _base_frequencies(rope).div_(numbers["factor"]), 1.0
    if rope.variant == "dynamic":
        return _dynamic(rope, num_positions), 1.0
    if rope.variant == "llama3":
        return _llama3(_base_frequencies(rope), numbers), 1.0
    if rope.variant == "yarn":
        return _yarn(rope), _yarn_scale(numbers)
    if rope.variant == "longrope":
        return _longrope(rope, num_positions)
    if rope.variant == "proportional":
        return _proportional(rope), 1.0
    return _base_frequencies(rope), 1.0


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim


def _base_frequencies(rope: RopeSpec) -> Tensor:
    return torch.reciprocal(rope.theta ** _exponents(rope))


def _proportional(rope: RopeSpec) -> Tensor:
    """Gemma 4: the first frequencies of a full rotation turn, the others are zero. Pairs stay rotary_dim / 2 apart."""
    frequencies = _base_frequencies(rope).div_(rope.parameters.get("factor", 1.0))
    frequencies[rope.parameters["turning_dim"] // 2 :] = 0.0
    return frequencies


def _dynamic(rope: RopeSpec, num_positions: int) -> Tensor:
    """Dynamic NTK: the base grows with the length beyond max_position_embeddings. [num_positions, rotary_dim / 2].

    The length is that of the token's own prefix. That is what token-by-token decoding in transformers gives, and unlike
    a prompt-wide base it does not depend on how the prompt was cut into chunks.
    """
    factor, trained, dim = rope.parameters["factor"], rope.parameters["max_position_embeddings"], rope.rotary_dim
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64).clamp_(min=trained)
    bases = rope.theta * (factor * lengths / trained - (factor - 1)) ** (dim / (dim - 2))
    return torch.reciprocal(bases.float()[:, None] ** _exponents(rope))


def _llama3(frequencies: Tensor, numbers: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow long wavelengths down by `factor`, keep short ones, blend those between."""
    original, factor = numbers["original_max_position_embeddings"], numbers["factor"]
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeSpec) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""
    numbers, dim = rope.parameters, rope.rotary_dim
    original = numbers["original_max_position_embeddings"]

    def dimension_with(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_with(numbers.get("beta_fast") or 32), dimension_with(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp_(0, 1)
    powers = torch.pow(rope.theta, _exponents(rope))
    frequencies: Tensor = ramp / (numbers["factor"] * powers) + (1 - ramp) / powers
    return frequencies


def _yarn_scale(numbers: Mapping[str, Any]) -> float:
    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if numbers["factor"] <= 1 else 0.1 * weight * math.log(numbers["factor"]) + 1.0

    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return mscale(numbers["mscale"]) / mscale(numbers["mscale_all_dim"])
    return mscale(1.0)


def _longrope(rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a factor per dimension, with a short and a long set."""
    numbers, original = rope.parameters, rope.parameters["original_max_position_embeddings"]
    length = "long" if rope.has_long_factors(num_positions) else "short"
    factors = numbers[f"{length}_factor"]
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** _exponents(rope))
    stated = numbers.get(f"{length}_mscale", numbers.get("attention_factor"))  # the first: Phi-3.5-MoE
    if stated is not None:
        return frequencies, float(stated)
    ratio = numbers.get("factor") or numbers["max_position_embeddings"] / original
    return frequencies, 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
