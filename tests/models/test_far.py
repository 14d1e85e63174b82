"""Experts in RAM beside a GPU: which layers move, what the plan says of both memories, and the predicted speed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.hardware import Hardware
from localllm.models.decoder.mixture import held_experts
from localllm.models.fit import MemoryPlan, estimate, plan_memory
from localllm.models.fit.checkpoint import count_resident_for, estimate_checkpoint
from localllm.models.fit.estimate import fit_rows
from localllm.models.fit.far import (
    CROSSING_S,
    CheckpointBytes,
    LayerExperts,
    TableBytes,
    fewest_layers,
    stream_threshold,
    token_s,
)
from localllm.models.fit.speed import predict
from localllm.models.formats import safetensors
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.safetensors import read_header
from localllm.models.layers.far import TIMED_ROWS
from localllm.models.layers.moe import MoE
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec, spec_of_config, weights_bytes
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import far_bytes, held_bytes, parts_of_kind
from tests.draws import draws
from tests.marks import needs_library
from tests.models.harness import GIB, LLAMA_8B, WEIGHTS, gpu_machine
from tests.models.large_models import DEEPSEEK_V3, GPT_OSS_120B, QWEN3_235B, G, desk, sized
from tests.tiny import make_tiny_model

pytestmark = needs_library


def plan(spec: ModelSpec, sizes: CheckpointBytes, machine: Hardware, **asked: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(**asked), spec, 10 * GIB, machine, resident_bytes=sizes)


@pytest.mark.parametrize(
    ("config", "bits", "rest", "ram_gib", "speeds"),
    [
        (GPT_OSS_120B, 4.25, 3.07 * G, 96, (26, 35)),
        (QWEN3_235B, 4.85, 15.6e9 * 4.85 / 8, 192, (6.2, 6.7)),
    ],
    ids=["gpt-oss-120b", "qwen3-235b"],
)
def test_a_desk_with_24_gb_answers_at_the_speed_of_the_table(
    config: dict[str, Any], bits: float, rest: float, ram_gib: float, speeds: tuple[float, float]
) -> None:
    """The table of the design: two channels at 77 GB/s. Both of the formula's shares are at their middle."""
    spec = spec_of_config(config)
    made = plan(spec, sized(spec, bits, rest), desk(ram_gib))
    far = made.far
    assert far is not None
    assert made.place == "cuda:0 + RAM"
    assert made.total_bytes + made.reserve_bytes <= made.free_bytes
    assert far.layers == tuple(range(spec.num_layers - len(far.layers), spec.num_layers))
    assert made.max_model_len >= 8192
    tokens = 1 / token_s(made.weights_bytes - far.idle_bytes, 936 * G, far.read_bytes, 77 * G, len(far.layers))
    least, most = speeds
    assert 0.9 * least <= tokens <= 1.1 * most, (tokens, far)
    shown = predict(made, desk(ram_gib))
    assert shown is not None
    assert shown.decode[0] < tokens < shown.decode[1]


def test_deepseek_does_not_fit_a_desk_and_the_refusal_has_both_numbers() -> None:
    spec = spec_of_config(DEEPSEEK_V3)
    sizes = sized(spec, 4.85, 17e9 * 4.85 / 8)
    with pytest.raises(DoesNotFit, match=r"in RAM are needed; 23\.2 GiB and 16[0-9] GiB are free") as caught:
        plan(spec, sizes, desk(192))
    assert caught.value.plan.far is not None


PUBLISHED = [
    # G, B_gpu, F, B_ram, crossings, what else a step takes, published tokens/s
    ("Qwen3.5-35B Q4_K_M, 40 of 40 layers", 1.3, 960, 3 * 2048 * 512 * 8 * 40 * 4.95 / 8 / G, 77, 40, 0.0042, 51.0),
    ("the same, 24 of 40", 1.3 + 0.4 * 0.6228, 960, 0.6 * 0.6228, 77, 24, 0.0042, 69.6),
    ("the same, Q8_0", 2.1, 960, 3 * 2048 * 512 * 8 * 40 * 8.5 / 8 / G, 77, 40, 0.0042, 35.7),
    ("gpt-oss-120b, 36 of 36", 3.07, 448, 1.9, 89.6, 36, 0.002, 25.6),
    ("gpt-oss-120b, 26 of 36", 3.07 + 10 / 36 * 1.9, 936, 26 / 36 * 1.9, 89.6, 26, 0.002, 32.3),
]


@pytest.mark.parametrize(("name", "near", "gpu", "far", "ram", "crossings", "rest_s", "published"), PUBLISHED)
def test_the_formula_agrees_with_published_speeds(
    name: str, near: float, gpu: float, far: float, ram: float, crossings: int, rest_s: float, published: float
) -> None:
    tokens = 1 / token_s(near * G, gpu * G, far * G, ram * G, crossings, step_s=rest_s)
    assert tokens == pytest.approx(published, rel=0.1), name


sizes_of_layers = st.lists(st.sampled_from([90, 100, 110]), min_size=1, max_size=6)


@draws(30)
@given(sizes=sizes_of_layers, missing=st.integers(1, 700), more=st.integers(0, 100))
def test_as_few_layers_as_needed_move_and_a_larger_budget_never_moves_more(
    sizes: list[int], missing: int, more: int
) -> None:
    experts = [LayerExperts(layer, size, size) for layer, size in enumerate(sizes)]

    def moved(count: int) -> int:
        return sum(each.gpu_bytes for each in experts[-count:])

    count = fewest_layers(len(sizes), lambda count: moved(count) >= missing)
    assert (count is None) == (sum(sizes) < missing)
    if count is None:
        return
    assert moved(count) >= missing > sum(sizes[len(sizes) - count + 1 :])
    fewer = fewest_layers(len(sizes), lambda count: moved(count) >= missing - more)
    assert fewer is not None
    assert fewer <= count
    # No other set of layers is much faster: a token waits for each of them and reads its share of their bytes.
    rest_s, each_s = 0.003, [size * 1e-5 + CROSSING_S for size in sizes]
    sets = [[i for i in range(len(sizes)) if chosen >> i & 1] for chosen in range(1, 2 ** len(sizes))]
    best = min(sum(each_s[i] for i in one) for one in sets if sum(sizes[i] for i in one) >= missing)
    own = sum(each_s[len(sizes) - count :])
    largest = max(sizes) / min(sizes)
    assert rest_s + own <= (rest_s + best) * largest + max(each_s) * (largest > 1)


def test_the_settings_decide_and_contradictions_are_refused() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes, large, small = sized(spec, 4.25, 3.07 * G), desk(96, 80), desk(96)
    assert plan(spec, sizes, large).far is None
    for asked, layers in (
        ({"n_cpu_moe": "12"}, 12), ({"n_cpu_moe": "all"}, 36), ({"cpu_moe": True}, 36), ({"n_cpu_moe": "99"}, 36),
        ({"cpu_offload_gb": 10.0}, 7),
    ):  # fmt: skip
        far = plan(spec, sizes, large, **asked).far
        assert far is not None, asked
        assert len(far.layers) == layers, asked
    with pytest.raises(DoesNotFit, match="does not fit on Card"):
        plan(spec, sizes, small, n_cpu_moe="0")
    with pytest.raises(DoesNotFit) as caught:
        plan(spec, sizes, small, n_cpu_moe="12")
    assert "larger --n-cpu-moe (at most 36)" in str(caught.value.hint)
    assert any(option.words.startswith("--n-cpu-moe auto") for option in caught.value.options)
    with pytest.raises(ConfigError, match="more than can leave the GPU"):
        plan(spec, sizes, large, cpu_offload_gb=70.0)
    with pytest.raises(ConfigError, match="Only one of"):
        EngineConfig(n_cpu_moe="3", cpu_moe=True)
    with pytest.raises(ConfigError, match="out of range"):
        EngineConfig(n_cpu_moe="some")
    note = "--n-cpu-moe changes nothing: on the CPU all weights are in RAM."
    assert note in plan(spec, sizes, desk(96), device="cpu", n_cpu_moe="3").notes


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"deterministic": True}, "--deterministic needs the same bits"),
        ({"tensor_parallel_size": 2}, "beside one GPU"),
    ],
)
def test_what_does_not_go_with_experts_in_ram_is_refused_by_name(asked: dict[str, Any], why: str) -> None:
    spec = spec_of_config(GPT_OSS_120B)
    with pytest.raises(UnsupportedOption, match=why):
        plan(spec, sized(spec, 4.25, 3.07 * G), desk(96), n_cpu_moe="all", **asked)
    with pytest.raises(UnsupportedOption, match="sizes of its parts are not known"):
        plan_memory(EngineConfig(cpu_moe=True), LLAMA_8B, WEIGHTS[LLAMA_8B.architecture], desk(96))
    for changed, words in (
        ({"layer_sparsity": (0.5,) * 32}, "a feed-forward part of its own kind"),
        ({"hidden_act": "relu", "mlp_gated": False}, "without a gate and with relu"),
    ):
        with pytest.raises(UnsupportedOption, match=words):
            plan_memory(EngineConfig(cpu_moe=True), replace(LLAMA_8B, **changed), 10 * GIB, desk(96))


def test_the_places_of_a_machine_stand_side_by_side() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    found = estimate(EngineConfig(), spec, 10 * GIB, desk(96), sized(spec, 4.25, 3.07 * G))
    assert [(each.device, each.verdict) for each in found] == [
        ("cuda:0 + RAM", "fits with a shorter context"), ("cuda:0", "does not fit"),
        ("cpu", "fits with a shorter context"),
    ]  # fmt: skip


def test_a_real_plan_has_the_bytes_that_a_load_holds(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "gpt_oss")
    spec = read_spec(path)
    config = EngineConfig(n_cpu_moe="1", dtype="float32")
    resident = count_resident_for(config, path, spec)
    made = plan_memory(config, spec, weights_bytes(path), gpu_machine(20), resident_bytes=resident)
    assert made.far is not None
    cpu = torch.device("cpu")
    model = load_model(path, spec, cpu, torch.float32, max_model_len=made.max_model_len, far_layers=made.far.layers)
    assert made.weights_bytes == held_bytes(model)
    assert made.far.ram_bytes == far_bytes(model)
    again = plan_memory(
        config, spec, 0, gpu_machine(20), far=made.far,
        resident_bytes=lambda device, dtype, length, quantization, shard=None: held_bytes(model),
    )  # fmt: skip
    assert (again.far, again.weights_bytes) == (made.far, made.weights_bytes)


def test_a_cpu_reads_the_experts_that_a_token_chooses() -> None:
    """Published for gpt-oss-120b without a GPU: 14 to 15 tokens/s, here with two channels at 89.6 GB/s."""
    spec = spec_of_config(GPT_OSS_120B)
    (found,) = estimate(EngineConfig(device="cpu"), spec, 10 * GIB, desk(96), sized(spec, 4.25, 3.07 * G))
    assert found.plan is not None
    work = found.plan.work
    assert work is not None
    read = work.dense_bytes + work.expert_bytes
    assert read == pytest.approx((3.07 + 1.9) * G, rel=0.01)
    assert 0.9 * 14 < 1 / token_s(0, G, read, 89.6 * G, 0) < 1.1 * 15
    shown = predict(found.plan, desk(96, ram=89.6 * G))
    assert shown is not None
    assert shown.decode[0] < 14 < 15 < shown.decode[1]
    assert predict(found.plan, desk(96, ram=None)) is None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_what_a_token_reads_is_counted_from_the_loaded_model(dtype: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "qwen2_moe", dtype="bfloat16", num_experts_per_tok=2)
    config = EngineConfig(device="cpu", dtype=dtype)
    spec, (found, *_) = estimate_checkpoint(path, config, Hardware((), "a processor", 4, 2**34, 2**34))
    assert found.plan is not None
    assert spec.mixture is not None
    model = load_model(
        path, spec, torch.device("cpu"), getattr(torch, found.plan.dtype), max_model_len=found.plan.max_model_len,
        half_weights=config.keeps_half_weights,
    )  # fmt: skip
    unread = sum(held_experts(each) for each in parts_of_kind(model, MoE)) * (
        spec.mixture.num_experts - spec.mixture.top_k
    )
    assert unread > 0
    work = found.plan.work
    assert work is not None
    unread_bytes = unread / spec.mixture.num_experts + model.embedding.weight.nbytes  # of a table a token reads a row
    assert work.dense_bytes + work.expert_bytes == pytest.approx(held_bytes(model) - unread_bytes)


def test_a_dense_model_reads_all_of_its_weights() -> None:
    sizes = WEIGHTS[LLAMA_8B.architecture]
    (found,) = estimate(EngineConfig(device="cpu"), LLAMA_8B, sizes, desk(96), None)
    assert found.plan is not None
    assert found.plan.work is not None
    assert found.plan.work.dense_bytes == found.plan.weights_bytes


def test_a_mixture_larger_than_ram_is_planned_on_disk_when_it_is_asked_for() -> None:
    """On 32 GB without a GPU, and beside one: the cache takes what the rest leaves, and a token waits for misses."""
    spec, sizes = spec_of_config(GPT_OSS_120B), sized(spec_of_config(GPT_OSS_120B), 4.25, 3.07 * G)
    small = replace(desk(32), gpus=())
    found = estimate(EngineConfig(), spec, 10 * GIB, small, sizes)
    assert [(each.device, each.verdict) for each in found] == [
        ("cpu", "does not fit"), ("cpu + disk", "fits with a shorter context"),
    ]  # fmt: skip
    with pytest.raises(DoesNotFit) as caught:
        plan(spec, sizes, small)
    assert "--weights-on disk (slow)" in caught.value.hint
    made = plan(spec, sizes, small, weights_on="disk")
    assert found[1].plan == made
    assert (made.place, made.target_step_s) == ("cpu + disk", 0.0)
    far = made.far
    assert far is not None
    assert far.disk is not None
    assert len(far.layers) == 36
    assert far.disk.file_bytes == sum(each.ram_bytes for each in sizes.experts("cpu", "bfloat16", None))
    assert far.ram_bytes == far.disk.cache_bytes > 15 * GIB
    assert made.total_bytes + made.reserve_bytes + far.ram_bytes <= small.ram_available_bytes
    assert made.max_model_len >= 8192
    shown = predict(made, replace(small, speeds=small.speeds._replace(disk=3 * G)))
    assert shown is not None
    least, most = shown.decode
    misses_s = [(1 - hits) * far.read_bytes / (3 * G) for hits in far.disk.hits]
    assert 0.9 / most < misses_s[1] + token_s(3.07 * G, 77 * G, 1.9 * G, 77 * G, 36, gpu_share=0.8) < 1.6 / most
    assert misses_s[0] < 1 / least < 2 * misses_s[0]
    assert predict(made, small) is None  # a disk that was not measured

    asked = plan(spec, sizes, small, weights_on="disk", expert_cache_gib=4.0)
    assert asked.far is not None
    assert asked.far.ram_bytes == 4 * GIB
    beside = plan(spec, sizes, desk(32), weights_on="disk").far
    assert beside is not None
    assert beside.disk is not None
    assert 0 < len(beside.layers) < 36
    assert plan(spec, sizes, desk(96), weights_on="ram").place == "cuda:0 + RAM"


@pytest.mark.parametrize(
    ("asked", "error", "why"),
    [
        ({"expert_cache_gib": 40.0}, DoesNotFit, r"are left; 40\.0 GiB are set, and a token needs 5\d\.\d MiB"),
        ({"expert_cache_gib": 0.01}, DoesNotFit, r"10\.2 MiB are set, and a token needs 5\d\.\d MiB in each layer"),
        ({"deterministic": True}, UnsupportedOption, "--weights-on disk is not supported.*--deterministic needs"),
        ({"tensor_parallel_size": 2}, UnsupportedOption, "--weights-on disk cannot be combined with several ranks"),
    ],
)
def test_what_does_not_go_with_experts_on_disk_is_refused_with_numbers(
    asked: dict[str, Any], error: type[Exception], why: str
) -> None:
    spec = spec_of_config(GPT_OSS_120B)
    with pytest.raises(error, match=why):
        plan(spec, sized(spec, 4.25, 3.07 * G), replace(desk(32), gpus=()), weights_on="disk", **asked)


def test_dense_models_and_a_cache_without_a_disk_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="LlamaForCausalLM has no experts"):
        plan_memory(EngineConfig(weights_on="disk"), LLAMA_8B, WEIGHTS[LLAMA_8B.architecture], desk(96))
    with pytest.raises(ConfigError, match="--expert-cache-gib is for experts on disk"):
        EngineConfig(expert_cache_gib=3.0)


def test_a_gpu_with_experts_in_ram_has_buffers_for_them_and_long_steps() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = sized(spec, 4.25, 3.07 * G)
    made, without = (plan(spec, sizes, desk(96), stream_prompts=asked) for asked in ("auto", "off"))
    assert made.far is not None
    assert without.far is not None
    record = sizes.experts("cuda:0", "bfloat16", None)[0].ram_bytes // 128
    assert made.far.staging_bytes == 2 * (2**28 // record) * record
    assert made.far.unpacked_bytes == made.far.staging_bytes // 2  # as large on the GPU here
    assert (without.far.staging_bytes, without.far.unpacked_bytes) == (0, 0)
    assert (made.max_num_batched_tokens, without.max_num_batched_tokens) == (8192, 2048)
    assert len(without.far.layers) < len(made.far.layers) <= len(without.far.layers) + 4
    assert made.long_prefill_token_threshold == 8192
    assert made.max_model_len >= 8192
    assert made.total_bytes + made.reserve_bytes <= made.free_bytes
    parts = made.weights_bytes + made.kv_bytes + made.activation_bytes + made.graph_bytes
    assert made.total_bytes == parts + made.far.staging_bytes
    note = "--stream-prompts 500 changes nothing: no weights are in RAM beside a GPU."
    assert note in plan(spec, sizes, desk(96, 80), stream_prompts="500").notes
    assert note not in plan(spec, sizes, desk(96), stream_prompts="500").notes
    with pytest.raises(ConfigError, match="out of range"):
        EngineConfig(stream_prompts="0")
    assert plan(spec, sizes, desk(96), max_num_batched_tokens=1000).max_num_batched_tokens == 1000
    tight = plan(spec, sizes, desk(96, 9.5), n_cpu_moe="all")
    assert tight.max_num_batched_tokens in (2048, 4096)
    assert tight.max_model_len >= 8192


@draws(100)
@given(
    count=st.sampled_from([8, 32, 128, 512]), top_k=st.sampled_from([1, 4, 8]), copy_share=st.floats(1.05, 4),
    row_s=st.floats(1e-5, 1e-3),
)  # fmt: skip
def test_the_threshold_is_nearly_the_best_of_a_sweep(count: int, top_k: int, copy_share: float, row_s: float) -> None:
    """The CPU reads each chosen expert once, in all for a second, and then computes; a copy takes longer than to read
    all. Prompts of all lengths take together at most 15 % longer than with the best threshold."""

    def cpu_s(rows: int) -> float:
        return 1 - (1 - top_k / count) ** rows + rows * row_s * top_k

    timed = [rows for rows in TIMED_ROWS if rows <= 64 or cpu_s(rows // 4) < copy_share]  # as `FarStream.timed` does
    found = stream_threshold({rows: cpu_s(rows) for rows in timed}, copy_share, 8192)
    lengths = [2**i + j for i in range(4, 13) for j in (0, 2 ** (i - 1))]

    def total_s(threshold: int) -> float:
        return sum(copy_share if threshold and n >= threshold else cpu_s(n) for n in lengths)

    best = min(map(total_s, [0, *lengths]))
    assert total_s(found) <= 1.15 * best, (found, best)


def test_a_threshold_beyond_the_largest_step_is_none() -> None:
    assert stream_threshold({8: 0.001, 64: 0.001, 256: 0.001}, 0.5, 8192) == 0
    assert stream_threshold({8: 0.01, 64: 0.02, 256: 0.1}, 1000.0, 8192) == 0
    assert stream_threshold({8: 0.01, 64: 0.02, 256: 0.1}, 0.02, 8192) == 64
    assert stream_threshold({8: 0.01, 64: 0.02, 256: 0.1}, 0.005, 8192) == 4
    assert stream_threshold({8: 0.0, 64: 0.064, 256: 0.256}, 0.512, 8192) == 512


def test_the_feed_forward_parts_of_a_dense_model_are_planned_in_ram(tmp_path: Path) -> None:
    """By itself on a GPU that does not hold it, with the bytes that a load holds; and by the settings."""
    path = make_tiny_model(
        tmp_path, "llama", num_hidden_layers=6, intermediate_size=2048, hidden_size=128, max_position_embeddings=512
    )
    spec = read_spec(path)
    config = EngineConfig(dtype="float32", max_num_batched_tokens=64, max_num_seqs=2, enforce_eager=True)
    sizes = count_resident_for(config, path, spec)
    experts = sizes.experts("cuda:0", "float32", None)
    assert [each.layer for each in experts] == list(range(6))
    assert all(each.ram_bytes == each.gpu_bytes == 3 * 2048 * 128 * 4 for each in experts)
    for count in (2, 6):
        asked = replace(config, n_cpu_moe=f"{count}")
        made = plan_memory(asked, spec, weights_bytes(path), gpu_machine(20), resident_bytes=sizes)
        far = made.far
        assert far is not None
        assert far.layers == tuple(range(6 - count, 6))
        assert far.read_bytes == far.ram_bytes == count * experts[0].ram_bytes
        assert "feed-forward parts" in far.words()
        cpu = torch.device("cpu")
        model = load_model(path, spec, cpu, torch.float32, max_model_len=made.max_model_len, far_layers=far.layers)
        assert made.weights_bytes == held_bytes(model)
        assert far.ram_bytes == far_bytes(model)
    one = replace(gpu_machine(20).gpus[0])
    need = plan_memory(replace(config, n_cpu_moe="0"), spec, 0, gpu_machine(20), resident_bytes=sizes).total_bytes
    small = replace(one, free_bytes=600 * 2**20 + need - 2 * experts[0].gpu_bytes, total_bytes=24 * GIB)
    machine = replace(gpu_machine(20), gpus=(small,), ram_available_bytes=GIB, ram_total_bytes=4 * GIB)
    found = plan_memory(replace(config, stream_prompts="off"), spec, 0, machine, resident_bytes=sizes)
    assert found.place in ("cuda:0 + RAM", "cuda:0")


# ---- lookup tables ---------------------------------------------------------------------------------------------------


def with_tables(sizes: CheckpointBytes, num_bytes: int) -> CheckpointBytes:
    """The same checkpoint, of whose bytes this many are an embedding that is only looked up."""
    return CheckpointBytes(sizes.whole, sizes.experts, tables=lambda *given: [TableBytes("embedding", num_bytes)])


def test_a_table_leaves_the_gpu_before_any_experts_do() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = sized(spec, 4.25, 3.07 * G)
    table = 2 * GIB
    known = with_tables(sizes, table)
    without = plan(spec, known, desk(96), cpu_embeddings="off")
    made = plan(spec, known, desk(96))
    assert made.far is not None
    assert without.far is not None
    assert without.far.tables == ()
    assert without.far.layers == plan(spec, sizes, desk(96)).far.layers  # type: ignore[union-attr]
    assert made.far.tables == (TableBytes("embedding", table),)
    assert len(made.far.layers) < len(without.far.layers)
    assert made.max_model_len >= 8192
    experts = sum(each.ram_bytes for each in sizes.experts("", "", None) if each.layer in made.far.layers)
    assert made.far.ram_bytes == experts + table
    assert made.far.expert_bytes == experts
    assert made.weights_bytes == sizes("cuda:0", made.dtype, 1, None) - made.far.gpu_bytes
    assert made.far.words().endswith("The embedding (2.0 GiB) is in RAM, where the GPU reads a row for each token.")
    assert made.place == "cuda:0 + RAM"


def test_a_table_alone_leaves_if_that_is_enough_and_only_if_it_is_needed() -> None:
    table = GIB
    sizes = CheckpointBytes(
        lambda *given: 8 * GIB, lambda *given: [LayerExperts(layer, GIB // 16, GIB // 16) for layer in range(32)],
        tables=lambda *given: [TableBytes("embedding", table)],
    )  # fmt: skip

    def far(gpu_gib: float, **asked: Any) -> Any:
        return plan(LLAMA_8B, sizes, replace(desk(64, gpu_gib), speeds=desk(64).speeds), device="cuda", **asked).far

    assert far(16) is None
    found = [far(gib / 4) for gib in range(33, 48)]
    alone = [each for each in found if each is not None and not each.layers]
    assert alone
    assert all(each.tables and each.read_bytes == 0 for each in alone)
    assert all(each is None or each.tables for each in found)  # never experts before the table
    moved = [0 if each is None else each.gpu_bytes for each in found]
    assert moved == sorted(moved, reverse=True)  # more memory never moves more
    asked = far(16, cpu_embeddings="on")
    assert (asked.layers, asked.ram_bytes) == ((), table)
    assert far(16, n_cpu_moe="3").tables == ()
    assert far(16, n_cpu_moe="3", cpu_embeddings="on").tables
    gib = next(gib / 4 for gib, each in zip(range(33, 48), found, strict=True) if each is not None and not each.layers)
    shown = predict(plan(LLAMA_8B, sizes, desk(64, gib), device="cuda"), desk(64, gib))
    assert shown is not None
    assert shown.ram_bandwidth is None
    assert " of RAM" not in shown.why
    assert shown.first_token_s


def test_a_table_in_ram_is_demanded_or_refused_by_name() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = with_tables(sized(spec, 4.25, 3.07 * G), GIB)
    none = CheckpointBytes(sizes.whole, sizes.experts, tables=lambda *given: [])
    for resident, asked, why in (
        (none, {}, "also its head"), (sized(spec, 4.25, 3.07 * G), {}, "not known before"),
        (sizes, {"weights_on": "disk"}, "RAM does not hold the experts"),
        (sizes, {"pipeline_parallel_size": 2}, "beside one GPU"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedOption, match=why) as caught:
            plan(spec, resident, desk(96, 80), cpu_embeddings="on", **asked)
        assert "--cpu-embeddings on" in str(caught.value)
    made = plan(spec, sizes, desk(96), cpu_embeddings="on", device="cpu")
    assert any("--cpu-embeddings on changes nothing: on the CPU" in note for note in made.notes)
    with pytest.raises(DoesNotFit, match="on this GPU and in RAM"):
        plan(spec, with_tables(sized(spec, 4.25, 3.07 * G), 3 * GIB), desk(2, 80), cpu_embeddings="on")


def test_the_fit_shows_a_table_in_ram_with_its_bytes_and_the_gpu_alone_beside_it() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = with_tables(sized(spec, 4.25, 3.07 * G), GIB)
    found = estimate(EngineConfig(cpu_embeddings="on"), spec, 10 * GIB, desk(96, 80), sizes)
    assert found[0].device == "cuda:0 + RAM"
    rows = dict(fit_rows(found))
    assert rows["embedding in RAM"][0] == "1.0 GiB"
    assert "  of layers" not in rows
    alone = next(each for each in found if each.device == "cuda:0")
    assert alone.needs.far is None
    assert alone.needs.weights_bytes == found[0].needs.weights_bytes + GIB


def test_a_checkpoint_is_planned_with_the_tables_of_its_headers(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "gemma3n", dtype="bfloat16")
    spec = read_spec(path)
    sizes = count_resident_for(EngineConfig(), path, spec)
    made = plan_memory(
        EngineConfig(cpu_embeddings="on", device="cuda"), spec, weights_bytes(path), gpu_machine(11, 12),
        resident_bytes=sizes,
    )  # fmt: skip
    assert made.far is not None
    (table,) = made.far.tables
    sizes_of = spec.per_layer_input
    assert sizes_of is not None
    assert table == ("per-layer embeddings", sizes_of.vocab_size * sizes_of.size * spec.num_layers * 2)
    whole = plan_memory(
        EngineConfig(device="cuda"), spec, weights_bytes(path), gpu_machine(11, 12), resident_bytes=sizes
    )  # fmt: skip
    assert whole.far is None
    assert made.weights_bytes == whole.weights_bytes - table.num_bytes


def test_a_fit_reads_each_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model(tmp_path, "qwen3_moe", dtype="bfloat16")
    read: list[Path] = []

    def counted(file: Path) -> dict[str, TensorInfo]:
        read.append(file)
        return read_header(file)

    monkeypatch.setattr(safetensors, "read_header", counted)
    _, found = estimate_checkpoint(path, EngineConfig(cpu_moe=True), gpu_machine(11, 12))
    assert found[0].plan is not None
    assert found[0].plan.far is not None
    assert sorted(read) == sorted(path.glob("*.safetensors"))
