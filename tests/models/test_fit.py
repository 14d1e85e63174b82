"""The plan is arithmetic: tables of machines, models and flags, and the refusals with the numbers that help."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import Measured, MemoryPlan, kv_bytes_per_token, plan_memory
from localllm.models.fit.plan_attempt import THROUGH_TRANSFORMERS
from localllm.models.spec.latent import IndexSpec, LatentSpec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from tests.draws import draws
from tests.models.harness import GIB, LLAMA_8B, NO_GPU, QWEN_05B, WEIGHTS, gpu_machine, without_library


def plan(spec: ModelSpec, hardware: Hardware, **asked: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(**asked), spec, WEIGHTS[spec.architecture], hardware)


def test_cpu_defaults() -> None:
    made = plan(QWEN_05B, NO_GPU)
    assert (made.device, made.dtype, made.async_depth) == ("cpu", "float32", 1)
    assert (made.max_num_batched_tokens, made.long_prefill_token_threshold) == (1024, 1024)
    assert made.max_model_len == 32_768
    assert made.weights_bytes == 2 * WEIGHTS[QWEN_05B.architecture]
    assert made.num_kv_tokens == 16 * 4096  # a bounded cache, not half of the machine
    assert made.notes == ()


def test_a_context_that_ends_before_the_trained_one_says_why() -> None:
    short = replace(QWEN_05B, max_position=2048, context_limit="Beyond it the indexer chooses.")
    made = plan(short, NO_GPU)
    assert made.max_model_len == 2048
    assert made.notes == ("Context 2,048 tokens: Beyond it the indexer chooses.",)
    with pytest.raises(ConfigError, match=r"2049 is longer.*Beyond it the indexer"):
        plan(short, NO_GPU, max_model_len=2049)


def test_an_indexer_takes_memory_and_bounds_no_context() -> None:
    index = IndexSpec(2048, num_heads=4, head_dim=32, interleaved=False, layers=(True,) * LLAMA_8B.num_layers)
    latent = LatentSpec(512, 64, 128, 128, 256, index=index)
    spec = replace(LLAMA_8B, latent=latent, num_kv_heads=1, head_dim=576)
    assert plan(spec, NO_GPU).max_model_len > 2048
    made = plan(spec, gpu_machine(70, 80))
    assert made.max_model_len > 2048
    without = replace(spec, latent=replace(latent, index=None))
    scores, positions = 2**24 * 4, made.max_num_batched_tokens * 2048 * 4
    assert made.activation_bytes - plan(without, gpu_machine(70, 80)).activation_bytes in range(
        1, scores + positions + 1
    )
    assert kv_bytes_per_token(spec, "bfloat16") - kv_bytes_per_token(without, "bfloat16") == 32 * 32 * 2
    assert kv_bytes_per_token(spec, "int8") - kv_bytes_per_token(without, "int8") == 32 * 32 * 2


def test_gpu_defaults() -> None:
    made = plan(LLAMA_8B, gpu_machine(23))
    assert (made.device, made.dtype, made.async_depth) == ("cuda:0", "bfloat16", 2)
    assert (made.max_num_batched_tokens, made.long_prefill_token_threshold) == (2048, 512)
    assert made.weights_bytes == WEIGHTS[LLAMA_8B.architecture]
    assert made.max_model_len < LLAMA_8B.max_position
    assert any("131,072" in note for note in made.notes)


@pytest.mark.parametrize("hardware", [NO_GPU, gpu_machine(23), gpu_machine(19, 24), gpu_machine(70, 80)])
@pytest.mark.parametrize("spec", [QWEN_05B, LLAMA_8B], ids=["qwen", "llama"])
def test_the_parts_stay_within_what_is_free(spec: ModelSpec, hardware: Hardware) -> None:
    made = plan(spec, hardware)
    assert made.total_bytes + made.reserve_bytes <= made.free_bytes
    assert made.kv_bytes % made.num_blocks[0] == 0
    assert made.num_kv_tokens >= made.max_model_len  # one request of full length always fits beside the null block


def test_weights_are_what_the_loader_will_hold_where_it_can_tell() -> None:
    asked: set[tuple[str, str, str | None]] = set()

    def resident(
        device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None
    ) -> int:
        asked.add((device, dtype, quantization))
        return 5 * GIB + 256 * max_model_len  # rotary tables

    made = plan_memory(EngineConfig(), QWEN_05B, WEIGHTS[QWEN_05B.architecture], NO_GPU, resident_bytes=resident)
    assert made.weights_bytes == 5 * GIB + 256 * made.max_model_len
    assert ("cpu", "float32", None) in asked


def test_a_quantised_cache_holds_more_and_counts_its_scales() -> None:
    tokens = {
        dtype: plan(LLAMA_8B, gpu_machine(23), kv_cache_dtype=dtype).num_kv_tokens
        for dtype in ("auto", "fp8", "int8", "k8v4", "int4")
    }
    assert 1.9 < tokens["fp8"] / tokens["auto"] <= 2.1
    assert tokens["auto"] < tokens["int8"] < tokens["fp8"] < tokens["k8v4"] < tokens["int4"]
    assert 3.3 < tokens["int4"] / tokens["auto"] < 3.6
    assert kv_bytes_per_token(LLAMA_8B, "int8") == 2 * 32 * 8 * (128 + 4)
    assert kv_bytes_per_token(LLAMA_8B, "bfloat16") == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(LLAMA_8B, "int4") == 32 * 8 * (64 + 4 + 64 + 4 * 4)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4", "int4_per_token_head"])
def test_four_bits_are_refused_by_name_where_heads_do_not_fit(kv_dtype: str) -> None:
    latent = LatentSpec(latent_size=32, rope_size=16, nope_size=16, value_size=24)
    unfit = {
        "heads of 80": replace(QWEN_05B, head_dim=80),
        "latent": replace(QWEN_05B, num_kv_heads=1, head_dim=latent.cached_size, latent=latent),
        "window": replace(QWEN_05B, sliding_window=128, layer_is_windowed=(True,) * QWEN_05B.num_layers),
    }
    for why, spec in unfit.items():
        with pytest.raises(UnsupportedOption, match=why) as caught:
            plan_memory(EngineConfig(kv_cache_dtype=kv_dtype), spec, GIB, NO_GPU)
        assert caught.value.param == "kv_cache_dtype"
        assert plan_memory(EngineConfig(kv_cache_dtype="int8"), spec, GIB, NO_GPU).kv_dtype == "int8"


def test_layers_with_a_window_keep_eight_bits() -> None:
    layers = QWEN_05B.num_layers
    spec = replace(QWEN_05B, sliding_window=128, layer_is_windowed=(True,) * (layers - 1) + (False,))
    made = plan_memory(EngineConfig(kv_cache_dtype="int4"), spec, GIB, NO_GPU)
    assert any("8 bits" in note for note in made.notes)
    assert kv_bytes_per_token(spec, "int4") == 2 * (layers - 1) * 2 * (64 + 4) + 2 * (32 + 4 + 32 + 2 * 4)


def test_a_context_beyond_the_cache_that_was_asked_for_is_told_so() -> None:
    """The machine has room; what is too small is the number in the flag."""
    with pytest.raises(DoesNotFit, match="into the requested KV cache") as refused:
        plan(QWEN_05B, NO_GPU, max_model_len=32_768, kv_cache_memory_bytes=4 << 20)
    assert "(--kv-cache-memory-bytes 4.0 MiB)" in refused.value.why
    flag = re.search(r"--kv-cache-memory-bytes (\d+)", refused.value.hint)
    assert flag is not None
    enough = plan(QWEN_05B, NO_GPU, max_model_len=32_768, kv_cache_memory_bytes=int(flag[1]))
    assert enough.max_model_len == 32_768


def test_deterministic_mode_on_a_cpu_reads_prompts_in_fixed_chunks() -> None:
    for asked in ({}, {"quantization": "int8"}, {"quantization": "int4", "cpu_weights": "exact"}):
        assert plan(QWEN_05B, NO_GPU, deterministic=True, **asked).fixed_chunk == 128
    assert plan(QWEN_05B, NO_GPU).fixed_chunk == 0
    made = plan(LLAMA_8B, gpu_machine(23), deterministic=True)
    assert (made.device, made.fixed_chunk) == ("cuda:0", 0)


def test_a_fixed_chunk_needs_room_beside_every_request() -> None:
    assert plan(QWEN_05B, NO_GPU, deterministic=True, max_num_batched_tokens=144, max_num_seqs=16).fixed_chunk == 128
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 143 is too small") as refused:
        plan(QWEN_05B, NO_GPU, deterministic=True, max_num_batched_tokens=143, max_num_seqs=16)
    assert "--max-num-batched-tokens 144" in refused.value.hint


def test_a_cpu_limits_prompts_beside_decodes_by_time_unless_tokens_are_asked_for() -> None:
    made = plan(QWEN_05B, NO_GPU)
    assert (made.target_step_s, made.long_prefill_token_threshold) == (0.2, made.max_num_batched_tokens)
    made = plan(QWEN_05B, NO_GPU, long_prefill_token_threshold=100)
    assert (made.target_step_s, made.long_prefill_token_threshold) == (0.0, 100)
    assert plan(LLAMA_8B, gpu_machine(23)).target_step_s == 0.0
    made = plan(QWEN_05B, NO_GPU, tensor_parallel_size=2)
    assert (made.target_step_s, made.long_prefill_token_threshold) == (0.0, made.max_num_batched_tokens // 4)


def test_a_gpu_reads_larger_blocks() -> None:
    assert plan(QWEN_05B, NO_GPU).block_size == 16
    assert plan(QWEN_05B, gpu_machine(23)).block_size == 64
    assert plan(QWEN_05B, gpu_machine(23), block_size=32).block_size == 32


def test_graphs_have_their_share_unless_there_are_none() -> None:
    with_graphs, eager = (plan(LLAMA_8B, gpu_machine(23), enforce_eager=eager) for eager in (False, True))
    assert (with_graphs.graph_bytes > 0, eager.graph_bytes) == (True, 0)
    assert eager.num_blocks > with_graphs.num_blocks
    assert plan(QWEN_05B, NO_GPU).graph_bytes == 0


@draws(40)
@given(weights=st.integers(14 * GIB, 16 * GIB), activations=st.integers(0, GIB))
def test_a_measured_plan_takes_the_numbers_as_they_are(weights: int, activations: int) -> None:
    hardware = gpu_machine(23)
    made = plan_memory(
        EngineConfig(), LLAMA_8B, WEIGHTS[LLAMA_8B.architecture], hardware, measured=Measured(weights, activations)
    )
    assert made.is_measured
    assert (made.weights_bytes, made.activation_bytes) == (weights, activations)
    assert made.total_bytes + made.reserve_bytes <= made.free_bytes
    block = made.kv_bytes // made.num_blocks[0]
    budget = (made.free_bytes - made.reserve_bytes) * 0.9
    assert made.total_bytes + block > budget - block  # nothing that fits is left out


@draws(60)
@given(free=st.floats(1.5, 80), block_size=st.sampled_from([8, 16, 32]), on_gpu=st.booleans())
def test_auto_length_fits_and_one_block_more_does_not(free: float, block_size: int, on_gpu: bool) -> None:
    """I28, on paper."""
    hardware = gpu_machine(free, 80) if on_gpu else replace(NO_GPU, ram_available_bytes=int(free * GIB))
    try:
        made = plan(QWEN_05B, hardware, block_size=block_size, dtype="bfloat16")
    except DoesNotFit:
        return
    again = plan(QWEN_05B, hardware, block_size=block_size, dtype="bfloat16", max_model_len=made.max_model_len)
    assert again.max_model_len == made.max_model_len
    if made.max_model_len < QWEN_05B.max_position:
        longer = min(made.max_model_len + block_size, QWEN_05B.max_position)
        with pytest.raises(DoesNotFit, match="largest length that works with steps"):
            plan(QWEN_05B, hardware, block_size=block_size, dtype="bfloat16", max_model_len=longer)


def test_a_refused_context_names_the_tokens_of_a_step() -> None:
    """In a model with windows, fewer of them free more memory than fewer tokens of context."""
    few = 40 << 20
    windowed = replace(QWEN_05B, sliding_window=512, layer_is_windowed=(True,) * 20 + (False,) * 4)
    for spec in (QWEN_05B, windowed):
        with pytest.raises(DoesNotFit, match="largest length that works with steps of 2,048 tokens") as caught:
            plan(spec, NO_GPU, max_model_len=16_384, kv_cache_memory_bytes=few, max_num_batched_tokens=2048)
        assert "less than --max-num-batched-tokens 2048" in caught.value.hint
        assert ("layers with a window" in caught.value.hint) == (spec is windowed)


@draws(40)
@given(free=st.floats(18, 78), more=st.floats(0, 2))
def test_more_memory_never_gives_a_smaller_plan(free: float, more: float) -> None:
    try:
        small = plan(LLAMA_8B, gpu_machine(free, 80), device="cuda")
    except DoesNotFit:
        return
    large = plan(LLAMA_8B, gpu_machine(free + more, 80), device="cuda")
    assert large.max_model_len >= small.max_model_len
    assert large.num_blocks >= small.num_blocks


@pytest.mark.parametrize(
    "more", [{"max_num_batched_tokens": 1024}, {"max_model_len": 16_384}, {"max_num_seqs": 128},
             {"kv_cache_memory_bytes": 3 * GIB}]
)  # fmt: skip
def test_whatever_makes_a_step_larger_is_planned_for(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch)
    base = {"max_num_batched_tokens": 512, "max_model_len": 8192, "max_num_seqs": 64, "kv_cache_memory_bytes": GIB}
    assert plan(QWEN_05B, NO_GPU, **{**base, **more}).activation_bytes > plan(QWEN_05B, NO_GPU, **base).activation_bytes


def test_the_mask_of_one_chunk_grows_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch)
    short, long = (plan(QWEN_05B, NO_GPU, max_model_len=n, kv_cache_memory_bytes=GIB) for n in (8192, 16_384))
    assert long.activation_bytes - short.activation_bytes >= 8192 * short.max_num_batched_tokens * 4


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_length_beyond_the_cache_names_the_largest_that_works() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(LLAMA_8B, gpu_machine(21), max_model_len=65_536)
    largest = plan(LLAMA_8B, gpu_machine(21)).max_model_len
    assert caught.value.param == "max_model_len"
    assert f"{largest:,}" in caught.value.why
    assert f"--max-model-len {largest}" in caught.value.hint
    assert "--gpu-memory-utilization" in caught.value.hint
    assert "is chosen automatically" in caught.value.hint
    assert plan(LLAMA_8B, gpu_machine(21), max_model_len=largest).max_model_len == largest


def test_length_beyond_the_positions_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="32,768") as caught:
        plan(QWEN_05B, NO_GPU, max_model_len=65_536)
    assert "--max-model-len 32768" in caught.value.hint


def test_cpu_cache_hint_names_the_bytes_that_would_hold_it() -> None:
    small = replace(NO_GPU, ram_available_bytes=8 * GIB)
    with pytest.raises(DoesNotFit) as caught:
        plan(LLAMA_8B, replace(NO_GPU, ram_available_bytes=26 * GIB), max_model_len=40_000)
    asked = int(caught.value.hint.split("--kv-cache-memory-bytes ")[1].split(",")[0])
    wide = replace(NO_GPU, ram_available_bytes=26 * GIB)
    assert plan(LLAMA_8B, wide, max_model_len=40_000, kv_cache_memory_bytes=asked).max_model_len == 40_000
    with pytest.raises(DoesNotFit, match="Weights need"):
        plan(LLAMA_8B, small)


def test_low_utilisation_names_the_smallest_that_works() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(LLAMA_8B, gpu_machine(23), gpu_memory_utilization=0.5)
    smallest = float(caught.value.hint.split("--gpu-memory-utilization ")[1].split()[0])
    assert "15.0 GiB" in caught.value.why
    plan(LLAMA_8B, gpu_machine(23), gpu_memory_utilization=smallest)
    with pytest.raises(DoesNotFit):
        plan(LLAMA_8B, gpu_machine(23), gpu_memory_utilization=smallest - 0.01)


def test_weights_larger_than_the_gpu_point_to_smaller_things() -> None:
    with pytest.raises(DoesNotFit, match="Card") as caught:
        plan(LLAMA_8B, gpu_machine(11, 12), device="cuda")
    assert "--device cpu" in caught.value.hint
    assert "utilization" not in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"quantization": "awq"}, UnsupportedOption, "--quantization awq.*not quantised.*int4, int8, fp8"),
        ({"quantization": "int3"}, UnsupportedOption, "--quantization int3 is not known"),
        ({"device": "cuda"}, ConfigError, "none is usable"),
        ({"device": "tpu"}, ConfigError, "auto, cpu, cuda"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        plan(LLAMA_8B, NO_GPU, **asked)
    assert caught.value.param in asked
    assert caught.value.hint


RANKS, NO_NAMES = {"data_parallel_size": 2}, {"enable_prefix_caching": False}


@pytest.mark.parametrize("asked", [{"kv_disk_gib": 1.0}, {"kv_offloading_size": 1.0}, {"swap_space": 1.0}])
@pytest.mark.parametrize(
    ("beside", "why"), [(RANKS, "several ranks or replicas"), (NO_NAMES, "without --enable-prefix-caching")]
)
def test_tiers_of_blocks_that_cannot_move_are_refused_by_name_before_the_weights(
    beside: dict[str, Any], why: str, asked: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedOption, match=why) as caught:
        plan(LLAMA_8B, NO_GPU, **beside, **asked)
    assert caught.value.param in asked
    made = plan(LLAMA_8B, NO_GPU, **beside, **dict.fromkeys(asked, 0.0))
    assert (made.kv_ram_bytes, made.kv_swap_bytes, made.kv_disk_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("hardware", "asked", "ram", "swap"),
    [
        (NO_GPU, {}, 0, 0),
        (NO_GPU, {"kv_offloading_size": 4.0}, 4 * GIB, 2 * GIB),
        (NO_GPU, {"kv_offloading_size": 4.0, "swap_space": 1.0}, 4 * GIB, GIB),
        (NO_GPU, {"kv_offloading_size": 4.0, "swap_space": 6.0}, 6 * GIB, 6 * GIB),
        (gpu_machine(23), {"kv_offloading_size": 0.0}, 0, 0),
    ],
)
def test_ram_of_tiers_is_as_asked(hardware: Hardware, asked: dict[str, Any], ram: int, swap: int) -> None:
    made = plan(QWEN_05B, hardware, **asked)
    assert (made.kv_ram_bytes, made.kv_swap_bytes) == (ram, swap)
    assert not any("of RAM" in note for note in made.notes)


def test_tiers_take_no_more_ram_than_the_model_leaves() -> None:
    made = plan(QWEN_05B, NO_GPU, kv_offloading_size=1000.0)
    assert made.kv_ram_bytes == made.unused_bytes
    assert made.kv_swap_bytes == made.unused_bytes // 2
    assert any("instead of 1,000 GiB" in note or "instead of 1000 GiB" in note for note in made.notes)


def test_blocks_on_disk_are_named_in_the_notes_with_how_to_delete_them() -> None:
    [note] = plan(QWEN_05B, NO_GPU, kv_disk_gib=2.0).notes
    assert "up to 2.0 GiB" in note
    assert "localllm kv clear" in note


def test_unknown_gpu_lists_those_there() -> None:
    with pytest.raises(ConfigError, match=r"cuda:0 \(Card\)"):
        plan(LLAMA_8B, gpu_machine(23), device="cuda:1")


def test_too_large_a_cache_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="left"):
        plan(QWEN_05B, NO_GPU, kv_cache_memory_bytes=100 * GIB)


# ---- decisions -------------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpu_with_the_most_room() -> None:
    cards = tuple(Gpu(i, f"Card {i}", 24 * GIB, free * GIB, (8, 6)) for i, free in enumerate((4, 22, 10)))
    assert plan(QWEN_05B, replace(NO_GPU, gpus=cards)).device == "cuda:1"
    assert plan(QWEN_05B, replace(NO_GPU, gpus=cards), device="cuda:2").device == "cuda:2"
    assert plan(QWEN_05B, replace(NO_GPU, gpus=cards), device="cpu").device == "cpu"


@pytest.mark.parametrize(
    ("free_gib", "asked", "dtype"),
    [(24, "auto", "float32"), (3.5, "auto", "bfloat16"), (3.5, "float32", "float32"), (24, "float16", "float16")],
)
def test_cpu_dtype(free_gib: float, asked: str, dtype: str) -> None:
    hardware = replace(NO_GPU, ram_total_bytes=8 * GIB, ram_available_bytes=int(free_gib * GIB))
    made = plan(QWEN_05B, hardware, dtype=asked, max_num_seqs=4)
    assert made.dtype == dtype
    assert any("bfloat16 instead" in note for note in made.notes) == (asked == "auto" and dtype == "bfloat16")


def test_a_model_of_transformers_is_said_to_be_slower_on_a_cpu() -> None:
    spec = replace(QWEN_05B, implementation="transformers")
    assert plan(spec, NO_GPU).notes == (THROUGH_TRANSFORMERS.format(why=""),)
    reason = replace(spec, why_transformers="a layer has a part")
    assert plan(reason, NO_GPU).notes == (THROUGH_TRANSFORMERS.format(why=", because a layer has a part"),)
    assert THROUGH_TRANSFORMERS.format(why="") not in (
        *plan(QWEN_05B, NO_GPU).notes,
        *plan(spec, gpu_machine(24)).notes,
    )


def test_a_gpu_before_turing_is_not_used_and_says_why() -> None:
    pascal = Gpu(0, "Tesla P100", 16 * GIB, 15 * GIB, (6, 0))
    made = plan(QWEN_05B, replace(NO_GPU, gpus=(pascal,)))
    assert made.device == "cpu"
    assert any("Tesla P100 has compute capability 6.0; the kernels need 7.5" in note for note in made.notes)
    with pytest.raises(ConfigError, match="too old") as refused:
        plan(QWEN_05B, replace(NO_GPU, gpus=(pascal,)), device="cuda")
    assert "6.0" in refused.value.why
    beside = Gpu(1, "RTX 4090", 24 * GIB, 8 * GIB, (8, 9))
    assert plan(QWEN_05B, replace(NO_GPU, gpus=(pascal, beside))).device == "cuda:1"


def test_old_gpu_runs_float16_and_says_so() -> None:
    old = gpu_machine(23, capability=(7, 5))
    made = plan(LLAMA_8B, old)
    assert made.dtype == "float16"
    assert any("7.5" in note for note in made.notes)
    with pytest.raises(UnsupportedOption, match="bfloat16"):
        plan(LLAMA_8B, old, dtype="bfloat16")


@pytest.mark.parametrize(("asked", "on_gpu", "depth"), [(None, True, 2), (None, False, 1), (True, False, 2),
                                                        (False, True, 1)])  # fmt: skip
def test_async_depth(asked: bool | None, on_gpu: bool, depth: int) -> None:
    assert plan(QWEN_05B, gpu_machine(20) if on_gpu else NO_GPU, async_scheduling=asked).async_depth == depth


def test_timid_settings_start_and_say_what_they_leave() -> None:
    made = plan(QWEN_05B, gpu_machine(23), gpu_memory_utilization=0.3)
    assert any("stay unused" in note for note in made.notes)
    exact = plan(QWEN_05B, NO_GPU, kv_cache_memory_bytes=GIB, max_model_len=2048)
    assert GIB - exact.kv_bytes < exact.kv_bytes // exact.num_blocks[0]
    assert any("stay unused" in note for note in exact.notes)


def test_small_step_budget_is_noted_and_caps_the_chunk() -> None:
    made = plan(QWEN_05B, NO_GPU, max_num_batched_tokens=32, long_prefill_token_threshold=100)
    assert made.long_prefill_token_threshold == 32
    assert any("decode together" in note for note in made.notes)
