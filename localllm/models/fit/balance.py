"""The solver that divides one pipeline stage among ranks, and layers among stages, by memory and bandwidth.

A stage consists of heads, which only whole numbers can divide, and of parts that are divided finely: features of the
feed-forward part, experts, rows of the vocabulary. For a division of the heads, the fine parts fill up the ranks
until all of them take the same time per token, so they make up for what whole heads divide unevenly. The solver tries
divisions of the heads and keeps the fastest one that holds the wanted context, or else the one that holds most tokens.

    time of a rank = (its weights + the KV cache of one wanted context) / its memory bandwidth

Does not know: models (shard_sizes.py turns one into heads and parts), torch, what else a device holds (plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations
from typing import NamedTuple

MOST_DIVISIONS = 500
"""Divisions of the heads that are all tried; among more, the solver climbs from the most proportional ones."""
FILLED = 48  # divisions of the heads, the best by estimate, for which the fine parts are divided in whole units
CLIMBS = 24
NEARLY_AS_FAST = 1.005
"""Among divisions within this factor of the fastest, the one whose heads follow the bandwidth most closely is chosen:
its KV cache grows evenly beyond the wanted context."""


@dataclass(frozen=True, slots=True)
class SplitDevice:
    """The memory and the speed of a rank's device."""

    free_bytes: float  # for weights and KV cache: what the rank holds besides is already subtracted
    bandwidth: float  # bytes/s of its memory; only the proportion counts


@dataclass(frozen=True, slots=True)
class RankPart:
    """One kind of weights that can be divided finely."""

    count: int  # features, experts or rows
    unit: int  # the least that is given to a rank; the last unit may be short
    bytes_each: float  # weights of one feature, expert or row

    @property
    def num_units(self) -> int:
        return -(-self.count // self.unit)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The weights and the KV cache of one pipeline stage, by what can be divided."""

    heads: int
    head_bytes: float  # weights of one head
    head_kv_bytes: float  # KV cache of one head per token
    fixed_bytes: float  # weights that every rank holds
    fixed_kv_bytes: float  # KV cache per token that every rank holds
    parts: tuple[RankPart, ...]  # the last one, the finest, evens out the rounding of the others

    @property
    def fine_bytes(self) -> float:
        return sum(part.count * part.bytes_each for part in self.parts)


class StageSplit(NamedTuple):
    """The counts of each rank."""

    heads: list[int]
    parts: list[list[int]]  # per part of `StageBytes.parts`, a count for each rank
    tokens: float  # context of one request that every rank holds, at most the wanted one; negative: weights do not fit
    time: float  # of the slowest rank


def solve_stage(
    devices: Sequence[SplitDevice],
    stage: StageBytes,
    context: int,
    divisions: Sequence[Sequence[int]] | None = None,
) -> StageSplit:
    """Return the best division of a stage. divisions: heads per rank to choose from; None: all with at least one."""
    size = len(devices)

    def rate(heads: Sequence[int]) -> tuple[float, float]:
        """Return the negative context that this division holds, and its time: smaller is better."""
        tokens = min(context, _most_tokens(devices, stage, heads))
        loads = _loads(stage, heads, max(0.0, tokens))
        level = _level(devices, loads, stage.fine_bytes)
        return -tokens, max(level, *(load / d.bandwidth for load, d in zip(loads, devices, strict=True)))

    if divisions is not None:
        rated = {tuple(heads): rate(heads) for heads in divisions}
    elif math.comb(stage.heads - 1, size - 1) <= MOST_DIVISIONS:
        rated = {heads: rate(heads) for heads in compositions(stage.heads, size)}
    else:
        rated = _climb(devices, stage, rate)
    best = _in_order(devices, rated)[:FILLED]
    filled = [_fill(devices, stage, heads, -rated[heads][0], context) for heads in best]
    longest = max(split.tokens for split in filled)
    long = [split for split in filled if split.tokens >= longest]
    fastest = min(split.time for split in long)
    return next(split for split in long if split.time <= fastest * NEARLY_AS_FAST)


def _in_order(
    devices: Sequence[SplitDevice], rated: Mapping[tuple[int, ...], tuple[float, float]]
) -> list[tuple[int, ...]]:
    """Return the divisions, the best first: those that are nearly as fast as the fastest by how even they are."""
    tokens, time = min(rated.values())

    def rank(heads: tuple[int, ...]) -> tuple[float, ...]:
        found, at = rated[heads]
        is_fast = found <= tokens and at <= time * NEARLY_AS_FAST
        uneven = sum(count * count / device.bandwidth for count, device in zip(heads, devices, strict=True))
        return (found, 0, uneven, *(-count for count in heads)) if is_fast else (found, at, uneven)

    return sorted(rated, key=rank)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered split of `total` into `parts` counts of at least 1. Do not rely on the order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def proportional(units: int, weights: Sequence[float], least: int = 1) -> list[int]:
    """Divide whole units in proportion to the weights, each at least `least` where there are enough of them."""
    size = len(weights)
    least = least if units >= least * size else 0
    whole = sum(weights) or 1.0
    ideal = [units * weight / whole for weight in weights]
    counts = [max(least, math.floor(share)) for share in ideal]
    while sum(counts) < units:
        index = max(range(size), key=lambda i: ideal[i] - counts[i])
        counts[index] += 1
    while sum(counts) > units:
        index = max((i for i in range(size) if counts[i] > least), key=lambda i: counts[i] - ideal[i])
        counts[index] -= 1
    return counts


def sizes_of(part: RankPart, units: Sequence[int]) -> list[int]:
    """Return the counts of a part from its units; the last unit may be short."""
    ends = [min(part.count, part.unit * end) for end in accumulate(units)]
    return [b - a for a, b in pairwise([0, *ends])]


# ---- one division of the heads ---------------------------------------------------------------------------------------


def _loads(stage: StageBytes, heads: Sequence[int], tokens: float) -> list[float]:
    """Return the bytes of each rank without the fine parts, with the KV cache of `tokens` tokens."""
    fixed = stage.fixed_bytes + stage.fixed_kv_bytes * tokens
    return [fixed + (stage.head_bytes + stage.head_kv_bytes * tokens) * count for count in heads]


def _most_tokens(devices: Sequence[SplitDevice], stage: StageBytes, heads: Sequence[int]) -> float:
    """Return the longest context of one request that fits, whatever the fine parts' division; negative: none does."""
    loads = _loads(stage, heads, 0)
    per_token = [stage.fixed_kv_bytes + stage.head_kv_bytes * count for count in heads]
    left = [device.free_bytes - load for device, load in zip(devices, loads, strict=True)]
    rest = sum(left) - stage.fine_bytes
    if min(left) < 0 or rest < 0:
        return min(*left, rest)  # bytes that are missing: more is better here too
    if not sum(per_token):
        return math.inf
    return min(rest / sum(per_token), *(free / token for free, token in zip(left, per_token, strict=True) if token))


def _level(devices: Sequence[SplitDevice], loads: Sequence[float], amount: float) -> float:
    """Return the least time at which the fine parts fit in between loads and bandwidth, or memory if that is less."""
    ranks = [(load, max(0.0, d.free_bytes - load), d.bandwidth) for load, d in zip(loads, devices, strict=True)]
    if sum(space for _, space, _ in ranks) < amount:  # more than there is: as if each memory had no end
        ranks = [(load, math.inf, bandwidth) for load, _, bandwidth in ranks]
    low, high = 0.0, (max(loads) + amount) / min(bandwidth for _, _, bandwidth in ranks)
    for _ in range(40):
        middle = (low + high) / 2
        taken = sum(min(space, max(0.0, middle * bandwidth - load)) for load, space, bandwidth in ranks)
        low, high = (low, middle) if taken >= amount else (middle, high)
    return high


def _shares(devices: Sequence[SplitDevice], loads: Sequence[float], amount: float) -> list[float]:
    """Return the bytes of `amount` for each rank at the common level."""
    level = _level(devices, loads, amount)
    has_space = sum(max(0.0, d.free_bytes - load) for load, d in zip(loads, devices, strict=True)) >= amount
    return [
        min(max(0.0, d.free_bytes - load) if has_space else math.inf, max(0.0, level * d.bandwidth - load))
        for load, d in zip(loads, devices, strict=True)
    ]


def _fill(
    devices: Sequence[SplitDevice], stage: StageBytes, heads: Sequence[int], tokens: float, context: int
) -> StageSplit:
    """Divide the fine parts in whole units for this division of the heads and this many tokens."""
    tokens = max(0.0, tokens)
    loads = _loads(stage, heads, tokens)
    shares = _shares(devices, loads, stage.fine_bytes)
    units: list[list[int]] = []
    for part in stage.parts:
        if part is stage.parts[-1]:
            shares = _shares(devices, loads, part.count * part.bytes_each)
        units.append(proportional(part.num_units, shares))
        loads = [load + n * part.bytes_each for load, n in zip(loads, sizes_of(part, units[-1]), strict=True)]
    _move_what_does_not_fit(devices, stage, loads, units)
    counts = [sizes_of(part, each) for part, each in zip(stage.parts, units, strict=True)]
    time = max(load / device.bandwidth for load, device in zip(loads, devices, strict=True))
    ranks = zip(devices, heads, loads, strict=True)
    held = [_tokens_held(device, stage, count, load, tokens) for device, count, load in ranks]
    return StageSplit(list(heads), counts, min(context, *held), time)


def _tokens_held(device: SplitDevice, stage: StageBytes, heads: int, load: float, tokens: float) -> float:
    """Return the tokens that a rank holds whose load includes `tokens` of them; negative: bytes that are missing."""
    per_token = stage.fixed_kv_bytes + stage.head_kv_bytes * heads
    left = device.free_bytes - load + tokens * per_token
    return left if left < 0 else left / per_token if per_token else math.inf


def _move_what_does_not_fit(
    devices: Sequence[SplitDevice], stage: StageBytes, loads: list[float], units: list[list[int]]
) -> None:
    """Move units from ranks whose rounded share exceeds their memory to ranks with space, where there is any."""
    moves = sum(part.num_units for part in stage.parts)
    for _ in range(moves):
        left = [device.free_bytes - load for device, load in zip(devices, loads, strict=True)]
        full, free = left.index(min(left)), left.index(max(left))
        sizes = [part.unit * part.bytes_each for part in stage.parts]
        movable = [i for i, size in enumerate(sizes) if units[i][full] > 1 and size <= left[free]]
        if left[full] >= 0 or not movable:
            return
        enough = [i for i in movable if sizes[i] >= -left[full]]
        index = min(enough, key=sizes.__getitem__) if enough else max(movable, key=sizes.__getitem__)
        units[index][full] -= 1
        units[index][free] += 1
        loads[full] -= sizes[index]
        loads[free] += sizes[index]


# ---- many divisions of the heads -------------------------------------------------------------------------------------


def _climb(
    devices: Sequence[SplitDevice], stage: StageBytes, rate: Callable[[Sequence[int]], tuple[float, float]]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Rate divisions near those in proportion to bandwidth, to memory and to mixes of both, and follow the best."""
    rated: dict[tuple[int, ...], tuple[float, float]] = {}
    speed = sum(device.bandwidth for device in devices)
    memory = sum(max(0.0, device.free_bytes) for device in devices) or 1.0
    for mix in (0.0, 0.25, 0.5, 0.75, 1.0):
        ideal = [(1 - mix) * d.bandwidth / speed + mix * max(0.0, d.free_bytes) / memory for d in devices]
        start = tuple(proportional(stage.heads, ideal))
        rated.setdefault(start, rate(start))
    for _ in range(CLIMBS):
        best = min(rated, key=rated.__getitem__)
        found = [heads for heads in _neighbours(best) if heads not in rated]
        rated |= {heads: rate(heads) for heads in found}
        if min(rated, key=rated.__getitem__) == best:
            return rated
    return rated


def _neighbours(heads: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source, target in permutations(range(len(heads)), 2):
        if heads[source] > 1:
            moved = list(heads)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


# ---- layers among stages ---------------------------------------------------------------------------------------------


def solve_layers(
    stages: Sequence[SplitDevice],
    layer_bytes: Sequence[float],
    layer_kv_bytes: Sequence[float],
    first_bytes: float,
    last_bytes: float,
    context: int,
    starts: Sequence[int],
) -> list[int]:
    """Return the layers of each stage, so that the slowest stage is as fast as possible.

    stages: memory and bandwidth of all ranks of a stage together. first_bytes: what the first stage holds besides its
    layers; last_bytes: the last one. starts: layers at which a stage may begin. Where the wanted context does not fit,
    the longest one that fits is used.
    Raises `ValueError` if there are fewer layers than stages, or too few of `starts`.
    """
    if len(starts) < len(stages) - 1:
        raise ValueError(f"{len(stages)} stages of {len(layer_bytes)} layers, which can begin at {list(starts)}")

    def ends_of(tokens: int, memory: float = 1.0) -> list[int] | None:
        held = [0.0, *accumulate(size + tokens * kv for size, kv in zip(layer_bytes, layer_kv_bytes, strict=True))]
        devices = [SplitDevice(max(1.0, stage.free_bytes) * memory, stage.bandwidth) for stage in stages]
        return _partition(devices, held, first_bytes, last_bytes, starts)

    found = ends_of(context)
    low, high = -1, context
    while found is None and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if ends_of(middle) is not None else (low, middle)
    ends = found or (ends_of(low) if low >= 0 else None) or ends_of(0, math.inf)
    assert ends is not None
    return [b - a for a, b in pairwise([0, *ends])]


def _partition(
    stages: Sequence[SplitDevice], held: Sequence[float], first_bytes: float, last_bytes: float, starts: Sequence[int]
) -> list[int] | None:
    """Return the end of each stage by dynamic programming over boundaries; None: it does not fit.

    held: bytes of the first n layers. Minimises the slowest stage, then the sum of squares, which evens out the rest.
    """
    layers, last = len(held) - 1, len(stages) - 1
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for index, stage in enumerate(stages):
        more = (first_bytes if index == 0 else 0.0) + (last_bytes if index == last else 0.0)
        ends = starts if index < last else (layers,)
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            for begin, (slowest, squares, cuts) in best.items():
                size = held[end] - held[begin] + more
                if begin >= end or size > stage.free_bytes:
                    continue
                time = size / stage.bandwidth
                found = (max(slowest, time), squares + time * time, (*cuts, end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return list(best[layers][2]) if layers in best else None
