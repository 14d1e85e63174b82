"""Rotary position embedding as described by config.json: old fields (rope_theta, rope_scaling) and new
(rope_parameters).

Does not know: frequencies and tables (layers/rotary.py computes them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its long-context variants."""

    theta: float = 10_000.0
    variant: str = "default"  # default, linear, dynamic, llama3, yarn, longrope, proportional
    rotary_dim: int = 0  # leading dimensions of a head that rotate
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the variant's own numbers, named as in config.json
    sections: tuple[int, ...] = ()  # frequencies that turn by time, row and column; empty: a token has one position
    interleaved_sections: bool = False  # the three take turns (Qwen3-VL) instead of one after another (Qwen2-VL)

    @property
    def axes(self) -> tuple[int, ...]:
        """Per frequency the number of the position that it turns by: 0 time, 1 row, 2 column."""
        time, row, column = self.sections
        if not self.interleaved_sections:
            return (0,) * time + (1,) * row + (2,) * column
        return tuple(place % 3 if place < 3 * self.sections[place % 3] else 0 for place in range(sum(self.sections)))

    def has_long_factors(self, num_positions: int) -> bool:
        """Return whether this served context uses LongRoPE's long factors, for all: keys must not change later."""
        return self.variant == "longrope" and num_positions > self.parameters["original_max_position_embeddings"]


def read_ropes(config: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Return the model's rope, and the rope of its windowed layers if config.json has a separate one."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise CorruptModel(f"config.json's rope_parameters should be an object, not {given!r}.")
    nested = config.get("rope_parameters") or {}
    if any(kind in nested for kind in _LAYER_TYPES):
        full, local = (nested.get(kind) or {} for kind in _LAYER_TYPES)
        local = {"rope_theta": config.get("rope_local_base_freq", 10_000.0), **local}
        full_dim = config.get("global_head_dim") or head_dim  # Gemma 4: heads of full layers are wider
        return _read_rope(config, full, full_dim), _read_rope(config, local, head_dim)
    rope = _read_rope(config, given, head_dim)
    if config.get("rope_local_base_freq") is None:
        return rope, None
    return rope, RopeSpec(float(config["rope_local_base_freq"]), rotary_dim=rope.rotary_dim)


def plain_rope(config: Mapping[str, Any]) -> RopeSpec:
    """Return the model's rope without its scaling."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return _read_rope(config, {}, head_dim)


def context_length(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """Return the checkpoint's context length: max_position_embeddings, except for two variants whose configs commonly
    keep the length before scaling there.
    """
    stated = int(config["max_position_embeddings"])
    if rope.variant == "yarn":
        return max(stated, int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"]))
    if rope.variant == "dynamic":
        return int(stated * rope.parameters["factor"])
    return stated


def _read_rope(config: Mapping[str, Any], given: Mapping[str, Any], head_dim: int) -> RopeSpec:
    variant = given.get("rope_type") or given.get("type") or "default"
    is_phi = "Phi3ForCausalLM" in (config.get("architectures") or ())
    if variant == "su" or (variant == "yarn" and is_phi):
        variant = "longrope"  # names that early Phi-3 checkpoints used
    if variant == "mrope":  # three positions for each token, which are equal in text
        variant = "default"
    if variant not in _REQUIRED:
        raise UnsupportedModel(
            f"Rotary embedding of type {variant!r} is not supported.", f"Supported: {', '.join(sorted(_REQUIRED))}."
        )
    parameters = {name: value for name, value in given.items() if value is not None}
    parameters["max_position_embeddings"] = config["max_position_embeddings"]
    if config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    if variant == "yarn" and parameters["original_max_position_embeddings"]:
        parameters.setdefault(
            "factor", config["max_position_embeddings"] / parameters["original_max_position_embeddings"]
        )
    _check(variant, parameters)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if (
        variant == "proportional"
    ):  # a share of the frequencies turns; the pairs of dimensions are those of a full rotation
        parameters["turning_dim"], partial = 2 * int(head_dim * partial // 2), 1.0
    rotary_dim = config.get("rotary_dim") or int(head_dim * partial)
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CorruptModel(
            f"config.json rotates {rotary_dim} of the {head_dim} dimensions of a head.",
            f"partial_rotary_factor is {partial}, rotary_dim {config.get('rotary_dim')}.",
        )
    if variant == "longrope":
        _check_longrope(parameters, rotary_dim)
    sections = tuple(given.get("mrope_section") or ())
    if sections and (len(sections) != 3 or sum(sections) != rotary_dim // 2):
        raise CorruptModel(
            f"config.json has mrope_section = {list(sections)}.", f"Three numbers must add up to {rotary_dim // 2}."
        )
    return RopeSpec(
        float(parameters["rope_theta"]), variant, rotary_dim, parameters, sections, bool(given.get("mrope_interleaved"))
    )


def _check(variant: str, parameters: Mapping[str, Any]) -> None:
    missing = [name for name in _REQUIRED[variant] if name not in parameters]
    if missing:
        raise CorruptModel(f"config.json's {variant} rotary embedding lacks {', '.join(missing)}.")
    for name in ("rope_theta", *_REQUIRED[variant]):
        value = parameters.get(name)
        if name.startswith(("short_", "long_")) or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CorruptModel(f"config.json's rotary embedding has {name} = {value!r}.", "It must be above 0.")


def _check_longrope(parameters: Mapping[str, Any], rotary_dim: int) -> None:
    for name in ("short_factor", "long_factor"):
        factors = parameters[name]
        if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
            count = len(factors) if isinstance(factors, list) else "no list of"
            raise CorruptModel(
                f"config.json's {name} has {count} numbers.",
                f"{rotary_dim} rotating dimensions need {rotary_dim // 2}.",
            )
