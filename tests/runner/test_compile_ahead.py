"""Kernels are compiled side by side before they are launched; what goes wrong there is left to the launches.

Triton's own launches run here, over a driver and a compiler that do nothing (pretend_gpu.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.kernels.launch import HAS_TRITON, INTERPRETED

if not HAS_TRITON or INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton

from localllm.config.settings import EngineConfig
from localllm.kernels import triton_build
from localllm.kernels.checks.choose import Chooser
from localllm.kernels.checks.record import CheckRecord, RecordKey
from localllm.kernels.checks.table import COMPILATION, SIDE_BY_SIDE
from localllm.kernels.first_launch import _add_one_kernel
from localllm.kernels.triton_build import compile_ahead
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import local_spec
from localllm.ranks.group import ProcessGroup
from localllm.runner import opening, self_check
from localllm.runner.kv_cache import KVCache
from localllm.runner.opening import Parallel, compile_for_rank, open_runner
from localllm.runner.runner import TorchRunner
from tests.models.sharded import even_shards
from tests.runner.pretend_gpu import pretend_driver
from tests.runner.served import SERVED, Served, runner_of

CPU = torch.device("cpu")
KEY = RecordKey("", "t", "t", "s")
GIB = 1024**3
MACHINE = Hardware((), "CPU", 2, 32 * GIB, 24 * GIB)


def run_again(step: Callable[[], None]) -> Callable[[], None]:
    """A capture as CUDA's: the step runs once before it is recorded; a replay launches nothing."""
    step()
    return lambda: None


@pytest.mark.parametrize("served", [
    pytest.param(each, id=each.name, marks=[] if each.name == "dense" else pytest.mark.slow) for each in SERVED
])  # fmt: skip
def test_every_kernel_is_compiled_before_the_first_launch(served: Served) -> None:
    """Also those of steps that are recorded. The cache on disk knows them by the same key at their launch."""
    told: list[int] = []

    def warm_up() -> None:
        runner = runner_of(served, None)
        runner.warm_up()
        runner.close()

    with pretend_driver(served.arch) as gpu:
        count = compile_ahead(warm_up, 2, told.append)
        assert not gpu.launched()
        ahead = gpu.compiled("compile")
        assert (count, told) == (len(ahead), [len(ahead)])
        assert not gpu.compiled("MainThread")
        runner = runner_of(served, run_again)
        runner.warm_up()
        runner.close()
        assert gpu.compiled("MainThread") == ahead
        assert gpu.launched() == ahead


# ---- as a model is opened --------------------------------------------------------------------------------------------


class Staged(TorchRunner):
    """A runner whose steps are those of a GPU."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "staged": True})


@pytest.fixture
def opened(
    model: Any, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[list[str], tuple[str, ...]]]:
    """Opens a model as at a start: returns what was reported, and the notes. Comparisons pass without being made."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(self_check, "read_record", lambda device: CheckRecord.read(tmp_path, KEY))
    monkeypatch.setattr(self_check, "count_cores", lambda: 2)
    for module in (self_check, opening):
        monkeypatch.setattr(module, "is_checked", lambda config, device: True)
    monkeypatch.setattr(Chooser, "_compare", lambda *given: "")

    monkeypatch.setattr(opening, "TorchRunner", Staged)
    config = EngineConfig(max_num_seqs=2, max_model_len=128)
    plan = plan_memory(config, spec, 10_000_000, MACHINE)

    def start() -> tuple[list[str], tuple[str, ...]]:
        reports: list[str] = []
        runner, kept = open_runner(model, spec, config, plan, MACHINE, reports.append)
        runner.close()
        return reports, kept.notes

    return start


def test_a_first_start_says_what_it_compiles_and_a_later_one_rehearses_nothing(
    opened: Callable[[], tuple[list[str], tuple[str, ...]]], tmp_path: Path
) -> None:
    with pretend_driver() as gpu:
        reports, notes = opened()
        ahead = gpu.compiled("compile")
        counts = [int(text.split()[1]) for text in reports if text.endswith(" kernels for this GPU, once")]
        assert len(counts) == 2  # without a model, and those of the model
        assert sum(counts) >= len(ahead) > counts[0]
        assert gpu.compiled("MainThread") <= ahead
        assert not any(note.startswith(COMPILATION) for note in notes)
        gpu.forget_process()
        gpu.events.clear()
        assert not any("compiling" in report for report in opened()[0])
        assert not gpu.compiled("compile")
        for mark in tmp_path.glob("localllm-*"):  # with the rest of Triton's cache
            mark.unlink()
        gpu.forget_process()
        assert any("compiling" in report for report in opened()[0])


def test_a_kernel_that_does_not_compile_falls_back_by_name_at_its_launch(
    opened: Callable[[], tuple[list[str], tuple[str, ...]]],
) -> None:
    def refuse(kernel: Any, constants: dict[str, Any]) -> None:
        if kernel.__name__ == "decode_kernel":
            raise ValueError("out of resource: shared memory, Required: 131072, Hardware limit: 101376")

    with pretend_driver() as gpu:
        gpu.does_not_compile = refuse
        _, notes = opened()
        said = "\n".join(notes)
        assert "decode attention: the prefill kernel (TMA: ValueError: out of resource: shared memory" in said
        assert any(key.startswith("decode_kernel") for key in gpu.compiled("compile"))
        assert any(key.startswith("prefill_kernel") for key in gpu.launched())


def test_a_compiler_that_hangs_or_ends_the_process_is_left_alone_at_the_next_start(
    opened: Callable[[], tuple[list[str], tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()

    def wait(kernel: Any, constants: dict[str, Any]) -> None:
        if threading.current_thread().name == "compile":
            hang.wait(30)

    monkeypatch.setattr(triton_build, "COMPILE_S", 0.1)
    with pretend_driver() as gpu:
        gpu.does_not_compile = wait
        first, _ = opened()
        hang.set()
        assert any("compiling" in report for report in first)
        for thread in [each for each in threading.enumerate() if each.name == "compile"]:
            thread.join(30)  # released, it goes on with the kernels that are left
        gpu.forget_process()
        gpu.events.clear()
        later, notes = opened()
        assert not any("compiling" in report for report in later)
        assert not gpu.compiled("compile")
        assert any(note.startswith("compilation: one by one (side by side: no kernel was compiled") for note in notes)


def test_a_process_that_ended_while_it_compiled_is_remembered(tmp_path: Path) -> None:
    record = CheckRecord.read(tmp_path, KEY)
    record.begin(COMPILATION, SIDE_BY_SIDE, "all kernels")
    again = CheckRecord.read(tmp_path, KEY)  # this process has no other journal
    assert again.failed_with(COMPILATION, SIDE_BY_SIDE) is not None


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.usefixtures("opened")
def test_a_rank_compiles_what_it_will_launch_and_exchanges_nothing(
    index: int, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two shards compiles what its warm-up launches, without the other one."""
    own = even_shards(tiny_llama_path, 2)
    assert own is not None
    group = ProcessGroup(None, None, 2, index)
    spec = read_spec(tiny_llama_path)
    model = load_model(tiny_llama_path, spec, CPU, torch.float32, shard=own[index], group=group)
    local = local_spec(spec, own[index])
    config = EngineConfig(max_num_seqs=2, max_model_len=128)
    plan = plan_memory(config, spec, 10_000_000, MACHINE)
    parallel = Parallel(group, group, samples=True)
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": plan.max_num_batched_tokens, "max_model_len": 128}
    reports: list[str] = []
    monkeypatch.setattr(self_check, "count_cores", lambda: 1)
    with pretend_driver() as gpu:
        group.is_rehearsing = True
        compile_for_rank(model, local, config, plan, parallel, reports.append)
        order = [key for kind, key, _ in gpu.events if kind == "compile"]
        assert not gpu.launched()
        assert reports == [f"compiling {len(order)} kernels for this GPU, once"]
        kv = KVCache(local, (40,), plan.block_size, CPU, "float32")
        runner = Staged(model, local, kv, block_size=plan.block_size, device=CPU, group=group, **sizes)
        runner.warm_up()
        assert gpu.launched() == set(order)
        gpu.events.clear()
        compile_for_rank(model, local, config, plan, parallel, reports.append)
        assert not gpu.events, "a later start rehearses nothing"


# ---- the parts -------------------------------------------------------------------------------------------------------


def add_one() -> None:
    _add_one_kernel[(1,)](torch.empty(256), torch.empty(256), SIZE=256)


def test_processes_that_share_a_cache_begin_with_parts_of_their_own() -> None:
    def launch() -> None:
        for size in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            _add_one_kernel[(1,)](torch.empty(256), torch.empty(256), SIZE=size)

    orders = []
    for index in range(2):
        with pretend_driver() as gpu:
            assert compile_ahead(launch, 1, lambda count: None, (index, 2)) == 8
            orders.append([key for _, key, _ in gpu.events])
    first, second = orders
    assert any(second == first[count:] + first[:count] for count in range(1, 8))


def test_launches_of_other_threads_are_not_left_out() -> None:
    with pretend_driver() as gpu:
        other = threading.Thread(target=add_one, name="other engine")
        compile_ahead(lambda: (other.start(), other.join()), 1, lambda count: None)
        assert [(kind, thread) for kind, _, thread in gpu.events] == [
            ("compile", "other engine"), ("launch", "other engine")
        ]  # fmt: skip


def test_what_launches_would_have_written_is_zero() -> None:
    made: list[torch.Tensor] = []
    torch.use_deterministic_algorithms(True)  # new memory is then the largest number, or not a number
    try:
        assert torch.empty(3, dtype=torch.int32).amax() > 0
        like = torch.ones(3)
        compile_ahead(
            lambda: made.extend([torch.empty(3), torch.empty_like(like), like.new_empty(3)]), 1, lambda count: None
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool((each == 0).all()) for each in made)


def test_an_error_of_the_rehearsal_is_raised_after_the_kernels_that_were_found() -> None:
    def launch() -> None:
        add_one()
        raise ValueError("a step that cannot be rehearsed")

    with pretend_driver() as gpu, pytest.raises(ValueError, match="cannot be rehearsed"):
        compile_ahead(launch, 2, lambda count: None)
    assert len(gpu.compiled("compile")) == 1
