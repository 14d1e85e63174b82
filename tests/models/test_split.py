"""The solver: as good as trying everything on small worlds, within memory, and fast on large ones."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.models.fit.balance import (
    RankPart,
    SplitDevice,
    StageBytes,
    compositions,
    proportional,
    sizes_of,
    solve_layers,
    solve_stage,
)
from localllm.models.fit.shard_sizes import (
    PLAIN_UNIT,
    Division,
    count_shard,
    feature_unit,
    model_bytes,
    split_in_words,
    split_model,
    takes_whole_experts,
)
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from tests.draws import draws
from tests.models.harness import GIB, LLAMA_8B, QWEN_05B, WEIGHTS

LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, intermediate_size=28_672, num_heads=64)
GPU_24, GPU_12 = SplitDevice(22 * GIB, 936e9), SplitDevice(11 * GIB, 360e9)


def shards(spec: ModelSpec, devices: Sequence[SplitDevice], stored: float = 16 * GIB, **asked: object) -> list[Shard]:
    division = Division(**{"tensor": len(devices), **asked})  # type: ignore[arg-type]
    return split_model(spec, devices, division, model_bytes(spec, stored, 2, "bfloat16"), 16_384)


# ---- against brute force ---------------------------------------------------------------------------------------------


def brute_force(devices: Sequence[SplitDevice], stage: StageBytes, context: int) -> float | None:
    """Return the least time of all divisions of heads and features, with the fine rows filled in as well as possible;
    None: nothing fits.
    """
    features, rows = stage.parts
    times = []
    for heads in compositions(stage.heads, len(devices)):
        for units in compositions(features.num_units, len(devices)):
            loads = [
                stage.fixed_bytes
                + head * (stage.head_bytes + stage.head_kv_bytes * context)
                + unit * features.unit * features.bytes_each
                for head, unit in zip(heads, units, strict=True)
            ]
            times += _fill_rows(devices, loads, rows)
    return min(times, default=None)


def _fill_rows(devices: Sequence[SplitDevice], loads: list[float], rows: RankPart) -> Iterator[float]:
    """Give each unit of rows to the rank that stays the fastest with it, which is optimal for equal units."""
    size = rows.unit * rows.bytes_each
    for _ in range(rows.num_units):
        with_one = [(load + size) / device.bandwidth for load, device in zip(loads, devices, strict=True)]
        holds = [i for i, device in enumerate(devices) if loads[i] + size <= device.free_bytes]
        if not holds:
            return
        loads[min(holds, key=with_one.__getitem__)] += size
    if all(load <= device.free_bytes for load, device in zip(loads, devices, strict=True)):
        yield max(load / device.bandwidth for load, device in zip(loads, devices, strict=True))


def loads_of(stage: StageBytes, heads: Sequence[int], parts: Sequence[Sequence[int]], context: int) -> list[float]:
    per_head = stage.head_bytes + (stage.head_kv_bytes * context)
    fine = [
        sum(part.bytes_each * count for part, count in zip(stage.parts, own, strict=True))
        for own in zip(*parts, strict=True)
    ]
    return [stage.fixed_bytes + per_head * count + more for count, more in zip(heads, fine, strict=True)]


@pytest.mark.parametrize("seed", range(10))
def test_as_good_as_trying_everything(seed: int) -> None:
    """Feasible if brute force is, with a unit of rows to spare on each rank, and at most 3 % slower."""
    rng = random.Random(seed)
    size, context = rng.choice((2, 2, 3, 3, 4)), 1000
    stage = StageBytes(
        rng.randint(size, 8), rng.uniform(20, 60), rng.uniform(0.001, 0.02), rng.uniform(0, 20), 0.0,
        (
            RankPart(rng.choice((10, 12) if size < 4 else (8,)), 1, rng.uniform(10, 20)),
            RankPart(90, 1, rng.uniform(0.5, 1.0)),
        ),
    )  # fmt: skip
    total = size * stage.fixed_bytes + stage.heads * (stage.head_bytes + stage.head_kv_bytes * context)
    spare = rng.uniform(1.1, 2.0) * (total + stage.fine_bytes)
    weights = [rng.uniform(1, 3) for _ in range(size)]
    devices = [SplitDevice(spare * w / sum(weights), rng.uniform(1, 4)) for w in weights]
    unit = stage.parts[1].bytes_each
    tight = [SplitDevice(device.free_bytes - unit, device.bandwidth) for device in devices]
    best, best_tight = brute_force(devices, stage, context), brute_force(tight, stage, context)
    found = solve_stage(devices, stage, context)
    loads = loads_of(stage, found.heads, found.parts, context)
    fits = all(load <= device.free_bytes + 1e-6 for load, device in zip(loads, devices, strict=True))
    assert fits or best_tight is None
    if best is not None and fits:
        time = max(load / device.bandwidth for load, device in zip(loads, devices, strict=True))
        assert time <= 1.03 * best


@draws(60)
@given(st.integers(2, 4), st.integers(0, 2**32))
def test_layers_are_divided_as_well_as_can_be(stages: int, seed: int) -> None:
    rng = random.Random(seed)
    layers = [rng.uniform(1, 3) for _ in range(rng.randint(stages, 10))]
    devices = [SplitDevice(rng.uniform(0.4, 2) * sum(layers), rng.uniform(1, 3)) for _ in range(stages)]
    first, last = rng.uniform(0, 3), rng.uniform(0, 3)

    def time(counts: Sequence[int]) -> float | None:
        ends = [sum(counts[: index + 1]) for index in range(stages)]
        held = [sum(layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        held[0] += first
        held[-1] += last
        fits = all(size <= device.free_bytes for size, device in zip(held, devices, strict=True))
        return max(size / device.bandwidth for size, device in zip(held, devices, strict=True)) if fits else None

    possible = [found for counts in compositions(len(layers), stages) if (found := time(counts)) is not None]
    counts = solve_layers(devices, layers, [0.0] * len(layers), first, last, 0, range(1, len(layers)))
    assert sum(counts) == len(layers)
    assert min(counts) >= 1
    if possible:
        assert time(counts) == pytest.approx(min(possible))


def test_the_longest_context_is_taken_where_the_wanted_one_does_not_fit() -> None:
    devices = [SplitDevice(100, 1), SplitDevice(100, 1)]
    assert solve_layers(devices, [10.0] * 8, [1.0] * 8, 30, 0, 1000, range(1, 8)) == [3, 5]
    stage = StageBytes(4, 10, 1.0, 0, 0.0, (RankPart(100, 1, 1.0),))
    found = solve_stage([SplitDevice(200, 1), SplitDevice(40, 1)], stage, 1000)
    assert found.heads == [3, 1]
    assert found.tokens == pytest.approx((240 - 140) / 4, rel=0.05)


# ---- models ----------------------------------------------------------------------------------------------------------


def test_equal_devices_get_equal_shares() -> None:
    for size in (2, 4, 8):
        found = shards(LLAMA_8B, [GPU_24] * size)
        assert {len(shard.kv_heads) for shard in found} == {8 // size}
        assert {len(shard.features) for shard in found} == {14_336 // size}


def test_the_feed_forward_part_makes_up_for_whole_heads() -> None:
    found = shards(LLAMA_8B, [GPU_24] * 3)
    assert [len(shard.kv_heads) for shard in found] == [3, 3, 2]
    assert len(found[2].features) > len(found[0].features)
    held = [count_shard(LLAMA_8B, shard, 16 * GIB, "bfloat16") for shard in found]
    kv = [len(shard.kv_heads) * 2 * 32 * 128 * 2 * 16_384 for shard in found]
    whole = [a + b for a, b in zip(held, kv, strict=True)]
    assert max(whole) / min(whole) < 1.01


def test_unequal_devices_take_the_same_time() -> None:
    found = shards(LLAMA_8B, [GPU_24, GPU_12])
    assert [len(shard.kv_heads) for shard in found] == [6, 2]
    held = [count_shard(LLAMA_8B, shard, 16 * GIB, "bfloat16") for shard in found]
    kv = [len(shard.kv_heads) * 2 * 32 * 128 * 2 * 16_384 for shard in found]
    times = [(a + b) / d.bandwidth for a, b, d in zip(held, kv, (GPU_24, GPU_12), strict=True)]
    assert max(times) / min(times) < 1.01


@draws(40)
@given(st.lists(st.tuples(st.floats(1, 24), st.floats(100, 2000)), min_size=1, max_size=6), st.booleans(), st.data())
def test_every_share_adds_up_and_is_whole_units(
    given_devices: list[tuple[float, float]], is_mixture: bool, data: st.DataObject
) -> None:
    spec = replace(LLAMA_8B, num_layers=6, intermediate_size=928, vocab_size=3001)
    if is_mixture:
        mixture = MixtureSpec(8, 2, 96, layers=(False, *[True] * 5), shared_size=192)
        spec = replace(spec, mixture=mixture)
    size = len(given_devices)
    stages = data.draw(st.integers(1, 3))
    devices = [SplitDevice(free * GIB, speed) for free, speed in given_devices] * stages
    whole_experts = data.draw(st.sampled_from((None, False, True)))
    found = shards(spec, devices, tensor=size, pipeline=stages, whole_experts=whole_experts, stored=4 * GIB)
    assert len(found) == size * stages
    for first in range(0, len(found), size):
        stage = found[first : first + size]
        for name, total in (("kv_heads", 8), ("heads", 32), ("features", 928), ("vocab", 3001)):
            ranges = [getattr(shard, name) for shard in stage]
            assert [index for own in ranges for index in own] == list(range(total))
            assert all(len(own) for own in ranges)
        assert all(shard.vocab.start % 64 == 0 for shard in stage)
        if is_mixture:
            elements = sum(len(shard.experts) * len(shard.expert_features) for shard in stage)
            assert elements == 8 * 96
            assert sum(len(shard.shared_features) for shard in stage) == 192
    assert [index for shard in found[::size] for index in shard.layers] == list(range(6))


@pytest.mark.parametrize(("size", "heads"), [(4, [7, 7, 7, 7]), (6, [3, 2, 2, 3, 2, 2]), (2, [7, 7])])
def test_repeated_kv_heads(size: int, heads: list[int]) -> None:
    found = shards(QWEN_05B, [GPU_12] * size, stored=GIB)
    if size > QWEN_05B.num_kv_heads:
        assert all(len(shard.kv_heads) == 1 for shard in found)
        assert sum(len(shard.heads) for shard in found) == 14
        heads = heads if size == 6 else [4, 3, 4, 3]
    assert [len(shard.heads) for shard in found] == heads


def test_a_repeated_kv_heads_queries_follow_the_bandwidth_of_the_ranks_that_share_it() -> None:
    found = shards(QWEN_05B, [GPU_12, GPU_24, GPU_24, GPU_12], stored=GIB)
    assert [len(shard.heads) for shard in found] == [2, 5, 5, 2]


def test_latent_attention_is_divided_by_query_heads() -> None:
    spec = replace(
        LLAMA_8B, num_heads=16, num_kv_heads=1, head_dim=576,
        latent=LatentSpec(latent_size=512, rope_size=64, nope_size=128, value_size=128),
    )  # fmt: skip
    found = shards(spec, [GPU_24, GPU_24, GPU_24])
    assert sorted(len(shard.heads) for shard in found) == [5, 5, 6]
    assert {len(shard.kv_heads) for shard in found} == {1}


def test_given_shares_are_rounded_to_units_and_told() -> None:
    found = shards(LLAMA_8B, [GPU_24, GPU_24], shares=(3, 1))
    assert split_in_words(LLAMA_8B, found) == "6 + 2 of 8 KV heads, 10,752 + 3,584 of 14,336 features"
    assert [len(shard.vocab) for shard in found] == [96_192, 32_064]
    found = shards(LLAMA_70B, [GPU_24] * 2, tensor=1, pipeline=2, layers=(50, 30))
    assert split_in_words(LLAMA_70B, found) == "50 + 30 of 80 layers"


def test_a_small_device_gets_fewer_layers() -> None:
    found = shards(LLAMA_70B, [GPU_24, GPU_12, GPU_24], tensor=1, pipeline=3, stored=39 * GIB)
    counts = [len(shard.layers) for shard in found]
    assert sum(counts) == 80
    assert counts[1] < min(counts[0], counts[2])


def test_whole_experts_where_slices_would_be_narrow() -> None:
    wide, narrow = (replace(LLAMA_8B, mixture=MixtureSpec(6, 2, width, layers=(True,) * 32)) for width in (1024, 192))
    assert not takes_whole_experts(wide, Division(4), PLAIN_UNIT)
    assert takes_whole_experts(narrow, Division(4), PLAIN_UNIT)
    assert takes_whole_experts(wide, Division(4, whole_experts=True), PLAIN_UNIT)
    assert not takes_whole_experts(narrow, Division(4, whole_experts=False), PLAIN_UNIT)
    assert not takes_whole_experts(narrow, Division(8), PLAIN_UNIT)  # more ranks than experts
    found = shards(narrow, [GPU_24] * 4)
    assert sorted(len(shard.experts) for shard in found) == [1, 1, 2, 2]
    assert {len(shard.expert_features) for shard in found} == {192}


@pytest.mark.parametrize(
    ("quantization", "at_load", "unit"),
    [
        (None, None, 32),
        (None, "int4", 128),
        ({"quant_method": "awq", "group_size": 64}, None, 64),
        ({"quant_method": "gptq", "group_size": -1}, None, 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, 128),
        ({"quant_method": "gguf"}, None, 256),
    ],
)
def test_features_are_cut_between_stored_blocks(quantization: dict[str, object], at_load: str, unit: int) -> None:
    assert feature_unit(quantization, at_load) == unit
    spec = replace(LLAMA_8B, intermediate_size=29_568)
    sizes = model_bytes(spec, 8 * GIB, 2, "bfloat16")
    found = split_model(spec, [GPU_24, GPU_24], Division(2), sizes, 4096, unit)
    assert found[0].features.stop % unit == 0


def test_quantised_bytes_are_those_of_the_matrices() -> None:
    """The tables stay in 16 bits: a share of rows costs as much as without quantisation."""
    sizes = model_bytes(LLAMA_8B, WEIGHTS[LLAMA_8B.architecture] / 3, 2, "bfloat16")
    assert sizes.table == 2
    assert 0.3 < sizes.matrix < 0.6


@pytest.mark.parametrize("free", [22, 2.6])
def test_large_worlds_are_solved_in_time(free: float) -> None:
    """F12: 100 ms on two quiet cores; three times as much here, since other programs run beside the test."""
    many_heads = replace(LLAMA_8B, num_kv_heads=32)
    devices = [SplitDevice(free * GIB * (1 + i % 3 / 4), (936e9, 360e9)[i % 2]) for i in range(8)]
    began = time.process_time()
    shards(many_heads, devices)
    shards(replace(LLAMA_70B, num_layers=126), devices, tensor=1, pipeline=8)
    assert time.process_time() - began < 0.3


def test_units_in_proportion() -> None:
    assert proportional(8, [3, 1]) == [6, 2]
    assert proportional(8, [100, 1, 1]) == [6, 1, 1]
    assert proportional(2, [1, 1, 1]) == [1, 1, 0]
    assert sizes_of(RankPart(515, 64, 1), [5, 4]) == [320, 195]
