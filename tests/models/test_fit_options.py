"""What is offered instead really fits, gives more, and can be typed; and what `localllm fit` says of it."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm import cli
from localllm.config.flags import settings_from
from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, DoesNotFit
from localllm.machine import hardware
from localllm.machine.hardware import Hardware
from localllm.models.fit import (
    Estimate,
    MemoryPlan,
    MemoryReport,
    activation_bytes,
    estimate,
    fit_options,
    kv_bytes_per_token,
    plan_memory,
)
from localllm.models.fit.activation_bytes import StepMemory
from localllm.models.fit.checkpoint import estimate_checkpoint
from localllm.models.fit.options import FOUR_BITS
from localllm.models.spec.latent import LatentSpec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from localllm.runner.kv_cache import KVCache
from tests.draws import draws
from tests.hub.conftest import *  # noqa: F403  its fixtures: a hub on this machine
from tests.kv import of_each
from tests.models.harness import GIB, LLAMA_8B, NO_GPU, QWEN_05B, WEIGHTS, gpu_machine, without_library

MIB = 1024**2


def resident(spec: ModelSpec) -> Callable[..., int]:
    """As a loader would answer: matrices take fewer bytes when they are quantised, tables grow with the context."""

    def count(device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None) -> int:
        bits = {None: 16 if dtype != "float32" else 32, "int8": 9, "fp8": 9, "int4": 5}[quantization]
        return WEIGHTS[spec.architecture] * bits // 16 + 256 * max_model_len

    return count


def plan(spec: ModelSpec, machine: Hardware, config: EngineConfig) -> MemoryPlan:
    return plan_memory(config, spec, WEIGHTS[spec.architecture], machine, resident_bytes=resident(spec))


MACHINES = st.one_of(
    st.floats(6, 30).map(lambda free: gpu_machine(free, 32)),
    st.floats(1, 30).map(lambda free: replace(NO_GPU, ram_available_bytes=int(free * GIB))),
)


@draws(10)
@given(
    machine=MACHINES,
    spec=st.sampled_from([QWEN_05B, LLAMA_8B]),
    seqs=st.sampled_from([1, 64, 512]),
    length=st.sampled_from([None, 4096, 32_768]),
    kv_bytes=st.sampled_from([None, 200 * MIB, 2 * GIB]),
    kv_dtype=st.sampled_from(["auto", "int8", "k8v4"]),
)
def test_options_fit_and_give_more(
    machine: Hardware, spec: ModelSpec, seqs: int, length: int | None, kv_bytes: int | None, kv_dtype: str
) -> None:
    config = EngineConfig(
        max_num_seqs=seqs, max_model_len=length, kv_cache_memory_bytes=kv_bytes, kv_cache_dtype=kv_dtype
    )
    best = None
    try:
        best = plan(spec, machine, config)
        options = fit_options(config, spec, machine, lambda asked: plan(spec, machine, asked), best)
    except DoesNotFit as error:
        options = tuple(error.options)
    for option in options:
        again = plan(spec, machine, replace(config, **option.changes))
        assert replace(again, notes=()) == replace(option.plan, notes=())
        assert best is None or option.context > best.max_model_len
        assert again.total_bytes + again.reserve_bytes <= again.free_bytes
        typed = settings_from(cli.parse(["up", "demo", *option.flags.split()])).engine
        assert {name: getattr(typed, name) for name in option.changes} == dict(option.changes)
    asked = [{k: v for k, v in option.changes.items() if k != "max_model_len"} for option in options]
    for i, one in enumerate(asked):
        for j in range(i):
            if asked[j].items() <= one.items():
                assert options[j].context < options[i].context, "a flag more gives more"


def test_a_cache_that_was_asked_for_is_whole_beside_the_longest_context() -> None:
    """A long context takes from what is left for the cache: on a CPU a step gathers keys and values."""
    machine = replace(NO_GPU, ram_available_bytes=int(2.25 * GIB))
    small = {"quantization": "int4", "max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"}
    config = EngineConfig(max_num_seqs=1, kv_cache_memory_bytes=200 * MIB, **small)  # type: ignore[arg-type]
    found = plan(QWEN_05B, machine, config)
    assert found.kv_bytes > 199 * MIB
    assert plan(QWEN_05B, machine, replace(config, max_model_len=found.max_model_len)).kv_bytes == found.kv_bytes


def test_the_refusal_carries_what_would_fit() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(LLAMA_8B, gpu_machine(11, 12), EngineConfig(device="cuda"))
    words = [option.words for option in caught.value.options]
    assert any("--quantization int4" in each for each in words)
    assert words[-1] == "--device cpu"
    assert caught.value.plan.weights_bytes > 14 * GIB


def test_a_cache_in_8_bits_is_offered_where_it_holds_what_was_asked() -> None:
    length = plan(LLAMA_8B, gpu_machine(21), EngineConfig()).max_model_len + 1024
    with pytest.raises(DoesNotFit) as caught:
        plan(LLAMA_8B, gpu_machine(21), EngineConfig(max_model_len=length))
    found = {option.words: option for option in caught.value.options}
    assert found["--kv-cache-dtype fp8"].context == length
    assert found["--kv-cache-dtype fp8"].concurrency >= 1


def test_four_bits_are_offered_behind_eight_and_the_narrowest_last() -> None:
    """Where 8 bits are not enough, or are asked for."""
    length = 4 * plan(LLAMA_8B, gpu_machine(21), EngineConfig()).max_model_len - 2048
    for asked, offered in (("auto", ["fp8", "int8", "k8v4", "int4"]), ("int8", ["k8v4", "int4"]), ("k8v4", ["int4"])):
        config = EngineConfig(max_model_len=length, kv_cache_dtype=asked)
        with pytest.raises(DoesNotFit) as caught:
            plan(LLAMA_8B, gpu_machine(21), config)
        alone = [
            each.changes for each in caught.value.options if set(each.changes) <= {"kv_cache_dtype", "max_model_len"}
        ]
        assert [each["kv_cache_dtype"] for each in alone if "kv_cache_dtype" in each] == offered


def estimates(machine: Hardware, spec: ModelSpec = LLAMA_8B, **asked: Any) -> list[Estimate]:
    return estimate(EngineConfig(**asked), spec, WEIGHTS[spec.architecture], machine, resident(spec))


def test_every_device_is_told_the_one_that_would_be_taken_first() -> None:
    small, large = (gpu_machine(free).gpus[0] for free in (6, 23))
    machine = replace(NO_GPU, gpus=(small, replace(large, index=1)))
    found = estimates(machine)
    assert [each.device for each in found] == ["cuda:1", "cuda:0", "cpu"]
    assert [each.is_chosen for each in found] == [True, False, False]
    assert [each.verdict for each in found[:2]] == ["fits with a shorter context", "does not fit"]
    assert found[1].needs.weights_bytes > 14 * GIB
    assert [each.device for each in estimates(machine, device="cuda:0")] == ["cuda:0"]


def test_concurrency_counts_whole_blocks_and_slots() -> None:
    found = estimates(gpu_machine(23), max_num_seqs=3)[0]
    assert found.plan is not None
    blocks = found.plan.num_blocks[0] - 1
    assert found.concurrency == {
        length: min(3, blocks // (length // 64)) if length <= found.plan.max_model_len else 0
        for length in (4096, 8192, 32_768)
    }


def test_a_cache_that_is_too_large_leaves_an_estimate_of_the_rest() -> None:
    found = estimates(NO_GPU, QWEN_05B, kv_cache_memory_bytes=100 * GIB)[0]
    assert found.verdict == "does not fit"
    assert found.needs.weights_bytes == resident(QWEN_05B)("cpu", "float32", found.needs.max_model_len, None)
    assert found.options[0].words == "without --kv-cache-memory-bytes"


# ---- sizes -----------------------------------------------------------------------------------------------------------

LATENT = LatentSpec(latent_size=32, rope_size=16, nope_size=16, value_size=24)
SPECS = {
    "grouped": replace(QWEN_05B, num_layers=3),
    "wide heads": replace(QWEN_05B, num_layers=2, num_kv_heads=1, head_dim=256),
    "windowed": replace(QWEN_05B, num_layers=2, sliding_window=128, layer_is_windowed=(True, False)),
    "latent": replace(QWEN_05B, num_layers=2, num_kv_heads=1, head_dim=LATENT.cached_size, latent=LATENT),
}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", SPECS)
def test_a_token_takes_what_the_cache_allocates(name: str, kv_dtype: str) -> None:
    """Windowed layers keep every token, too: blocks that have left the window are not given back."""
    if name == "latent" and kv_dtype in FOUR_BITS:
        pytest.skip("4 bits are not supported for latents")
    cache = KVCache(SPECS[name], of_each(SPECS[name], 5), 16, torch.device("cpu"), kv_dtype)
    assert cache.allocated_bytes == 5 * 16 * kv_bytes_per_token(SPECS[name], kv_dtype)


def test_a_window_bounds_what_a_cpu_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it what a full cache costs beside itself: more of it fits."""
    without_library(monkeypatch)
    windowed = replace(QWEN_05B, sliding_window=512, layer_is_windowed=(True,) * 24)
    small = replace(NO_GPU, ram_available_bytes=6 * GIB)
    made = []
    for spec in (QWEN_05B, windowed):
        step = StepMemory(spec, "float32", "float32", False, 8, 512, 16)
        at = [step.bytes_at(2048, blocks) for blocks in (10**5, 10**6)]
        assert (at[0] == at[1]) == (spec is windowed)
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048, dtype="bfloat16")
        with pytest.raises(DoesNotFit) as caught:  # says how much would be left
            plan(spec, small, replace(config, kv_cache_memory_bytes=100 * GIB))
        left = float(caught.value.why.split(" GiB")[0])
        fits = plan(spec, small, replace(config, kv_cache_memory_bytes=int((left - 0.1) * GIB)))
        assert fits.total_bytes + fits.reserve_bytes <= fits.free_bytes
        made.append(left)
    assert made[1] > made[0]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_the_native_library_reads_a_full_cache_where_it_is(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the types that it knows."""
    monkeypatch.setattr(activation_bytes, "chosen_set", lambda: ("avx2", ""))
    step = StepMemory(QWEN_05B, "float32", kv_dtype, False, 8, 512, 16)
    assert (step.gathered_per_block() == 0) == (kv_dtype != "float8_e4m3fn")
    without_library(monkeypatch)
    assert StepMemory(QWEN_05B, "float32", kv_dtype, False, 8, 512, 16).gathered_per_block() > 0


def test_the_report_names_what_was_not_measured() -> None:
    predicted = plan(LLAMA_8B, gpu_machine(23), EngineConfig())
    on_gpu = MemoryReport.of(predicted, replace(predicted, weights_bytes=15 * GIB, is_measured=True), 7)
    assert [part.measured_bytes for part in on_gpu.parts] == [
        15 * GIB, predicted.kv_bytes, predicted.activation_bytes
    ]  # fmt: skip
    assert on_gpu.parts[0].error == predicted.weights_bytes / (15 * GIB) - 1
    on_cpu = MemoryReport.of(predicted, predicted, 16 * GIB)
    assert [part.measured_bytes for part in on_cpu.parts] == [16 * GIB, None, None]
    assert on_cpu.parts[1].error is None


@pytest.mark.parametrize("field", ["max_position", "vocab_size", "intermediate_size", "num_kv_heads"])
def test_absurd_sizes_are_arithmetic(field: str) -> None:
    try:
        made = plan(replace(QWEN_05B, **{field: 10**15}), NO_GPU, EngineConfig())
    except DoesNotFit:
        return
    assert made.total_bytes <= made.free_bytes


@pytest.mark.parametrize("change", [{"vocab_size": 10**12}, {"hidden_size": 4 * 10**9}, {"num_hidden_layers": 10**9}])
def test_a_config_larger_than_its_weights_allocates_nothing(
    change: dict[str, int], tiny_llama_path: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_llama_path, tmp_path / "absurd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CorruptModel):
        estimate_checkpoint(folder, EngineConfig(), NO_GPU)


# ---- the verb --------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Hardware], None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda found: monkeypatch.setattr(hardware, "read_hardware", lambda: found)


def test_fit_tells_people(
    machine: Callable[[Hardware], None], tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(gpu_machine(10))
    assert cli.main(["fit", str(tiny_llama_path)]) == 0
    told = capsys.readouterr().out
    for words in ("cuda:0", "CPU", "weights", "KV cache, per token", "activations", "reserve", "fits", "2,048"):
        assert words in told


def test_fit_tells_programs(
    machine: Callable[[Hardware], None], tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(NO_GPU)
    assert cli.main(["fit", str(tiny_llama_path), "--json", "--max-model-len", "1024"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["verdict"] == "fits"
    assert device["plan"]["max_model_len"] == 1024
    assert device["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_fit_that_does_not_says_what_would(
    machine: Callable[[Hardware], None], tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(replace(NO_GPU, ram_total_bytes=GIB, ram_available_bytes=GIB // 2 + 28 * MIB))
    assert cli.main(["fit", str(tiny_llama_path), "--max-num-seqs", "2000"]) == 4
    told = capsys.readouterr().out
    assert "does not fit" in told
    assert "--max-num-seqs 32" in told
    assert cli.main(["up", str(tiny_llama_path), "--max-num-seqs", "2000", "--port", "0"]) == 4
    assert "The model would fit with\n" in capsys.readouterr().err


def test_fit_before_a_download(
    machine: Callable[[Hardware], None], hub: Any, tiny_model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    machine(NO_GPU)
    folder = tiny_model_path("qwen3")
    hub.add_repo("org/tiny", folder)
    told = {}
    for name in ("org/tiny", str(folder)):
        assert cli.main(["fit", name, "-tp", "2", "--json"]) == 0
        told[name] = json.loads(capsys.readouterr().out)
    assert told["org/tiny"]["download_bytes"] > 0
    assert told["org/tiny"]["devices"] == told[str(folder)]["devices"]
    assert len(told["org/tiny"]["devices"][0]["plan"]["ranks"]) == 2
    assert hub.bytes_sent("model.safetensors") < (folder / "model.safetensors").stat().st_size / 2


def test_a_row_that_no_device_can_fill_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo has a context of 2,048 tokens: no request of 4,096 fits into it."""
    assert cli.main(["fit", "demo"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  requests of")]
    assert [row for row in rows if re.fullmatch(r"  requests of [\d,]+", row.rstrip())] == []
