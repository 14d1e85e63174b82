"""The plan of several ranks: each within its own memory, the automatic choice and its reason, refusals with numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm import cli
from localllm.cli import parse
from localllm.config.flags import settings_from
from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.llm import _engine_config
from localllm.machine.hardware import Gpu, Hardware
from localllm.machine.links import Link, Place
from localllm.models.fit import Measured, MemoryPlan, estimate, plan_memory
from localllm.models.fit.cache_sizes import split_of
from localllm.models.fit.checkpoint import count_resident, estimate_checkpoint
from localllm.models.fit.devices import NVLINK, PCIE, PEERS, UNKNOWN, choose_gpus, connection
from localllm.models.fit.rank_budget import PlanInputs, RankMemory
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.units import format_bytes
from tests.draws import draws
from tests.models.harness import GIB, LLAMA_8B, NO_GPU, QWEN_05B, WEIGHTS

LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, intermediate_size=28_672, num_heads=64)
RTX_3090, RTX_3060 = ("RTX 3090", 24, 23.0, 936), ("RTX 3060", 12, 11.4, 360)
Card = tuple[str, int, float, int | None]


def machine(*cards: Card, kind: str = "NV4", peers: bool | None = True) -> Hardware:
    """Return a machine with these cards (name, GiB in all, GiB free, GB/s), all connected alike."""
    gpus = tuple(
        Gpu(
            index, name, total * GIB, int(free * GIB), (8, 6), "570", f"GPU-{index}{index}aa",
            Place(f"0000:0{index}:00.0", index // 2, speed and speed * 1e9),
            tuple(Link(peer, kind, peers) for peer in range(len(cards)) if peer != index),
        )
        for index, (name, total, free, speed) in enumerate(cards)
    )  # fmt: skip
    return replace(NO_GPU, gpus=gpus, shm_free_bytes=8 * GIB)


def plan(spec: ModelSpec, hardware: Hardware, stored: int | None = None, **asked: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(**asked), spec, stored or WEIGHTS[spec.architecture], hardware)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@draws(25)
@given(
    st.lists(st.tuples(st.floats(5, 40), st.sampled_from((360, 936, None))), min_size=2, max_size=4),
    st.sampled_from(((0, 1), (1, 0), (2, 0))),
    st.sampled_from((None, 2000, 16_000)),
)
def test_each_rank_stays_within_its_own_memory(
    cards: list[tuple[float, int | None]], sizes: tuple[int, int], context: int | None
) -> None:
    hardware = machine(*(("Card", 40, free, speed) for free, speed in cards))
    tensor, pipeline = (max(1, len(cards) * size // 2 if size == 2 else len(cards) * size) for size in sizes)
    asked = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_model_len": context}
    try:
        made = plan(LLAMA_8B, hardware, **asked)
    except DoesNotFit:
        return
    ranks = made.ranks or ()
    for rank in ranks:
        assert rank.total_bytes + rank.reserve_bytes <= rank.free_bytes
        assert rank.kv_bytes == made.num_blocks[0] * made.block_size * _kv_of(rank.shard, 2)
    if ranks:
        for name in ("weights_bytes", "kv_bytes", "activation_bytes", "graph_bytes", "comm_bytes", "free_bytes"):
            assert getattr(made, name) == sum(getattr(rank, name) for rank in ranks)
    assert made.num_kv_tokens >= made.max_model_len


def _kv_of(shard: Any, size: int) -> int:
    return 2 * len(shard.layers) * len(shard.kv_heads) * 128 * size


def test_blocks_are_those_of_the_rank_with_the_least_space() -> None:
    """One block more would not fit on one of the ranks."""
    made = plan(LLAMA_8B, machine(RTX_3090, RTX_3060), tensor_split=(1, 1))
    left = [0.9 * (rank.free_bytes - rank.reserve_bytes) - rank.total_bytes for rank in made.ranks]
    blocks = [space / (rank.kv_bytes / made.num_blocks[0]) for space, rank in zip(left, made.ranks, strict=True)]
    assert 0 <= min(blocks) < 2 < max(blocks)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_on_a_cpu_share_its_memory(tensor: int, pipeline: int) -> None:
    asked = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "dtype": "bfloat16"}
    made = plan(LLAMA_8B, replace(NO_GPU, ram_available_bytes=22 * GIB), **asked)
    assert (made.device, len(made.ranks)) == ("cpu", tensor * pipeline)
    assert sum(rank.total_bytes for rank in made.ranks) == made.total_bytes
    assert made.total_bytes + made.reserve_bytes <= made.free_bytes == 22 * GIB
    with pytest.raises(DoesNotFit, match="in this machine's memory"):
        plan(LLAMA_8B, replace(NO_GPU, ram_available_bytes=17 * GIB), **asked)


def test_one_device_is_planned_as_before() -> None:
    for hardware in (NO_GPU, machine(RTX_3090)):
        assert plan(QWEN_05B, hardware) == plan(QWEN_05B, hardware, tensor_parallel_size=1)
        assert plan(QWEN_05B, hardware).ranks == ()
        assert plan(QWEN_05B, hardware).comm_bytes == 0


def test_only_the_first_shard_of_the_last_stage_samples() -> None:
    made = plan(LLAMA_8B, machine(*[RTX_3090] * 4), tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [rank.stage for rank in made.ranks] == [0, 0, 1, 1]
    assert [rank.shard.index for rank in made.ranks] == [0, 1, 0, 1]
    split = split_of(kv_groups(LLAMA_8B), 64, 2048, 256)
    inputs = PlanInputs(EngineConfig(), LLAMA_8B, "bfloat16", "bfloat16", 64, 2048, lambda *_: GIB, split)
    ranks = [RankMemory(inputs, machine(RTX_3090).gpus[0], 20 * GIB, rank.shard) for rank in made.ranks]
    assert [rank.step.samples for rank in ranks] == [False, False, True, False]
    logits = [rank.step.sampling_bytes() for rank in ranks]
    assert logits[2] > 4 * logits[3] > 4 * logits[0]
    assert logits[0] == logits[1]
    assert ranks[2].graphs > ranks[3].graphs


def test_measured_numbers_replace_each_ranks_own_and_shards_stay() -> None:
    hardware = machine(RTX_3090, RTX_3060)
    made = plan(LLAMA_8B, hardware, tensor_parallel_size=2)
    seen = [Measured(rank.weights_bytes, 100_000_000, 300_000_000) for rank in made.ranks]
    less = replace(hardware, gpus=hardware.gpus[::-1])  # the ranks are found by their device
    again = plan_memory(EngineConfig(), LLAMA_8B, 0, less, measured=seen, ranks=made.ranks)
    assert again.is_measured
    assert [rank.shard for rank in again.ranks] == [rank.shard for rank in made.ranks]
    assert [rank.device for rank in again.ranks] == ["cuda:0", "cuda:1"]
    assert {rank.comm_bytes for rank in again.ranks} == {300_000_000}
    assert {rank.activation_bytes for rank in again.ranks} == {100_000_000}
    assert again.num_blocks > made.num_blocks
    worse = [seen[0], replace(seen[1], activation_bytes=2 * GIB)]
    assert plan_memory(EngineConfig(), LLAMA_8B, 0, hardware, measured=worse, ranks=made.ranks).num_blocks < (
        made.num_blocks
    )


def test_weights_of_a_rank_are_what_its_loader_holds(tiny_llama_path: Path) -> None:
    import torch

    from localllm.models.loader import resident_bytes

    spec, (found, *others) = estimate_checkpoint(
        tiny_llama_path, EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2), NO_GPU
    )
    assert found.plan is not None
    assert others == []
    for rank in found.plan.ranks:
        held = resident_bytes(
            tiny_llama_path, spec, torch.device("cpu"), torch.float32,
            max_model_len=found.plan.max_model_len, shard=rank.shard,
        )  # fmt: skip
        assert rank.weights_bytes == held
    whole = count_resident(tiny_llama_path, spec)("cpu", "float32", found.plan.max_model_len, None)
    assert whole < found.plan.weights_bytes < 2 * whole  # norms and rotary tables are repeated


# ---- the automatic choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "stored", "ranks", "said"),
    [
        (machine(RTX_3090, RTX_3060), 16, [], "One of 2 GPUs holds the model"),
        (machine(RTX_3060, RTX_3060), 16, [(0, 2), (0, 2)], "Tensor parallelism over 2 GPUs, connected by NVLink."),
        (machine(RTX_3060, RTX_3060, kind="PIX"), 16, [(0, 2), (0, 2)], "connected by PCIe."),
        (machine(RTX_3060, RTX_3060, kind="SYS", peers=False), 16, [(0, 1), (1, 1)], "PCIe without peer access"),
        (machine(RTX_3060, RTX_3060, kind="?", peers=None), 16, [(0, 1), (1, 1)], "driver does not describe"),
        (machine(*[("Card", 12, 11.4, None)] * 2), 16, [(0, 2), (0, 2)], "NVLink"),
        (machine(*[("Card", 12, 11.4, None)] * 2, kind="PHB"), 16, [(0, 1), (1, 1)], "Pipeline of 2 stages"),
        (machine(*[RTX_3060] * 5), 23, [(0, 3)] * 3, "2 GPUs do not hold this model. Tensor parallelism over 3 GPUs"),
    ],
)
def test_auto_takes_as_few_gpus_as_hold_the_model(
    hardware: Hardware, stored: int, ranks: list[tuple[int, int]], said: str
) -> None:
    made = plan(LLAMA_8B, hardware, stored * GIB)
    assert [(rank.stage, rank.shard.size) for rank in made.ranks] == ranks
    assert any(said in note for note in made.notes), made.notes


def test_auto_says_what_tensor_parallelism_saves_and_costs() -> None:
    made = plan(LLAMA_8B, machine(RTX_3060, RTX_3060))
    note = next(note for note in made.notes if "saves about" in note)
    assert "saves about 22.3 ms a token and costs about 0.6 ms for 64 exchanges" in note
    slow = plan(QWEN_05B, machine(RTX_3090, RTX_3090, kind="SYS", peers=False), tensor_parallel_size=2)
    assert any("-pp 2 may be faster" in note for note in slow.notes)


def test_auto_stays_on_one_device_where_one_is_named_or_the_model_cannot_be_divided() -> None:
    hardware = machine(RTX_3060, RTX_3060)
    for asked in ({"device": "cuda:1"}, {"tensor_parallel_size": 1}):
        with pytest.raises(DoesNotFit, match="does not fit on RTX 3060"):
            plan(LLAMA_8B, hardware, **asked)
    with pytest.raises(DoesNotFit, match="does not fit on RTX 3060"):
        plan(replace(LLAMA_8B, implementation="transformers"), hardware, device="cuda")
    assert plan(LLAMA_8B, hardware, device="cpu", dtype="bfloat16").ranks == ()


def test_auto_names_the_fullest_rank_where_all_gpus_together_are_too_small() -> None:
    with pytest.raises(DoesNotFit, match=r"Rank \d \(cuda:\d, RTX 3060\) has .* and needs") as caught:
        plan(LLAMA_70B, machine(RTX_3060, RTX_3060), 140 * GIB)
    assert "more GPUs" in caught.value.hint


# ---- devices ---------------------------------------------------------------------------------------------------------


def devices_of(made: MemoryPlan) -> list[str]:
    return [rank.device for rank in made.ranks]


def test_named_devices_are_used_in_their_order() -> None:
    hardware = machine(RTX_3090, RTX_3060, RTX_3060)
    assert devices_of(plan(LLAMA_8B, hardware, device_ids=("2", "0"), tensor_parallel_size=2)) == ["cuda:2", "cuda:0"]
    by_uuid = plan(LLAMA_8B, hardware, device_ids=("GPU-22aa", "GPU-00"), tensor_parallel_size=2)
    assert devices_of(by_uuid) == ["cuda:2", "cuda:0"]
    assert plan(QWEN_05B, hardware, device_ids=("1",)).device == "cuda:1"
    assert [rank.numa_node for rank in by_uuid.ranks] == [1, 0]


def test_the_best_connected_gpus_are_chosen() -> None:
    hardware = machine(*[RTX_3090] * 4, kind="SYS", peers=False)

    def link(gpu: Gpu) -> Gpu:
        pair = gpu.index ^ 1 if gpu.index < 2 else -1
        return replace(
            gpu, links=tuple(Link(each.peer, "NV4", True) if each.peer == pair else each for each in gpu.links)
        )

    linked = replace(hardware, gpus=tuple(map(link, hardware.gpus)))
    config = EngineConfig(tensor_parallel_size=2)
    assert [gpu.index for gpu in choose_gpus(config, linked, 2)] == [0, 1]
    assert connection(linked.gpus[:2]) == NVLINK
    assert connection(linked.gpus[1:3]) == connection(linked.gpus) == PCIE
    busy = replace(linked, gpus=(replace(linked.gpus[0], free_bytes=GIB), *linked.gpus[1:]))
    assert 0 not in [gpu.index for gpu in choose_gpus(config, busy, 2)]
    assert connection(machine(RTX_3090, RTX_3090, kind="PHB").gpus) == PEERS
    assert connection(machine(RTX_3090, RTX_3090, kind="PHB", peers=None).gpus) == UNKNOWN


TWO = machine(RTX_3090, RTX_3060)


@pytest.mark.parametrize(
    ("spec", "hardware", "asked", "error", "words", "hint"),
    [
        (LLAMA_8B, TWO, {"device_ids": ("0", "GPU-00aa"), "tensor_parallel_size": 2}, ConfigError, "cuda:0 twice", ""),
        (LLAMA_8B, TWO, {"device_ids": ("7",)}, ConfigError, "7 does not exist. There is cuda:0 .RTX 3090", "doctor"),
        (LLAMA_8B, TWO, {"device_ids": ("GPU-",)}, ConfigError, "may mean 2 GPUs", "doctor"),
        (LLAMA_8B, TWO, {"device_ids": ("0",), "device": "cpu"}, ConfigError, "names GPUs", "one of the two"),
        (LLAMA_8B, NO_GPU, {"device_ids": ("0",)}, ConfigError, "none is usable", "--device cpu"),
        (LLAMA_8B, TWO, {"device_ids": ("0",), "tensor_parallel_size": 2}, ConfigError, "2 ranks need 2 GPUs", ""),
        (LLAMA_8B, TWO, {"tensor_parallel_size": 4}, ConfigError, "4 ranks need 4 GPUs", "-tp 2"),
        (LLAMA_8B, TWO, {"tensor_parallel_size": 2, "device": "cuda:1"}, ConfigError, "one GPU", "--device-ids 0,1"),
        (
            LLAMA_8B, TWO, {"tensor_parallel_size": 12}, ConfigError,
            "8 KV groups of 4 heads; 1 to 8, 16, 24 and 32 ranks work, 2, 4 and 8 without repeated KV heads .* 2 GPUs",
            "-tp 2",
        ),
        (QWEN_05B, NO_GPU, {"tensor_parallel_size": 3}, ConfigError, "1, 2, 4, 6, 8, 10, 12 and 14 ranks", "-tp 2"),
        (LLAMA_8B, TWO, {"tensor_parallel_size": 2, "tensor_split": (3, 2, 1)}, ConfigError, "3 values", "-size 3"),
        (LLAMA_8B, TWO, {"pipeline_layer_partition": (16, 15)}, ConfigError, "adds up to 31.*has 32", "Leave"),
        (LLAMA_8B, NO_GPU, {"pipeline_parallel_size": 33}, ConfigError, "32 layers", "-pp 32"),
        (LLAMA_8B, TWO, {"enable_expert_parallel": True}, UnsupportedOption, "has no experts", "Leave"),
        (
            LLAMA_8B, replace(TWO, shm_free_bytes=64 * 1024**2), {"tensor_parallel_size": 2}, ConfigError,
            "64.0 MiB are free, and NCCL needs 64.0 MiB for each rank", "--ipc=host, or --shm-size=1g",
        ),
        (
            replace(LLAMA_8B, implementation="transformers"), TWO, {"tensor_parallel_size": 2}, UnsupportedOption,
            "transformers' code", "Leave out",
        ),
        (
            LLAMA_8B, NO_GPU, {"tensor_parallel_size": 2, "deterministic": True}, UnsupportedOption,
            "several ranks", "or --det",
        ),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_refused_with_its_numbers(
    spec: ModelSpec, hardware: Hardware, asked: dict[str, Any], error: type, words: str, hint: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        plan(spec, hardware, **asked)
    assert hint in caught.value.hint


@pytest.mark.parametrize(("hardware", "device"), [(NO_GPU, "auto"), (NO_GPU, "cpu"), (TWO, "cpu")])
def test_a_refusal_on_a_cpu_does_not_count_gpus(hardware: Hardware, device: str) -> None:
    with pytest.raises(ConfigError, match="KV groups") as caught:
        plan(QWEN_05B, hardware, tensor_parallel_size=3, device=device)
    assert "GPU" not in caught.value.why


def test_a_rank_that_is_too_small_is_named_with_shares_that_work() -> None:
    with pytest.raises(DoesNotFit, match=r"Rank 1 \(cuda:1, RTX 3060\) has 9.8 GiB and needs 12.4") as caught:
        plan(LLAMA_8B, TWO, tensor_split=(1, 3))
    assert "--tensor-split 20,10" in caught.value.hint
    assert "-pp 2" in caught.value.hint
    assert format_bytes(caught.value.plan.ranks[1].total_bytes) == "12.4 GiB"
    assert plan(LLAMA_8B, TWO, tensor_split=(20, 10)).ranks


def test_a_model_that_embeds_is_refused(tmp_path: Path) -> None:
    from localllm.models.fit.pooling import plan_pooling

    spec = replace(QWEN_05B, task="embed")
    with pytest.raises(UnsupportedOption, match=r"does not run on several ranks\. A model that embeds"):
        plan_pooling(EngineConfig(tensor_parallel_size=2), spec, None, 1000, TWO)  # type: ignore[arg-type]


# ---- what a user sees ------------------------------------------------------------------------------------------------


def test_fit_shows_each_rank(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", str(tiny_llama_path), "-tp", "2", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    for words in ("rank 0 CPU", "rank 1 CPU", "KV heads", "processes of the ranks", "process ", "1 + 1 of 2 KV heads"):
        assert words in told
    assert cli.main(["fit", str(tiny_llama_path), "-pp", "2", "--device", "cpu", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    ranks = device["plan"]["ranks"]
    assert [rank["stage"] for rank in ranks] == [0, 1]
    assert ranks[0]["shard"]["layers"][1] == ranks[1]["shard"]["layers"][0]


def test_estimates_show_the_ranks_beside_single_devices() -> None:
    found = estimate(EngineConfig(), LLAMA_8B, WEIGHTS[LLAMA_8B.architecture], machine(RTX_3060, RTX_3060), None)
    assert [each.device for each in found] == ["cuda:0 + cuda:1", "cuda:0", "cuda:1", "cpu"]
    assert [each.is_chosen for each in found] == [True, False, False, False]
    assert found[0].verdict != "does not fit"
    assert {each.verdict for each in found[1:3]} == {"does not fit"}


def test_flags_and_keywords_mean_the_same() -> None:
    words = "up -tp 2 -pp auto --tensor-split 3,1 --pipeline-layer-partition 20,12 --device-ids 0,GPU-1 -ep"
    by_flag = settings_from(parse(words.split())).engine
    values: dict[str, Any] = {
        "tensor_parallel_size": 2, "pipeline_parallel_size": "auto", "tensor_split": [3, 1],
        "pipeline_layer_partition": (20, 12), "device_ids": [0, "GPU-1"], "enable_expert_parallel": True,
        "rank_timeout": 60,
    }  # fmt: skip
    by_keyword = _engine_config({"model": "demo", "dtype": "auto", **values})
    for name in values:
        assert getattr(by_flag, name) == getattr(by_keyword, name), name
    assert by_flag.tensor_split == (3, 1)
    assert by_flag.pipeline_parallel_size is None


@pytest.mark.parametrize(
    "words",
    ["--tensor-split 3,x", "--tensor-split 3,0", "--pipeline-layer-partition 20.5,2", "-tp 0", "--rank-timeout 0"],
)
def test_values_that_cannot_be_shares_are_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        settings_from(parse(["up", *words.split()]))
