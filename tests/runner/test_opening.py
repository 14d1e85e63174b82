"""A runner is opened: what the largest steps are, and how a plan follows what was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit
from localllm.kernels import launch
from localllm.kernels.choice import ALL_KERNELS
from localllm.kernels.launch import DEFAULTS, LaunchOptions, launch_options, launching_with
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import Measured, MemoryPlan, plan_memory
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import executor, opening
from localllm.runner.executor import LocalExecutor
from localllm.runner.kv_cache import KVCache
from localllm.runner.opening import largest_steps, launch_options_of, launches_early_by_default, open_runner, replan
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.tiny import make_tiny_model

GIB = 1024**3
CPU = torch.device("cpu")
MACHINE = Hardware((), "CPU", 2, 32 * GIB, 24 * GIB)
CARD = replace(MACHINE, gpus=(Gpu(0, "Card", 24 * GIB, 22 * GIB, (9, 0), "580"),))


def small_plan(spec: ModelSpec, **asked: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(max_num_seqs=4, **asked), spec, 10_000_000, MACHINE)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8", "k8v4"])
def test_a_runner_on_a_cpu_keeps_the_plan(model: Any, spec: ModelSpec, tmp_path: Path, kv_dtype: str) -> None:
    if kv_dtype == "k8v4":  # needs heads of a multiple of 32 numbers
        path = make_tiny_model(tmp_path / "wide", head_dim=32)
        spec = read_spec(path)
        model = load_model(path, spec, CPU, torch.float32)
    plan = small_plan(spec, max_model_len=128, kv_cache_dtype=kv_dtype)
    runner, kept = open_runner(model, spec, EngineConfig(), plan, MACHINE, lambda text: None)
    assert kept == plan
    assert runner.num_blocks == plan.num_blocks
    runner.close()
    cache, _, kept = opening._allocate(spec, EngineConfig(), plan, MACHINE, CPU)
    assert cache.allocated_bytes == kept.kv_bytes == plan.kv_bytes


def test_how_kernels_are_launched_is_set(model: Any, spec: ModelSpec) -> None:
    plan = small_plan(spec, max_model_len=128)
    seen: list[LaunchOptions] = []

    class Watched:
        def forward(self, *given: Any) -> torch.Tensor:
            seen.append(launch_options())
            return model.forward(*given)  # type: ignore[no-any-return]

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    for asked in (True, False):
        config = EngineConfig(deterministic=asked, programmatic_launch=not asked)
        runner, _ = open_runner(Watched(), spec, config, plan, MACHINE, lambda text: None)
        runner.forward(largest_steps(plan, 16)[0])
        runner.close()
        assert seen.pop() == LaunchOptions(deterministic=asked, programmatic_launch=not asked)
        assert launch_options() == DEFAULTS


@pytest.mark.parametrize(
    ("capability", "driver", "early"),
    [((9, 0), (13, 0), True), ((9, 0), None, True), ((9, 0), (12, 2), False), ((12, 0), (13, 0), False)],
)
def test_kernels_start_early_where_driver_and_gpu_are_known_to_do_it(
    capability: tuple[int, int], driver: tuple[int, int] | None, early: bool
) -> None:
    assert launches_early_by_default(capability, driver) == early


def test_without_kernels_every_operation_uses_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)  # as on a GPU
    chosen = [launch_options_of(EngineConfig(kernels=kernels), CPU) for kernels in ("auto", "torch")]
    for options, uses_kernels in zip(chosen, (True, False), strict=True):
        with launching_with(options):
            assert {launch.runs_triton(torch.zeros(1), kernel) for kernel in ALL_KERNELS} == {uses_kernels}


@pytest.mark.parametrize(("tokens", "block_size"), [(128, 16), (100, 8), (1, 16)])
def test_the_largest_steps_are_whole_and_run(model: Any, spec: ModelSpec, tokens: int, block_size: int) -> None:
    plan = small_plan(spec, max_model_len=128, block_size=block_size)
    kv = KVCache(spec, of_each(spec, 2 + max(-(-tokens // block_size), 4)), block_size, CPU, "float32")
    runner = TorchRunner(model, spec, kv, max_num_seqs=4, max_num_batched_tokens=plan.max_num_batched_tokens,
                         max_model_len=128, block_size=block_size, device=CPU)  # fmt: skip
    steps = largest_steps(plan, tokens)
    assert [step.num_tokens for step in steps] == [tokens, 4]
    for step in steps:
        runner.forward(step)
        assert all(len(row.token_ids) == 1 for row in runner.sample(step).result().rows)


def test_a_measured_plan_keeps_to_the_context_that_was_loaded(spec: ModelSpec) -> None:
    config = EngineConfig(dtype="bfloat16", device="cuda", max_num_seqs=4)
    plan = plan_memory(config, spec, 10_000_000, CARD)
    again = replan(spec, config, plan, CARD, Measured(4_000_000, 100_000))
    assert again.is_measured
    assert again.max_model_len == plan.max_model_len
    assert again.num_blocks > plan.num_blocks  # the bound on activations was generous
    with pytest.raises(DoesNotFit, match="does not fit"):
        replan(spec, config, plan, CARD, Measured(23 * GIB, 1_000_000))


def test_memory_taken_meanwhile_shrinks_the_plan_and_is_told(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dtype="bfloat16", device="cuda", max_num_seqs=4)
    plan = plan_memory(config, spec, 10_000_000, CARD)
    tries: list[int] = []

    def refuse_once(spec: ModelSpec, num_blocks: int, *rest: Any) -> str:
        tries.append(num_blocks)
        if len(tries) == 1:
            raise DoesNotFit("The KV cache could not be allocated.")
        return "cache"

    now = replace(CARD, gpus=(replace(CARD.gpus[0], free_bytes=12 * GIB),))
    monkeypatch.setattr(opening, "KVCache", refuse_once)
    monkeypatch.setattr(opening, "read_hardware", lambda: now)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    kv, _, shrunk = opening._allocate(spec, config, plan, CARD, torch.device("cuda:0"))
    assert kv == "cache"  # type: ignore[comparison-overlap]
    assert tries == [plan.num_blocks, shrunk.num_blocks]
    assert shrunk.free_bytes == 12 * GIB
    assert shrunk.num_blocks < plan.num_blocks
    assert "Another program took 10" in shrunk.notes[-1]


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    MemoryError("Unable to allocate 3.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] data. DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_memory_that_runs_out_while_weights_are_loaded(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A rank answers with this error like with any other refusal, and its peers end."""

    def full(*given: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(executor, "load_model", full)
    plan = replace(small_plan(spec, max_model_len=128), weights_bytes=3 * GIB)
    with pytest.raises(DoesNotFit) as caught:
        LocalExecutor.load(Path(), spec, EngineConfig(), plan, lambda loaded, total: None)
    assert "3.0 GiB were planned for them on cpu" in caught.value.why
    assert str(error) in caught.value.why
    assert caught.value.__cause__ is error


def test_other_errors_of_a_load_stay_what_they_are(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(executor, "load_model", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        LocalExecutor.load(Path(), spec, EngineConfig(), small_plan(spec), lambda loaded, total: None)


@pytest.mark.parametrize("end", ["wakes", "closes"])
def test_weights_that_slept_leave_no_page_locked_memory(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Torch's allocator keeps the pages of freed tensors until it is asked to release them."""
    asleep = LocalExecutor.__new__(LocalExecutor)
    asleep._model = object()  # type: ignore[assignment]
    asleep._drafter = asleep._tower = None
    asleep._device, asleep._is_on_host = torch.device("cuda"), True
    released: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: released.append(True), raising=False)
    monkeypatch.setattr(executor, "replace_tensors", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    if end == "wakes":
        asleep.move_to_device()
    else:
        asleep.close()
    assert released == [True]


def test_ram_that_is_taken_during_a_load_ends_it_in_words(
    tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest has to fit into what is free. Nothing of the model stays, and a later load succeeds."""
    path, config = make_tiny_model(tmp_path), EngineConfig()
    plan = replace(plan_memory(config, read_spec(path), 10_000_000, MACHINE), weights_bytes=4 * GIB)
    free, seen = [5 * GIB], list[tuple[int, int]]()
    monkeypatch.setattr(executor, "CHECKED_BYTES", 1)
    monkeypatch.setattr(executor, "available_ram", lambda: free[0])

    def progress(loaded: int, total: int) -> None:
        seen.append((loaded, total))
        if loaded > total // 2:
            free[0] = GIB // 2

    with pytest.raises(DoesNotFit, match="Other programs have taken RAM while the model was loaded") as caught:
        LocalExecutor.load(path, read_spec(path), config, plan, progress)
    assert "512 MiB are free; 24.0 GiB were counted on" in caught.value.why
    loaded, total = seen[-1]
    assert total // 2 < loaded < total
    free[0] = 4 * GIB
    on_a_gpu = replace(plan, device="cuda:0")
    assert executor._while_ram_lasts(on_a_gpu, progress)(1, 100) is None  # type: ignore[func-returns-value]
    LocalExecutor.load(path, read_spec(path), config, plan, lambda loaded, total: None).close()
