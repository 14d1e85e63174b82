"""Multi-head latent attention as described by config.json (DeepSeek-V2, arXiv:2405.04434).

Does not know: weights, layers, families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import CorruptModel

MOST_HEADS = 16
"""Most query heads per kernel call.

All heads read the same latent, so one matrix could hold them all; but that matrix and its sums, 1024 columns wide, must
fit into the registers of one multiprocessor.
"""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """An indexer, which chooses the keys that a query attends to (DeepSeek-V3.2, arXiv:2512.02556)."""

    topk: int  # keys that a query attends to, if it sees more
    num_heads: int
    head_dim: int  # numbers of the one index key per token; the first of them rotate, as many as in attention
    interleaved: bool  # stored rows: neighbouring dimensions rotate together
    layers: tuple[bool, ...]
    """Per layer whether it has an indexer; the others attend to the keys that the layer before them does (GLM-5.2)."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of latent attention: all keys and values are projections of one short cached vector per token."""

    latent_size: int  # kv_lora_rank: size of that vector
    rope_size: int  # rotated dimensions of q, and of the one key that all heads share
    nope_size: int  # dimensions of q that are not rotated
    value_size: int  # dimensions of one head's values
    q_latent_size: int | None = None  # size of the queries' own latent, if they have one
    interleaved: bool = True  # stored rows: neighbouring dimensions rotate together
    gated: bool = False
    """Queries are made from their latent before and after its norm, with a gate for each number of a head's output,
    whose rows follow the head's query in q_b_proj (A.X K2)."""
    index: IndexSpec | None = None  # None: queries attend to all keys

    @property
    def cached_size(self) -> int:
        """Numbers that a layer caches per token: the rotated dimensions, then the latent."""
        return self.rope_size + self.latent_size


def heads_at_once(num_heads: int, most: int = MOST_HEADS) -> int:
    """Return the most heads per kernel call, or per part of one, that divide the heads evenly."""
    return max(count for count in range(1, most + 1) if num_heads % count == 0)


def latent(config: Mapping[str, Any], *, interleaved: bool = True) -> LatentSpec:
    """Parse the sizes from a config. Raises `CorruptModel` for impossible ones."""
    rope_size = _size(config, "qk_rope_head_dim")
    if rope_size % 2:
        raise CorruptModel(
            f"config.json has qk_rope_head_dim = {rope_size}.",
            "It must be even, because dimensions are rotated in pairs.",
        )
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
