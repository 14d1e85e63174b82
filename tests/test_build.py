"""Loading, from a name to an engine: phases in order, clear errors, nothing left behind."""

import gc
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import CorruptModel, DoesNotFit, EngineStopped, InvalidParameter, LocalLLMError
from localllm.models import read_spec as module
from localllm.models.fit import MemoryPlan
from localllm.models.fit.far import FarPlan
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import DrafterPlan, ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.weights.source import Progress
from localllm.runner.runner import TorchRunner
from localllm.serving import build
from localllm.serving.build import build_engine, sampling_defaults
from localllm.serving.phases import Phase
from localllm.serving.profiles import fingerprint
from localllm.serving.served import short_name
from tests.serving import PHASES, in_order, settings_for, spy_on_closing


@pytest.fixture
def closed_runners(monkeypatch: pytest.MonkeyPatch) -> list[TorchRunner]:
    return spy_on_closing(monkeypatch)


def test_phases_come_in_order_each_with_an_end(tiny_llama_path: Path) -> None:
    seen: list[Phase] = []
    build_engine(settings_for(tiny_llama_path), seen.append).close()
    assert in_order(dict.fromkeys(phase.name for phase in seen)) == PHASES
    assert in_order(phase.name for phase in seen if phase.done) == PHASES
    assert all(phase.detail for phase in seen if phase.done)
    fractions = [phase.fraction for phase in seen if phase.name == "weights" and phase.fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_the_model_answers_in_the_callers_thread(tiny_llama_path: Path) -> None:
    """As the offline API drives it: no thread, no event loop."""
    model = build_engine(settings_for(tiny_llama_path))
    [request] = model.admission.admit(GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
    outputs: list[Any] = []
    model.loop.deliver = outputs.extend
    model.loop.submit(request)
    while model.loop.scheduler.has_work or not outputs:
        model.loop.step()
    assert sum(len(output.token_ids) for output in outputs) == 4
    model.close()
    with pytest.raises(EngineStopped):
        model.loop.submit(request)
    model.close()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def test_a_tokenizer_that_cannot_be_read_ends_the_load(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read beside the weights, of which there may be many gigabytes."""
    reports = 0

    def load(path: Path, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan, progress: Progress, *_: Any) -> Any:
        nonlocal reports
        for reports in range(1000):
            progress(reports, 1000)
            time.sleep(0.01)

    def broken(path: Path, more: Sequence[str] = ()) -> Any:
        raise CorruptModel("The tokenizer is broken.")

    monkeypatch.setattr(build, "_executor", load)
    monkeypatch.setattr(build, "read_tokenizer", broken)
    with pytest.raises(CorruptModel, match="The tokenizer is broken"):
        build_engine(settings_for(tiny_llama_path))
    assert reports < 999


def test_no_garbage_is_collected_while_a_spec_imports_its_format(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collects: list[bool] = []

    def spied(*given: Any, **named: Any) -> ModelSpec:
        collects.append(gc.isenabled())
        return read_spec(*given, **named)

    monkeypatch.setattr(module, "read_spec", spied)
    build_engine(settings_for(tiny_llama_path)).close()
    assert collects[0] is False
    assert gc.isenabled()


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("damage", [truncated, without_architecture, without_config, without_tokenizer])
def test_damaged_models_are_refused_clearly(tiny_llama_path: Path, tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_llama_path, folder)
    damage(folder)
    with pytest.raises(LocalLLMError) as caught:
        build_engine(settings_for(folder))
    assert caught.value.what
    assert caught.value.exit_code != 0


def test_too_little_memory_is_refused_before_loading(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.models.loader.load_model", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(DoesNotFit):
        build_engine(settings_for(tiny_llama_path, kv_cache_memory_bytes=1024))


def test_what_fails_late_gives_back_what_was_taken(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch, closed_runners: list[TorchRunner]
) -> None:
    def fail(*args: object) -> None:
        raise CorruptModel("Something is wrong at the very end.")

    monkeypatch.setattr(build, "_assemble", fail)
    with pytest.raises(CorruptModel):
        build_engine(settings_for(tiny_llama_path))
    assert len(closed_runners) == 1


def test_queue_room(tiny_llama_path: Path) -> None:
    model = build_engine(settings_for(tiny_llama_path))
    most = model.plan.max_num_seqs + model.max_num_queued_reqs
    model.require_queue_room(most)  # nothing waits: the engine decides
    with pytest.raises(InvalidParameter, match="may wait"):
        model.require_queue_room(most + 1)
    model.close()


@pytest.mark.parametrize(
    ("generation_config", "params"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "min_p": 0.0}, {"temperature": 0.6, "top_k": 20, "min_p": 0.0}),
        ({"max_new_tokens": 77, "repetition_penalty": 1.1}, {"max_tokens": 77, "repetition_penalty": 1.1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True, "eos_token_id": [1, 2]}, {}),
    ],
)  # fmt: skip
def test_sampling_defaults(generation_config: dict[str, Any], params: dict[str, Any]) -> None:
    assert sampling_defaults(generation_config) == params


def test_generation_config_can_be_left_aside(tiny_llama_path: Path) -> None:
    for choice, temperature in (("auto", 0.7), ("vllm", 1.0)):
        model = build_engine(settings_for(tiny_llama_path, generation_config=choice))
        assert model.default_params.temperature == temperature
        model.close()


def test_fingerprints_tell_models_and_dtypes_apart(tiny_llama_path: Path, tmp_path: Path) -> None:
    model = build_engine(settings_for(tiny_llama_path))
    folder = tmp_path / "copy"
    shutil.copytree(tiny_llama_path, folder)
    config = EngineConfig()
    first = fingerprint(tiny_llama_path, model.plan, config, model.spec)
    assert first == fingerprint(tiny_llama_path, model.plan, config, model.spec)
    assert first != fingerprint(folder, model.plan, config, model.spec)
    before = fingerprint(folder, model.plan, config, model.spec)
    (folder / "model.safetensors").touch()
    assert before != fingerprint(folder, model.plan, config, model.spec)
    model.close()


PLAN = MemoryPlan("cpu", "float32", "float32", 256, 4, 64, 0, (9,), 16, 0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization": "int8"}, {"cpu_weights": "exact"}, {"model_impl": "transformers"}, {"kernels": "torch"},
        {"deterministic": True}, {"plan": {"block_size": 32}}, {"plan": {"kv_dtype": "int8"}},
        {"plan": {"device": "cuda:0"}}, {"plan": {"dtype": "float16"}}, {"plan": {"far": FarPlan((1,), 2, 0, 0, 0, 0)}},
    ],
)  # fmt: skip
def test_whatever_changes_kv_changes_the_fingerprint(tiny_llama_path: Path, changed: dict[str, Any]) -> None:
    """S23."""
    settings, spec = settings_for(tiny_llama_path), read_spec(tiny_llama_path)
    before = fingerprint(tiny_llama_path, PLAN, settings.engine, spec)
    other = replace(PLAN, **changed.pop("plan", {}))
    assert fingerprint(tiny_llama_path, other, replace(settings.engine, **changed), spec) != before
    same = replace(PLAN, num_blocks=(99,), max_model_len=64)
    assert fingerprint(tiny_llama_path, same, settings.engine, spec) == before


def test_a_drafter_and_its_files_change_the_fingerprint(tiny_llama_path: Path, tmp_path: Path) -> None:
    """Its K and V are in the model's blocks."""
    config, spec = settings_for(tiny_llama_path).engine, read_spec(tiny_llama_path)
    drafter = DrafterPlan("draft_model", tmp_path, spec, 0)
    prints = {fingerprint(tiny_llama_path, PLAN, config, spec)}
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"x")
        prints.add(fingerprint(tiny_llama_path, PLAN, config, replace(spec, drafter=drafter)))
    smaller = replace(drafter, quantization="int8")
    prints.add(fingerprint(tiny_llama_path, PLAN, config, replace(spec, drafter=smaller)))
    assert len(prints) == 5


def test_the_context_changes_the_fingerprint_where_it_chooses_longropes_factors(tiny_llama_path: Path) -> None:
    numbers = {"original_max_position_embeddings": 128}
    config, spec = settings_for(tiny_llama_path).engine, read_spec(tiny_llama_path)
    spec = replace(spec, rope=RopeSpec(variant="longrope", parameters=numbers))
    short, edge, long, longer = (
        fingerprint(tiny_llama_path, replace(PLAN, max_model_len=length), config, spec)
        for length in (64, 128, 129, 256)
    )
    assert short == edge != long == longer


IN_THE_PLAN = {
    "device", "dtype", "kv_cache_dtype", "block_size", "n_cpu_moe", "cpu_moe", "cpu_offload_gb", "weights_on",
    "stream_prompts",
}  # fmt: skip
IN_THE_SPEC = {"model", "revision", "max_model_len", "speculative", "draft", "speculative_config", "trust_remote_code"}
IN_THE_CONFIG = {"quantization", "cpu_weights", "model_impl", "kernels", "deterministic"}
IN_A_BLOCKS_NAME = {"lora_modules", "mmproj", "image_max_tokens", "image_min_tokens", "mm_processor_kwargs"}
CHANGE_NO_KV = """
    offline task verify profile enable_lora max_loras max_lora_rank generation_config seed enable_prompt_embeds
    max_logprobs limit_mm_per_prompt max_image_pixels gpu_memory_utilization kv_cache_memory_bytes
    enable_prefix_caching kv_offloading_size swap_space kv_disk_gib kv_offload_dir tensor_parallel_size
    pipeline_parallel_size data_parallel_size routing_policy prefill_replicas tensor_split pipeline_layer_partition
    device_ids enable_expert_parallel nodes ray_address distributed_executor_backend rank_timeout max_num_seqs
    max_num_batched_tokens long_prefill_token_threshold max_num_queued_reqs scheduling_policy async_scheduling draft_max
    expert_cache_gib enforce_eager programmatic_launch check_kernels torch_profiler_dir
    cpu_embeddings
"""


def test_each_setting_is_known_to_change_kv_or_not() -> None:
    """Whoever adds a setting has to say where it counts, so that no block is read for another content."""
    known = [*IN_THE_PLAN, *IN_THE_SPEC, *IN_THE_CONFIG, *IN_A_BLOCKS_NAME, *CHANGE_NO_KV.split()]
    assert sorted(known) == sorted(setting.name for setting in fields(EngineConfig))


@pytest.mark.parametrize(
    ("name", "short"), [("Qwen/Qwen3-8B", "Qwen3-8B"), ("demo", "demo"), ("/models/my-model", "my-model")]
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_gpu_is_readied_before_weights_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The transformers backend runs a model while it loads; nothing is loaded for kernels that cannot be launched."""
    from localllm.runner import executor

    done: list[object] = []

    def load(*_: object, **__: object) -> None:
        raise CorruptModel("read")

    monkeypatch.setattr(build, "require_kernels", lambda config, plan, on_phase: done.append(plan.device))
    monkeypatch.setattr(executor, "make_current", done.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(executor, "load_model", load)
    plan: Any = SimpleNamespace(device="cuda:1", dtype="float16", max_model_len=64, weights_bytes=0, ranks=(), far=None)
    spec: Any = None
    config = replace(settings_for(tmp_path).engine, programmatic_launch=False)
    with pytest.raises(CorruptModel):
        build._load(tmp_path, spec, config, plan, lambda phase: None, Future())
    assert done == ["cuda:1", torch.device("cuda:1")]
