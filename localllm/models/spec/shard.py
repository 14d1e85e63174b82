"""A rank's share of a model under tensor and pipeline parallelism: its layers, heads, features, vocabulary and experts.

A share is cut in *units*, the least that can be given to a rank without changing a stored value: a KV head with its
query heads, a few features of the feed-forward part, a few rows of the vocabulary, an expert. Shares may differ in
size. Column-parallel and row-parallel matrices are Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053).
Does not know: devices, how a good split is found (models/fit), how a matrix is cut (models/weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from localllm.models.spec.model_spec import ModelSpec, kv_groups, kv_shape, query_heads

VOCAB_UNIT = 64
"""Rows of the vocabulary per unit: the sampler draws from groups of so many ids."""

ALIGNMENT = 128
"""Features of a drafter per unit, if it has many: a cut between blocks of quantised weights repeats none."""


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """Sizes of all shards of a stage, in the order of their indexes, as far as they exchange tensors of these sizes."""

    heads: tuple[int, ...]
    features: tuple[int, ...]
    shared_features: tuple[int, ...]
    vocab: tuple[int, ...]
    states: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model. Ranges are of the whole model's numbering and have step 1."""

    index: int  # among the shards of its stage; the first one samples
    size: int  # shards per stage: the tensor-parallel size
    layers: range  # of its pipeline stage
    heads: range  # query heads
    kv_heads: range  # those that `heads` read; where shards outnumber KV heads, several hold the same one
    features: range  # of the feed-forward part of layers without experts
    vocab: range  # rows of the embedding and of the head
    counts: ShardCounts  # of all shards of the stage
    experts: range = range(0)  # whole experts, with expert_features of each
    expert_features: range = range(0)
    shared_features: range = range(0)  # of the shared expert
    states: range = range(0)  # heads of a recurrent part, group after group; of a short convolution its channels
    state_groups: range = range(0)  # of these heads; where shards outnumber groups, several hold the same one

    @property
    def is_whole(self) -> bool:
        """Return whether no tensor-parallel shard shares its layers."""
        return self.size == 1


def whole_shard(spec: ModelSpec) -> Shard:
    """Return the share of a rank that holds the whole model."""
    return shards_of(spec, [spec.num_heads if spec.latent is not None else spec.num_kv_heads])[0]


def shards_of(
    spec: ModelSpec,
    kv_heads: Sequence[int],
    *,
    features: Sequence[int] | None = None,
    vocab: Sequence[int] | None = None,
    experts: Sequence[int] | None = None,
    expert_features: Sequence[int] | None = None,
    shared_features: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
    layers: range | None = None,
) -> list[Shard]:
    """Return the shards of one stage, from the count of each kind per shard.

    kv_heads: KV heads per shard, their sum num_kv_heads; for latent attention query heads, their sum num_heads. With
    more shards than KV heads: query heads per shard, their sum num_heads, none of them crossing from one KV head to
    the next. Counts left out are as even as possible. experts: whole experts per shard; None: each shard has
    expert_features of all of them. states: of recurrent layers, groups per shard, or with more shards than groups heads
    per shard, as for kv_heads; of a short convolution channels.
    Every shard needs a part of each kind but the vocabulary: a part without features could not exchange its inputs, and
    would refuse adapters. Raises `ValueError` if one has none, or if counts do not add up.
    """
    size = len(kv_heads)
    mixture = spec.mixture
    heads, kv = _head_ranges(spec, kv_heads)
    width = 0 if mixture is None else mixture.intermediate_size
    if experts is None:
        own_experts = [range(0 if mixture is None else mixture.num_experts)] * size
        own_features = _ranges(width, expert_features or even(width, size))
    else:
        own_experts = _ranges(0 if mixture is None else mixture.num_experts, experts)
        own_features = [range(width)] * size
    shared_size = 0 if mixture is None else mixture.shared_size
    dense = _ranges(spec.intermediate_size, features or even(spec.intermediate_size, size))
    shared = _ranges(shared_size, shared_features or even(shared_size, size))
    rows = _ranges(spec.vocab_size, vocab or even(spec.vocab_size, size, VOCAB_UNIT), needs_some=False)
    recurrent, own_states, groups = spec.recurrent, list[range](), [range(0)] * size
    given = states or even_states(spec, size)
    if recurrent is not None and given is not None:
        inner = recurrent.num_heads, recurrent.num_groups
        is_grouped = recurrent.kind != "short_conv"
        own_states, groups = _grouped_ranges(*inner, given) if is_grouped else (_ranges(recurrent.width, given), groups)
    counts = ShardCounts(*(tuple(len(own) for own in kind) for kind in (heads, dense, shared, rows, own_states)))
    stage = range(spec.num_layers) if layers is None else layers
    return [
        Shard(
            i, size, stage, heads[i], kv[i], dense[i], rows[i], counts, own_experts[i], own_features[i], shared[i],
            *((own_states[i], groups[i]) if own_states else ()),
        )
        for i in range(size)
    ]  # fmt: skip


def drafter_shard(spec: ModelSpec, target: Shard) -> Shard:
    """Return what a rank holds of a drafter, given its share of the drafter's target: as even a part as possible, or
    the whole drafter if its heads cannot be divided by this number of ranks. spec: of the drafter."""
    heads, mixture = even_heads(spec, target.size), spec.mixture
    if heads is None:
        return whole_shard(spec)
    inner, shared = (0, 0) if mixture is None else (mixture.intermediate_size, mixture.shared_size)
    features, own, common = (_aligned(count, target.size) for count in (spec.intermediate_size, inner, shared))
    return shards_of(spec, heads, features=features, expert_features=own, shared_features=common)[target.index]


def _aligned(count: int, parts: int) -> list[int]:
    """Divide `count` features evenly, in as large powers of two up to ALIGNMENT as leave each part several of them."""
    unit = ALIGNMENT
    while unit > 1 and count < 4 * unit * parts:
        unit //= 2
    return even(count, parts, unit)


def even(total: int, parts: int, unit: int = 1) -> list[int]:
    """Divide `total` as evenly as whole units allow; the first parts are the larger ones, the last may be short."""
    units = -(-total // unit)
    ends = [min(total, unit * (-(-units * part // parts))) for part in range(parts + 1)]
    return [b - a for a, b in pairwise(ends)]


def even_heads(spec: ModelSpec, size: int) -> list[int] | None:
    """Return the most even counts of heads for `shards_of`; None: the heads cannot be divided by this number of shards.

    Up to num_kv_heads shards take whole KV heads. More than that must be a multiple of num_kv_heads, and each takes a
    part of one KV head's query heads, an equal one where layers differ in them. Where layers differ in their KV heads,
    the fewest of them count. The heads of a recurrent part are divided in the same way, by their groups.
    """
    if spec.recurrent is not None and even_states(spec, size) is None:
        return None
    copies = size // spec.num_kv_heads  # more ranks than KV heads: a rank has as large a part of a group in all layers
    if size > spec.num_kv_heads and any(heads // spec.num_kv_heads % copies for heads in spec.layer_heads):
        return None
    if spec.latent is not None:
        return even(spec.num_heads, size) if size <= spec.num_heads else None
    fewest = min((heads for heads, _ in spec.layer_kv_shapes), default=spec.num_kv_heads)
    if fewest == spec.num_kv_heads or size > spec.num_kv_heads:
        return _even_groups(spec.num_heads, spec.num_kv_heads, size)
    counts = _even_groups(spec.num_kv_heads, fewest, size)
    return counts if counts is None or size > fewest else [count * spec.num_kv_heads // fewest for count in counts]


def even_states(spec: ModelSpec, size: int) -> list[int] | None:
    """Return the most even counts of recurrent groups or heads for `shards_of`; None: there are none, or they cannot be
    divided by this number of shards."""
    recurrent = spec.recurrent
    if recurrent is None or recurrent.kind == "module":
        return None
    if recurrent.kind == "short_conv":
        return _aligned(recurrent.width, size) if size <= recurrent.width else None
    return _even_groups(recurrent.num_heads, recurrent.num_groups, size)


def _even_groups(heads: int, groups: int, size: int) -> list[int] | None:
    """Divide groups of heads evenly; with more parts than groups, heads within each group."""
    if size <= groups:
        return even(groups, size)
    copies, rest = divmod(size, groups)
    return None if rest or copies > heads // groups else even(heads // groups, copies) * groups


def stage_starts(spec: ModelSpec) -> Sequence[int]:
    """Return the layers at which a stage but the first may begin: no layer from there on reads the K and V of an
    earlier layer, or attends to the keys that an earlier layer has chosen."""
    sources, index = spec.kv_source or range(spec.num_layers), spec.index
    if not spec.kv_source and (index is None or all(index.layers)):
        return range(1, spec.num_layers)
    starts, first = list[int](), spec.num_layers
    for layer in range(spec.num_layers - 1, 0, -1):
        first = min(first, sources[layer])
        if first >= layer and (index is None or index.layers[layer]):
            starts.append(layer)
    return starts[::-1]


def divides_by_layers(spec: ModelSpec) -> bool:
    """Return whether a pipeline can be cut between any two layers, each of which reads the stream alone."""
    return len(stage_starts(spec)) == spec.num_layers - 1 and spec.per_layer_input is None


def stage_width(spec: ModelSpec, start: int) -> int:
    """Return the numbers of a token that the stage from layer `start` on receives: its residual streams, and its
    per-layer embeddings for the layers from there on."""
    streams = 1 if spec.altup is None else spec.altup.num_streams
    further = 0 if spec.per_layer_input is None else (spec.num_layers - start) * spec.per_layer_input.size
    return streams * spec.hidden_size + further


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the spec with the sizes that the shard holds, for its KV cache and its attention.

    hidden_size and vocab_size stay the model's: the stream is whole on every shard, and one of them samples.
    """
    own = slice(shard.layers.start, shard.layers.stop)
    kv_heads = len(shard.kv_heads)
    held = [  # none or some of a group's layers, and of them all or some KV heads
        group._replace(
            layers=tuple(layer - own.start for layer in group.layers if layer in shard.layers),
            num_kv_heads=len(_groups_of(shard.heads, spec.num_heads, group.num_kv_heads)),
        )
        for group in kv_groups(spec)
    ]
    mixture = spec.mixture
    if mixture is not None:
        mixture = replace(
            mixture,
            intermediate_size=len(shard.expert_features),
            shared_size=len(shard.shared_features),
            layers=mixture.layers[own],
            layer_limits=mixture.layer_limits[own],
        )
    recurrent = spec.recurrent
    if recurrent is not None:
        heads, groups = len(shard.states), len(shard.state_groups)
        recurrent = (
            replace(recurrent, num_heads=heads, num_groups=groups) if groups else replace(recurrent, width=heads)
        )
    latent = spec.latent
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, layers=latent.index.layers[own]))
    further = spec.per_layer_input
    if further is not None:
        further = replace(further, num_layers=spec.num_layers - own.start)
    return replace(
        spec,
        latent=latent,
        per_layer_input=further,
        recurrent=recurrent,
        num_layers=len(shard.layers),
        num_heads=len(shard.heads),
        num_kv_heads=kv_heads,
        intermediate_size=len(shard.features),
        layer_is_windowed=spec.layer_is_windowed[own],
        layer_has_rope=spec.layer_has_rope[own],
        layer_has_sinks=spec.layer_has_sinks[own],
        layer_kinds=spec.layer_kinds[own],
        layer_heads=tuple(len(heads_of(spec, shard, layer)) for layer in shard.layers) if spec.layer_heads else (),
        layer_kv_shapes=tuple(
            (len(kv_heads_of(spec, shard, layer)), dim)
            for layer, (_, dim) in list(enumerate(spec.layer_kv_shapes))[own]
        ),
        layer_values_from_keys=spec.layer_values_from_keys[own],
        layer_widths=tuple(len(in_width(shard.features, spec, width)) for width in spec.layer_widths[own]),
        layer_sparsity=spec.layer_sparsity[own],
        layer_limits=spec.layer_limits[own],
        held_groups=tuple(held),
        kv_source=tuple(source - own.start for source in spec.kv_source[own]),
        mixture=mixture,
    )


def heads_of(spec: ModelSpec, shard: Shard, layer: int) -> range:
    """Return the shard's query heads of a layer, in the same proportion where layers differ in them."""
    own, count = shard.heads, query_heads(spec, layer)
    return range(own.start * count // spec.num_heads, own.stop * count // spec.num_heads)


def kv_heads_of(spec: ModelSpec, shard: Shard, layer: int) -> range:
    """Return the KV heads of a layer that the shard's query heads read."""
    return _groups_of(shard.heads, spec.num_heads, kv_shape(spec, layer)[0])


def in_width(features: range, spec: ModelSpec, width: int) -> range:
    """Return the features of a feed-forward part of another width than intermediate_size, in the same proportion."""
    return range(*(end * width // spec.intermediate_size for end in (features.start, features.stop)))


def _groups_of(heads: range, num_heads: int, num_groups: int) -> range:
    size = num_heads // num_groups
    return range(heads.start // size, (heads.stop - 1) // size + 1)


def _head_ranges(spec: ModelSpec, counts: Sequence[int]) -> tuple[list[range], list[range]]:
    """Return each shard's query heads and KV heads."""
    if spec.latent is not None:
        return _ranges(spec.num_heads, counts), [range(1)] * len(counts)
    return _grouped_ranges(spec.num_heads, spec.num_kv_heads, counts)


def _grouped_ranges(num_heads: int, num_groups: int, counts: Sequence[int]) -> tuple[list[range], list[range]]:
    """Return each shard's heads and the groups that they are in: KV heads, or the groups of a recurrent part."""
    group = num_heads // num_groups
    if len(counts) <= num_groups:
        own_groups = _ranges(num_groups, counts)
        return [range(own.start * group, own.stop * group) for own in own_groups], own_groups
    heads = _ranges(num_heads, counts)
    own_groups = [_groups_of(own, num_heads, num_groups) for own in heads]
    if any(len(own) != 1 for own in own_groups):
        raise ValueError(f"a shard's heads {list(counts)} would be in several of {num_groups} groups")
    return heads, own_groups


def _ranges(total: int, counts: Sequence[int], *, needs_some: bool = True) -> list[range]:
    if sum(counts) != total or min(counts) < 0:
        raise ValueError(f"{list(counts)} do not add up to {total}")
    if needs_some and total and 0 in counts:
        raise ValueError(f"each shard needs a part of {total}: {list(counts)}")
    return [range(a, b) for a, b in pairwise([0, *accumulate(counts)])]
