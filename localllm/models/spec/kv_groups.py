"""The KV groups of a model: layers that share one block table, because they keep the same positions in the same shape.

A windowed layer needs the last `window` tokens, a full layer all of them, so the two are given blocks separately. One
group is what most models have. The groups are derived from the spec; their order is that of their first layers, and is
the same on every rank of the model, also where a pipeline stage holds no layer of a group.
Does not know: blocks, requests, tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from localllm.models.spec.kv_group import KVGroup
from localllm.models.spec.model_spec import ModelSpec

__all__ = ["KVGroup", "group_of_layers", "keeps_kv", "kv_groups", "kv_numbers_per_token", "kv_shape", "layer_window"]


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


def kv_numbers_per_token(spec: ModelSpec) -> int:
    """Return the numbers in K and V of one token position over all layers that keep them."""
    return sum(group.numbers_per_token for group in kv_groups(spec))


def keeps_kv(spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer has K and V of its own."""
    return spec.has_attention(layer) and (not spec.kv_source or spec.kv_source[layer] == layer)


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
