"""The KV groups of a model: layers that share one block table, because they keep the same positions in the same shape.

A windowed layer needs the last `window` tokens, a full layer all of them, so the two are given blocks separately. One
group is what most models have. The groups are derived from the spec; their order is that of their first layers, and is
the same on every rank of the model, also where a pipeline stage holds no layer of a group.
Does not know: blocks, requests, tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localllm.models.spec.model_spec import ModelSpec


class KVGroup(NamedTuple):
    """Layers that share one block table: the same window, and the same shape of K and V."""

    name: str  # full, or window_1024; with the shape behind it if that alone does not tell two groups apart
    layers: tuple[int, ...]  # ascending; of a pipeline stage its own numbers, and possibly none
    window: int | None  # tokens that the layers see, including the current one; None: all
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool  # one latent is both key and value

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of K and V of one token position over the group's layers."""
        return self.numbers_per_token * dtype_bytes

    @property
    def numbers_per_token(self) -> int:
        return len(self.layers) * self.num_kv_heads * self.head_dim * (1 if self.values_are_keys else 2)


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Return the groups of the layers that keep K and V. Layers without attention, and layers that read the K and V of
    another layer (`ModelSpec.kv_source`), are in none."""
    if spec.held_groups:
        return spec.held_groups
    kinds: dict[tuple[int | None, int, int], list[int]] = {}
    for layer in range(spec.num_layers):
        if keeps_kv(spec, layer):
            kinds.setdefault((layer_window(spec, layer), *kv_shape(spec, layer)), []).append(layer)
    groups = [
        KVGroup(_name(window), tuple(layers), window, heads, head_dim, spec.latent is not None)
        for (window, heads, head_dim), layers in kinds.items()
    ]
    return _with_distinct_names(groups)


def keeps_kv(spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer has K and V of its own."""
    return not spec.kv_source or spec.kv_source[layer] == layer


def group_of_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return for each layer the index of the group whose blocks it reads: of a layer that reads another layer's K and
    V that layer's group. -1: a layer without attention."""
    groups = {layer: index for index, group in enumerate(kv_groups(spec)) for layer in group.layers}
    sources = spec.kv_source or range(spec.num_layers)
    return tuple(groups.get(sources[layer], -1) for layer in range(spec.num_layers))


def layer_window(spec: ModelSpec, layer: int) -> int | None:
    """Return the tokens that a layer's queries see, including their own; None: all."""
    return spec.sliding_window if spec.layer_is_windowed and spec.layer_is_windowed[layer] else None


def kv_shape(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the KV heads of a layer and their size."""
    return spec.layer_kv_shapes[layer] if spec.layer_kv_shapes else (spec.num_kv_heads, spec.head_dim)


def _name(window: int | None) -> str:
    return "full" if window is None else f"window_{window}"


def _with_distinct_names(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    uses = Counter(group.name for group in groups)
    return tuple(
        group if uses[group.name] == 1 else group._replace(name=f"{group.name}_{group.num_kv_heads}x{group.head_dim}")
        for group in groups
    )
