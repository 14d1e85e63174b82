"""The shares of a model's ranks: its bytes by head, feature, expert and row, divided by the solver into shards.

Bytes of one element come from the size of the whole model, so a quantised model needs no rules of its own here; the
plan then counts each rank's weights exactly.
Does not know: devices' names, flags (devices.py), how a good division is found (balance.py), torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from localllm.models.fit.activation_bytes import DTYPE_BYTES, group_token_bytes
from localllm.models.fit.balance import (
    RankPart,
    SplitDevice,
    StageBytes,
    proportional,
    sizes_of,
    solve_layers,
    solve_stage,
)
from localllm.models.formats.registry import method_of
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.models.spec.shard import VOCAB_UNIT, Shard, even_heads, shards_of, stage_starts
from localllm.units import format_count

PLAIN_UNIT = 32  # features per unit where nothing is quantised
BLOCKS = {"gguf": 256, "bitsandbytes": 64, "mxfp4": 32, "mxfp8": 32, "compressed-tensors": 128, "modelopt": 128}
UNITS_PER_RANK = 4  # fewer units than these per rank are made smaller: a cut inside a block is exact too


@dataclass(frozen=True, slots=True)
class Division:
    """The number of ranks, and the shares that the user fixed."""

    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages
    shares: tuple[float, ...] = ()  # per rank of a stage; empty: by memory and bandwidth
    layers: tuple[int, ...] = ()  # per stage; empty: by memory and bandwidth
    whole_experts: bool | None = None  # None: where slices would be too narrow

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


class ModelBytes(NamedTuple):
    """Bytes per element of a model's weights and per token of its KV cache."""

    matrix: float  # element of a matrix in the layers
    table: float  # element of the embedding and the head
    kv_dtype: str


def model_bytes(spec: ModelSpec, resident_bytes: float, table_bytes: float, kv_dtype: str) -> ModelBytes:
    """Return the bytes per element, from the bytes of the whole model and of one element of its unquantised tables."""
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    matrices = sum(_layer_elements(spec, layer) for layer in range(spec.num_layers))
    left = resident_bytes - tables * table_bytes
    if left <= 0:  # the tables are quantised as well
        return ModelBytes(resident_bytes / (tables + matrices), resident_bytes / (tables + matrices), kv_dtype)
    return ModelBytes(left / matrices, table_bytes, kv_dtype)


def feature_unit(quantization: Mapping[str, Any] | None, at_load: str | None = None) -> int:
    """Return how many inputs of `down` one stored block holds, so that a cut between blocks repeats none."""
    if quantization is None:
        return 128 if at_load == "int4" else PLAIN_UNIT
    method = method_of(quantization)
    blocks = quantization.get("weight_block_size")
    group = blocks[-1] if isinstance(blocks, list | tuple) and blocks else quantization.get("group_size")
    if isinstance(group, int) and group > 0:
        return group
    return BLOCKS.get(method or "", PLAIN_UNIT)


def split_model(
    spec: ModelSpec,
    devices: Sequence[SplitDevice],
    division: Division,
    sizes: ModelBytes,
    context: int,
    unit: int = PLAIN_UNIT,
) -> list[Shard]:
    """Return the shard of each rank, stage after stage. devices: one per rank in the same order.

    Each size must be possible (devices.py refuses others by name).
    """
    size = division.tensor
    stages = [devices[first : first + size] for first in range(0, division.num_ranks, size)]
    layers = _layers(spec, stages, division, sizes, context)
    return [
        shard
        for own, ranks in zip(layers, stages, strict=True)
        for shard in _split_stage(spec, own, ranks, division, sizes, context, unit)
    ]


def count_shard(spec: ModelSpec, shard: Shard, resident_bytes: float, dtype: str) -> int:
    """Return a shard's weights by arithmetic from the whole model's, where no headers are at hand."""
    sizes = model_bytes(spec, resident_bytes, DTYPE_BYTES[dtype], dtype)
    repeats = _repeats_kv(spec, shard.size)
    head, fixed = _head_elements(spec, repeats_kv=repeats)
    dense, mixed = _dense_layers(spec, shard.layers), _mixture_layers(spec, shard.layers)
    attending = sum(map(spec.has_attention, shard.layers))
    heads = len(shard.heads) if repeats or spec.latent is not None else len(shard.kv_heads)
    experts = len(shard.experts) * len(shard.expert_features) + len(shard.shared_features)
    features = dense * len(shard.features) + mixed * experts
    tables = _count_tables(spec, shard.layers)
    elements = attending * (heads * head + fixed) + features * _feature_elements(spec)
    further = _per_layer_table(spec)
    elements += sum(_even_elements(spec, layer) - further for layer in shard.layers) / shard.size
    elements += (shard.layers.start == 0) * spec.num_layers * further / shard.size
    return math.ceil(elements * sizes.matrix + tables * len(shard.vocab) * spec.hidden_size * sizes.table)


def takes_whole_experts(spec: ModelSpec, division: Division, unit: int) -> bool:
    """Return whether each rank gets whole experts: as asked, or where slices have fewer than 4 units per rank."""
    mixture = spec.mixture
    if mixture is None or division.tensor == 1 or mixture.num_experts < division.tensor:
        return False
    narrow = mixture.intermediate_size < UNITS_PER_RANK * division.tensor * unit
    return narrow if division.whole_experts is None else division.whole_experts


def split_in_words(spec: ModelSpec, shards: Sequence[Shard]) -> str:
    """Describe what the shards became: "6 + 2 of 8 KV heads, 10,752 + 3,584 of 14,336 features"."""
    first = [shard for shard in shards if shard.layers == shards[0].layers]
    stages = [shard for shard in shards if shard.index == 0]
    words = []
    if len(stages) > 1:
        words.append(f"{_sum([len(s.layers) for s in stages])} of {spec.num_layers} layers")
    if len(first) > 1:
        repeated = spec.latent is not None or len(first) > spec.num_kv_heads
        kind, whole = ("heads", spec.num_heads) if repeated else ("KV heads", spec.num_kv_heads)
        words.append(f"{_sum([len(s.heads if repeated else s.kv_heads) for s in first])} of {whole} {kind}")
        words += _fine_words(spec, first)
    return ", ".join(words)


def _fine_words(spec: ModelSpec, shards: Sequence[Shard]) -> list[str]:
    mixture, words = spec.mixture, []
    if _dense_layers(spec, range(spec.num_layers)):
        words.append(f"{_sum([len(s.features) for s in shards])} of {format_count(spec.intermediate_size)} features")
    if mixture is not None and len(shards[0].experts) < mixture.num_experts:
        words.append(f"{_sum([len(s.experts) for s in shards])} of {mixture.num_experts} experts")
    elif mixture is not None:
        width = format_count(mixture.intermediate_size)
        words.append(f"{_sum([len(s.expert_features) for s in shards])} of {width} features of every expert")
    return words


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(map(format_count, counts))


# ---- the elements of a layer -----------------------------------------------------------------------------------------


def _layer_elements(spec: ModelSpec, layer: int) -> float:
    elements = _even_elements(spec, layer)
    if spec.has_attention(layer):
        head, fixed = _head_elements(spec, repeats_kv=False)
        elements += fixed + head * (spec.num_heads if spec.latent is not None else spec.num_kv_heads)
    mixture, one = spec.mixture, range(layer, layer + 1)
    if mixture is not None and _mixture_layers(spec, one):
        features = mixture.num_experts * mixture.intermediate_size + mixture.shared_size
        return elements + features * _feature_elements(spec)
    return elements + _dense_layers(spec, one) * spec.intermediate_size * _feature_elements(spec)


def _even_elements(spec: ModelSpec, layer: int) -> float:
    """Return the elements of a layer that its ranks share evenly: of the matrices before and after a recurrence, and of
    the table of per-layer embeddings."""
    recurrent, elements = spec.recurrent, _per_layer_table(spec)
    if recurrent is None or spec.layer_kind(layer) not in ("recurrent", "both"):
        return elements
    inputs = recurrent.conv_channels + recurrent.inner_size + 2 * recurrent.num_heads
    inputs = 3 * recurrent.width if recurrent.kind == "short_conv" else inputs
    return elements + spec.hidden_size * (inputs + recurrent.inner_size)


def _per_layer_table(spec: ModelSpec) -> int:
    """Return the elements of a layer's columns of the table of per-layer embeddings."""
    further = spec.per_layer_input
    return 0 if further is None else further.vocab_size * further.size


def layer_multiplies(spec: ModelSpec, layer: int) -> tuple[float, float]:
    """Return the multiply-adds of one token in a layer: all but what may be in RAM, and that: the experts that it
    chooses, or the feed-forward part of a dense model. A recurrent part counts as attention."""
    every, mixture = _layer_elements(spec, layer) - _per_layer_table(spec), spec.mixture
    if mixture is None:
        part = _dense_layers(spec, range(layer, layer + 1)) * spec.intermediate_size * _feature_elements(spec)
        return every - part, part
    if not mixture.is_in(layer):
        return every, 0.0
    beside = spec.intermediate_size * _feature_elements(spec) if mixture.beside_mlp else 0
    rest = every - mixture.num_experts * mixture.intermediate_size * _feature_elements(spec) + beside
    matrices = 3 if spec.mlp_gated else 2
    return rest, matrices * mixture.top_k * mixture.intermediate_size * (mixture.latent_size or spec.hidden_size)


def _feature_elements(spec: ModelSpec) -> int:
    return (3 if spec.mlp_gated or spec.mixture is not None else 2) * spec.hidden_size


def _head_elements(spec: ModelSpec, *, repeats_kv: bool) -> tuple[float, float]:
    """Return the elements of the attention's matrices per head to divide, and those that every rank holds."""
    hidden, latent = spec.hidden_size, spec.latent
    if latent is not None:
        query = (latent.q_latent_size or hidden) * (latent.nope_size + latent.rope_size)
        key_value = latent.latent_size * (latent.nope_size + latent.value_size)
        fixed = hidden * latent.cached_size + hidden * (latent.q_latent_size or 0)
        return query + key_value + latent.value_size * hidden, fixed
    row, heads = spec.head_dim * hidden, fmean(spec.layer_heads or (spec.num_heads,))
    if repeats_kv:
        return 2 * row * heads / spec.num_heads, 2 * row
    return 2 * row * heads / spec.num_kv_heads + 2 * row, 0


def _dense_layers(spec: ModelSpec, layers: range) -> int:
    """Return how many of the layers have a feed-forward part without experts."""
    return sum(
        (spec.topology != "single" or spec.layer_kind(layer) == "mlp")
        and (spec.mixture is None or spec.mixture.beside_mlp or not spec.mixture.is_in(layer))
        for layer in layers
    )


def _mixture_layers(spec: ModelSpec, layers: range) -> int:
    """Return how many of the layers have experts."""
    return sum(spec.mixture is not None and spec.mixture.is_in(layer) for layer in layers)


def _count_tables(spec: ModelSpec, layers: range) -> int:
    """Return how many tables of the vocabulary a stage holds: the embedding, the head, or one for both."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    return 1 if is_first and is_last and spec.tie_word_embeddings else is_first + is_last


# ---- layers among stages ---------------------------------------------------------------------------------------------


def _layers(
    spec: ModelSpec, stages: Sequence[Sequence[SplitDevice]], division: Division, sizes: ModelBytes, context: int
) -> list[range]:
    counts = list(division.layers) or [spec.num_layers]
    if not division.layers and len(stages) > 1:
        whole = [SplitDevice(sum(d.free_bytes for d in own), sum(d.bandwidth for d in own)) for own in stages]
        table = spec.vocab_size * spec.hidden_size * sizes.table
        kv = _layer_token_bytes(spec, sizes)
        kv = kv if spec.latent is None else [own * division.tensor for own in kv]
        further = _per_layer_table(spec) * sizes.matrix  # of each layer, all on the first stage
        layers = [_layer_elements(spec, layer) * sizes.matrix - further for layer in range(spec.num_layers)]
        first = table + spec.num_layers * further
        counts = solve_layers(whole, layers, kv, first, table, context, stage_starts(spec))
    return [range(a, b) for a, b in pairwise([0, *accumulate(counts)])]


def _layer_token_bytes(spec: ModelSpec, sizes: ModelBytes) -> list[float]:
    """Return the bytes of each layer's K and V of one token."""
    kept = [0.0] * spec.num_layers
    for group in kv_groups(spec):
        for layer in group.layers:
            kept[layer] = group_token_bytes(group, sizes.kv_dtype) / len(group.layers)
    return kept


# ---- one stage among ranks -------------------------------------------------------------------------------------------


def _split_stage(
    spec: ModelSpec,
    layers: range,
    devices: Sequence[SplitDevice],
    division: Division,
    sizes: ModelBytes,
    context: int,
    unit: int,
) -> list[Shard]:
    size = division.tensor
    if size == 1:
        heads = spec.num_heads if spec.latent is not None else spec.num_kv_heads
        return shards_of(spec, [heads], layers=layers)
    parts = _parts(spec, layers, division, sizes, unit)
    stage = _stage_bytes(spec, layers, size, sizes, tuple(parts.values()))
    if division.shares:
        heads_of = _division_of_heads(spec, size, division.shares)
        counts = [sizes_of(part, proportional(part.num_units, division.shares)) for part in stage.parts]
    else:
        repeats = _repeats_kv(spec, size)
        is_fixed = repeats or bool(spec.layer_kv_shapes)
        divisions = [_division_of_heads(spec, size, [d.bandwidth for d in devices])] if is_fixed else None
        heads_of, counts, _, _ = solve_stage(devices, stage, context, divisions)
    return shards_of(spec, heads_of, layers=layers, **dict(zip(parts, counts, strict=True)))


def _repeats_kv(spec: ModelSpec, size: int) -> bool:
    return spec.latent is None and size > spec.num_kv_heads


def _division_of_heads(spec: ModelSpec, size: int, weights: Sequence[float]) -> list[int]:
    """Return heads in proportion to the weights; with more ranks than KV heads, query heads within each group."""
    if spec.latent is not None:
        return proportional(spec.num_heads, weights)
    repeats = _repeats_kv(spec, size)
    if spec.layer_kv_shapes or (spec.layer_heads and repeats):  # whole heads, of one group, in every layer
        heads = even_heads(spec, size)
        assert heads is not None, "such a division is refused before"
        return heads
    if not repeats:
        return proportional(spec.num_kv_heads, weights)
    copies, group = size // spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    groups = [weights[first : first + copies] for first in range(0, size, copies)]
    return [count for own in groups for count in proportional(group, own)]


def _parts(spec: ModelSpec, layers: range, division: Division, sizes: ModelBytes, unit: int) -> dict[str, RankPart]:
    """Return what can be divided finely, by the name that `shards_of` has for it; the vocabulary comes last."""
    size, mixture = division.tensor, spec.mixture
    dense, mixed = _dense_layers(spec, layers), _mixture_layers(spec, layers)
    each = _feature_elements(spec) * sizes.matrix
    parts = {}
    if mixture is not None and takes_whole_experts(spec, division, unit):
        width = mixture.intermediate_size
        parts["experts"] = RankPart(mixture.num_experts, 1, mixed * width * each)
    elif mixture is not None:
        per_feature = mixed * mixture.num_experts * each
        parts["expert_features"] = _part(mixture.intermediate_size, unit, size, per_feature)
    if mixture is not None and mixture.shared_size:
        parts["shared_features"] = _part(mixture.shared_size, unit, size, mixed * each)
    if dense:
        parts["features"] = _part(spec.intermediate_size, unit, size, dense * each)
    tables = _count_tables(spec, layers)
    if tables:
        parts["vocab"] = RankPart(spec.vocab_size, VOCAB_UNIT, tables * spec.hidden_size * sizes.table)
    return parts


def _part(count: int, unit: int, size: int, bytes_each: float) -> RankPart:
    while unit > 1 and -(-count // unit) < UNITS_PER_RANK * size:
        unit //= 2
    return RankPart(count, unit, bytes_each)


def _stage_bytes(
    spec: ModelSpec, layers: range, size: int, sizes: ModelBytes, parts: tuple[RankPart, ...]
) -> StageBytes:
    repeats = _repeats_kv(spec, size)
    attending = sum(map(spec.has_attention, layers))
    head, fixed = (n * attending * sizes.matrix for n in _head_elements(spec, repeats_kv=repeats))
    further = _per_layer_table(spec)
    even = sum(_even_elements(spec, layer) - further for layer in layers)
    even += (layers.start == 0) * spec.num_layers * further
    fixed += even * sizes.matrix / size
    token = sum(_layer_token_bytes(spec, sizes)[layers.start : layers.stop])
    if spec.latent is not None or repeats:
        return StageBytes(spec.num_heads, head, 0.0, fixed, token / spec.num_kv_heads, parts)
    return StageBytes(spec.num_kv_heads, head, token / spec.num_kv_heads, fixed, 0.0, parts)
