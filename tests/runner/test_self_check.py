"""A model is opened with kernels that were compared with PyTorch: one that is wrong, raises or cannot be recorded is
replaced by name, and the load goes on while a right variant is left.

The kernels themselves run where TRITON_INTERPRET=1; the rest is tested everywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.engine.step import KernelFallBack
from localllm.errors import CheckStoppedDevice, ConfigError, DoesNotFit
from localllm.kernels import launch
from localllm.kernels.checks import choose as choose_module
from localllm.kernels.checks import floats
from localllm.kernels.checks.case import IndexReads, Subject
from localllm.kernels.checks.choose import KernelChoice
from localllm.kernels.checks.record import CheckRecord, RecordKey
from localllm.kernels.checks.table import TABLE, KernelVariant
from localllm.kernels.choice import ALL_KERNELS
from localllm.kernels.launch import DEFAULTS, LaunchOptions, launch_options, launching_with
from localllm.kernels.paged_attention import KVReads
from localllm.kernels.paged_attention import device as attention
from localllm.machine.hardware import Hardware
from localllm.models.fit import MemoryPlan, plan_memory
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import opening, self_check
from localllm.runner.graphs import StepGraphs
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.opening import open_runner
from localllm.runner.runner import TorchRunner
from localllm.runner.self_check import (
    ALONE,
    WHOLE,
    OpenOnCache,
    check_device,
    check_model,
    fall_backs_of,
    known_choice,
    logits_of,
    next_choice,
    subject_of,
)
from localllm.runner.staging import StepShape
from tests.runner import harness
from tests.runner.harness import check_kernels, mixed_requests

CPU = torch.device("cpu")
GIB = 1024**3
MACHINE = Hardware((), "CPU", 2, 32 * GIB, 24 * GIB)
KEY = RecordKey("", "t", "t", "s")
with_twins = pytest.mark.skipif(launch.INTERPRETED, reason="the twins are tested without the interpreter")
needs_kernels = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of checks are in a folder of the test, and a CPU counts as a device that runs kernels."""
    if launch.INTERPRETED:  # it takes a second for a few tokens
        monkeypatch.setattr(self_check, "PROMPT_TOKENS", 6)
        monkeypatch.setattr(self_check, "DECODES", 2)
    monkeypatch.setattr(self_check, "read_record", lambda device: CheckRecord.read(tmp_path, KEY))
    for module in (self_check, opening):
        monkeypatch.setattr(module, "is_checked", lambda config, device: config.kernels != "torch")
    return tmp_path


def plan_of(spec: ModelSpec, **asked: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(max_num_seqs=5, max_model_len=128, **asked), spec, 10_000_000, MACHINE)


def small_runner(model: Any, spec: ModelSpec, plan: MemoryPlan) -> OpenOnCache:
    def opened(kv: KVCache, options: LaunchOptions, *, has_drafts: bool = False) -> TorchRunner:
        states = StateCache(spec, 1 + plan.max_num_seqs, CPU, torch.float32)
        return TorchRunner(
            model, spec, kv, max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len, block_size=plan.block_size, device=CPU, launch_options=options,
            states=states, has_drafts=has_drafts, staged=True,
        )  # fmt: skip

    return opened


def checked(model: Any, spec: ModelSpec, config: EngineConfig | None = None) -> KernelChoice:
    plan, config = plan_of(spec), config or EngineConfig()
    return check_model(model, spec, config, plan, CPU, DEFAULTS, KernelChoice(), small_runner(model, spec, plan))


def test_a_models_shapes_are_read_from_its_layers(model: Any, spec: ModelSpec) -> None:
    subject = subject_of(model, spec, plan_of(spec), CPU)
    assert subject.hidden_size == spec.hidden_size
    assert subject.widths
    assert [reads.num_heads for reads in subject.attention] == [spec.num_heads]
    assert {product.columns for product in subject.products} >= {spec.hidden_size}


def test_the_whole_model_gives_the_same_logits_twice(model: Any, spec: ModelSpec) -> None:
    plan = plan_of(spec)
    opened = small_runner(model, spec, plan)
    both = [logits_of(opened(self_check.small_cache(spec, plan, CPU), DEFAULTS), spec, plan) for _ in range(2)]
    assert both[0].shape == (1 + self_check.DECODES, spec.vocab_size)
    assert torch.equal(*both)
    assert "compute_logits" not in vars(model)  # nothing is left behind on the model


@with_twins
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "deepseek_v2", "deepseek_v32", "qwen3_5", "mamba2"])
def test_other_families_can_be_checked(family: str, tiny_model_path: Callable[[str], Path]) -> None:
    from localllm.models.loader import load_model
    from localllm.models.read_spec import read_spec

    try:
        path = tiny_model_path(family)
    except KeyError:
        pytest.skip("there is no tiny model of this family")
    spec = read_spec(path)
    model = load_model(path, spec, CPU, torch.float32)
    plan = plan_of(spec)
    logits = logits_of(small_runner(model, spec, plan)(self_check.small_cache(spec, plan, CPU), DEFAULTS), spec, plan)
    assert logits.isfinite().all()
    assert subject_of(model, spec, plan, CPU).vocab_size == spec.vocab_size


@with_twins
def test_a_group_that_is_wrong_in_the_whole_model_is_found(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where experts or recurrent layers are wrong, which are compared in no other way."""
    compute = type(model).compute_logits

    def wrong(self: Any, hidden: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        logits = compute(self, hidden, out)
        return logits if "recurrent" in launch_options().without else logits.flip(-1)

    monkeypatch.setattr(type(model), "compute_logits", wrong)
    choice = checked(model, spec)
    (fall_back,) = choice.fall_backs
    assert (fall_back.kernel, fall_back.variant.name) == (WHOLE, "PyTorch for recurrent")
    assert choice.options(DEFAULTS).without == {"recurrent"}


@with_twins
def test_nothing_is_compared_where_checks_are_off(model: Any, spec: ModelSpec) -> None:
    config = EngineConfig(check_kernels="off")
    assert check_device(config, CPU, DEFAULTS).num_checked == 0
    assert checked(model, spec, config).num_checked == 0


def test_checked_without_checks_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not go with --kernels checked"):
        EngineConfig(kernels="checked", check_kernels="off")


@with_twins
def test_a_fault_of_the_checks_ends_a_load_only_if_checks_are_demanded(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **named: Any) -> KernelChoice:
        raise KeyError("a mistake in a check")

    monkeypatch.setattr(choose_module.Chooser, "choose", broken)
    assert checked(model, spec) == KernelChoice()
    with pytest.raises(ConfigError, match="could not be checked"):
        checked(model, spec, EngineConfig(kernels="checked"))


@with_twins
def test_too_little_memory_for_a_check_is_refused_where_checks_are_demanded(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, case: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choose_module.Chooser, "_results", full)
    assert checked(model, spec).unverified
    with pytest.raises(ConfigError, match="Too little memory"):
        checked(model, spec, EngineConfig(kernels="checked"))


# ---- errors of the warm-up -------------------------------------------------------------------------------------------


def raised_in_decode_attention() -> Exception:
    try:
        attention.filled_list(None, None, 1)  # type: ignore[arg-type]
    except Exception as error:
        return error
    raise AssertionError


def test_every_variant_is_tried_after_errors_and_then_none_is_left() -> None:
    kernel = next(kernel for kernel in TABLE if kernel.name == "decode attention")
    choice, seen = KernelChoice({kernel.name: kernel.variants[0]}), []
    while (later := next_choice(choice, raised_in_decode_attention(), CPU)) is not None:
        choice = later
        seen.append(choice.chosen[kernel.name].name)
    assert seen == [variant.name for variant in kernel.variants[1:]]
    assert len(choice.fall_backs) == 1
    assert len(choice.fall_backs[0].failures) == len(seen)
    assert known_choice(EngineConfig(), CPU).chosen[kernel.name] == kernel.variants[-1]  # also at the next start


def test_an_error_of_no_known_kernel_leaves_pytorch_alone() -> None:
    choice = next_choice(KernelChoice(), RuntimeError("Triton Error [CUDA]: invalid argument"), CPU)
    assert choice is not None
    assert choice.chosen[WHOLE] == ALONE
    assert choice.options(DEFAULTS).without == ALL_KERNELS
    assert next_choice(choice, RuntimeError("again"), CPU) is None


@with_twins
@pytest.mark.parametrize("times", [1, 3])
def test_a_load_goes_on_with_the_next_variant(
    times: int, model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel does not compile in the warm-up, in a size that no check met."""
    seen: list[LaunchOptions] = []

    def warm_up(self: TorchRunner, budget_s: float = 0.0) -> None:
        seen.append(self._launch_options)
        if len(seen) <= times:
            raise raised_in_decode_attention()

    monkeypatch.setattr(opening, "_check", lambda *given: KernelChoice())
    monkeypatch.setattr(TorchRunner, "warm_up", warm_up)
    runner, plan = open_runner(model, spec, EngineConfig(), plan_of(spec), MACHINE, lambda text: None)
    assert len(seen) == times + 1
    stats = runner.stats()
    assert [each.kernel for each in stats.fall_backs] == ["decode attention"]
    assert any("decode attention" in note for note in plan.notes)
    runner.close()


@with_twins
@pytest.mark.parametrize(("replayed", "launched"), [(0.002, 0.001), (0.001, 0.002)])
def test_graphs_are_kept_only_where_they_are_quicker_and_measured_once(
    replayed: float, launched: float, model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[LaunchOptions] = []
    timed: list[bool] = []

    def step_s(self: TorchRunner, *, replayed: bool) -> float:
        timed.append(replayed)
        return times[replayed]

    times = {True: replayed, False: launched}

    class Watched(TorchRunner):
        def warm_up(self, budget_s: float = 0.0) -> None:
            opened.append(self._launch_options)
            super().warm_up(budget_s)

    monkeypatch.setattr(opening, "_check", lambda *given: KernelChoice())
    monkeypatch.setattr(opening, "TorchRunner", Watched)
    monkeypatch.setattr(TorchRunner, "step_s", step_s)
    is_slower = replayed > launched
    for start in range(2):
        opened.clear()
        timed.clear()
        runner, plan = open_runner(model, spec, EngineConfig(), plan_of(spec), MACHINE, lambda text: None)
        runner.close()
        assert ("graphs" in opened[-1].avoids) == is_slower
        assert len(opened) == 1 + (is_slower and start == 0)
        assert bool(timed) == (start == 0)
        told = "Steps are not recorded as CUDA graphs: a step takes 2.00 ms as a graph, and 1.00 ms kernel by kernel."
        assert (told in plan.notes) == is_slower


def test_a_recorded_step_is_timed_both_ways(model: Any, spec: ModelSpec) -> None:
    plan, replays = plan_of(spec), []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        return lambda: replays.append(1)

    kv = self_check.small_cache(spec, plan, CPU)
    runner = TorchRunner(
        model, spec, kv, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, block_size=plan.block_size,
        device=CPU, capture=capture, staged=True,
    )  # fmt: skip
    assert runner.step_s(replayed=True) is None  # nothing is recorded yet
    runner.warm_up()
    assert runner.step_s(replayed=False)
    assert not replays
    assert runner.step_s(replayed=True)
    assert len(replays) == 10
    runner.close()


@with_twins
@pytest.mark.parametrize("error", [DoesNotFit("no"), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_is_not_the_fault_of_a_kernel(
    error: Exception, model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(self: TorchRunner, budget_s: float = 0.0) -> None:
        raise error

    monkeypatch.setattr(opening, "_check", lambda *given: KernelChoice())
    monkeypatch.setattr(TorchRunner, "warm_up", warm_up)
    with pytest.raises(DoesNotFit):
        open_runner(model, spec, EngineConfig(), plan_of(spec), MACHINE, lambda text: None)


@with_twins
def test_a_lost_gpu_in_the_warm_up_is_told_as_one(model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.errors import DeviceLost

    def warm_up(self: TorchRunner, budget_s: float = 0.0) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(opening, "_check", lambda *given: KernelChoice())
    monkeypatch.setattr(TorchRunner, "warm_up", warm_up)
    with pytest.raises(DeviceLost):
        open_runner(model, spec, EngineConfig(), plan_of(spec), MACHINE, lambda text: None)


def test_captures_that_raise_are_counted_and_named() -> None:
    def capture(step: Callable[[], None]) -> Callable[[], None]:
        raise raised_in_decode_attention()

    graphs = StepGraphs([StepShape(1), StepShape(2)], capture, lambda shape: {"forward": lambda: None})
    while graphs.capture_next():
        pass
    assert (graphs.num_failed, graphs.num_wanted, len(graphs)) == (2, 2, 0)
    assert graphs.failure.startswith("decode attention: ")


def test_fall_backs_are_in_the_statistics() -> None:
    choice = next_choice(KernelChoice(), raised_in_decode_attention(), CPU)
    assert choice is not None
    (told,) = fall_backs_of(choice)
    assert isinstance(told, KernelFallBack)
    assert told.kernel == "decode attention"
    assert told.variant in told.text


def test_without_drafts_where_their_check_failed(model: Any, spec: ModelSpec) -> None:
    plan = plan_of(spec)
    options = replace(DEFAULTS, avoids=frozenset({"drafts"}))
    runner = small_runner(model, spec, plan)(self_check.small_cache(spec, plan, CPU), options)
    assert "check of drafts failed" in runner.drafts.why_none
    runner.close()


# ---- with the kernels ------------------------------------------------------------------------------------------------


@needs_kernels
def test_a_right_gpu_passes(spec: ModelSpec) -> None:
    """With a recording that replays by running again, as a graph does."""
    subject = Subject(CPU, torch.float32, vocab_size=spec.vocab_size, max_model_len=256, record=lambda step: step)
    choice = check_device(EngineConfig(), CPU, DEFAULTS, subject)
    assert not choice.fall_backs
    assert choice.num_checked > 8


@needs_kernels
@pytest.mark.parametrize(
    ("function", "change"),
    [
        ("", None),
        ("choose_on_device", lambda chosen: chosen + (chosen == 0).int()),
        ("attend_on_device", lambda out: out * 1.1),
    ],
)
def test_the_kernels_of_an_indexer_are_compared(
    function: str, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the shapes that are served; where one is wrong, PyTorch chooses keys and attends to them."""
    reads = KVReads(4, (1, 8, 16, 24), torch.float32, None)
    index = IndexReads(reads, rope_size=8, topk=20, num_heads=4, head_dim=16, dtype=torch.float32)
    subject = Subject(CPU, torch.float32, max_model_len=70, indexer=index)
    if function:
        compute = getattr(floats, function)
        monkeypatch.setattr(floats, function, lambda *given: change(compute(*given)))
    (kernel,) = (each for each in TABLE if "indexer" in each.sources)
    choice = choose_module.Chooser(subject, CheckRecord(None, KEY), DEFAULTS, table=(kernel,)).choose(with_model=True)
    assert choice.num_checked == (2 if function == "attend_on_device" else 1 if function else 4)
    assert bool(choice.fall_backs) == bool(function)
    assert choice.options(DEFAULTS).without == ({"indexer"} if function else set())


@needs_kernels
def test_a_capture_that_raises_leaves_graphs_out() -> None:
    def fails(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("invalid resource handle")

    choice = check_device(EngineConfig(), CPU, DEFAULTS, Subject(CPU, vocab_size=300, record=fails))
    assert [(each.kernel, each.variant.name) for each in choice.fall_backs] == [("graphs", "off")]
    assert "graphs" in choice.options(DEFAULTS).avoids


@needs_kernels
@pytest.mark.parametrize(
    ("function", "field", "kernel", "variant"),
    [
        ("decode_kernel", "TMA", "decode attention", "pointers"),
        ("decode_kernel", "MERGE_PARTS", "decode attention", "merge by a second kernel"),
        ("decode_kernel", "QUERIES", "decode attention", "the prefill kernel"),
        ("decode_kernel", "ROTARY_DIM", "rotation in decode attention", "a kernel of its own"),
        pytest.param("prefill_kernel", "TMA", "prefill attention", "pointers", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_made_wrong_is_found_and_replaced(
    function: str, field: str, kernel: str, variant: str, model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is launched with a constant that is not zero, it adds 1 to its output."""
    right = getattr(attention, function)

    class Wrong:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launched(out: torch.Tensor, *given: Any, **named: Any) -> None:
                right[grid](out, *given, **named)
                if named[field]:
                    out.add_(1)

            return launched

    monkeypatch.setattr(attention, function, Wrong())
    entry = next(each for each in TABLE if each.name == kernel)
    subject = replace(subject_of(model, spec, plan_of(spec), CPU), max_model_len=96)
    chooser = choose_module.Chooser(subject, CheckRecord(None, KEY), DEFAULTS, table=(entry,))
    choice = chooser.choose(with_model=True)
    assert choice.chosen[kernel].name == variant
    assert "the error was" in choice.fall_backs[0].failures[0].why


@needs_kernels
def test_a_whole_model_through_its_kernels_passes(model: Any, spec: ModelSpec) -> None:
    plan = plan_of(spec)
    entry = self_check.whole_model(
        spec, plan, lambda options: small_runner(model, spec, plan)(self_check.small_cache(spec, plan, CPU), options),
        False,
    )  # fmt: skip
    choice = choose_module.Chooser(Subject(CPU), CheckRecord(None, KEY), DEFAULTS, table=(entry,)).choose(
        with_model=True
    )
    assert not choice.fall_backs


VARIANTS = [(kernel.name, variant) for kernel in TABLE for variant in kernel.variants[1:]]


@needs_kernels
@pytest.mark.parametrize(("kernel", "variant"), [
    pytest.param(kernel, variant, id=f"{kernel}-{variant.name}",
                 marks=() if variant.name == "the prefill kernel" else pytest.mark.slow)
    for kernel, variant in VARIANTS
])  # fmt: skip
def test_each_fall_back_serves_a_whole_model(
    kernel: str, variant: KernelVariant, model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = partial(LaunchOptions, without=variant.without, avoids=variant.avoids)
    monkeypatch.setattr(harness, "LaunchOptions", served)
    check_kernels(model, spec, mixed_requests, "staged", monkeypatch)


@needs_kernels
def test_settings_honour_what_is_avoided() -> None:
    reads = attention.KVReads(8, (2, 4, 16, 64), torch.float16, None)
    assert attention._decode_launch(reads, 1, CPU).tma
    with launching_with(replace(DEFAULTS, avoids=frozenset({"decode TMA"}))):
        assert not attention._decode_launch(reads, 1, CPU).tma


def test_a_stopped_check_is_an_error_that_ends_the_process() -> None:
    assert CheckStoppedDevice("x").ends_process
    assert CheckStoppedDevice.code == "check_stopped_device"
