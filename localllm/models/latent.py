"""Multi-head latent attention as config.json says it (DeepSeek-V2, arXiv:2405.04434).

Does not know: weights, layers, which family it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import CorruptModel

MOST_HEADS = 16
"""Query heads that a kernel takes together. All heads read the same latent, so they could go in one matrix; but that
matrix and its sums, 1024 columns wide, lie in the registers of one processor."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads are projections of one short vector a token, and that vector is what is cached."""

    latent_size: int  # kv_lora_rank: of the vector
    rope_size: int  # dimensions of q, and of one key for all heads, that turn with the position
    nope_size: int  # dimensions of q that do not turn
    value_size: int  # of a head's values
    q_latent_size: int | None = None  # queries come through a short vector too
    interleaved: bool = True  # stored rows: neighbours turn together

    @property
    def cached_size(self) -> int:
        """Numbers that a token leaves in a layer's cache: what turns, then the latent."""
        return self.rope_size + self.latent_size


def heads_at_once(num_heads: int) -> int:
    """The largest part of the heads, all parts alike, that a kernel takes together."""
    return max(count for count in range(1, MOST_HEADS + 1) if num_heads % count == 0)


def latent(config: Mapping[str, Any], *, interleaved: bool = True) -> LatentSpec:
    """Raises `CorruptModel` for sizes that cannot be."""
    rope_size = _size(config, "qk_rope_head_dim")
    if rope_size % 2:
        raise CorruptModel(f"config.json has qk_rope_head_dim = {rope_size}.", "Dimensions turn in pairs.")
    return LatentSpec(
        latent_size=_size(config, "kv_lora_rank"),
        rope_size=rope_size,
        nope_size=_size(config, "qk_nope_head_dim"),
        value_size=_size(config, "v_head_dim"),
        q_latent_size=None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank"),
        interleaved=interleaved,
    )


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a whole number above 0.")
    return value
