"""Checks choose the best variant that is right: what fails, hangs or stops the GPU is replaced, remembered and told."""

import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.errors import CheckStoppedDevice
from localllm.kernels.checks.case import Case, Subject, close_to, equal_to
from localllm.kernels.checks.choose import LIMIT_S, Chooser, KernelChoice, candidates, without_failed
from localllm.kernels.checks.record import STOPPED, CheckRecord, RecordKey
from localllm.kernels.checks.table import TABLE, CheckedKernel, KernelVariant, kernel_of
from localllm.kernels.launch import DEFAULTS, LaunchOptions, launch_options

KEY = RecordKey("580.65", "2.13.0", "3.7.1", "abc")
SUBJECT = Subject(torch.device("cpu"))
ENDED_PID = 2**22 + 5  # above the largest process id of Linux


@dataclass
class Device:
    """A simulated GPU. broken: what happens with a variant of a kernel."""

    broken: dict[tuple[str, str], str]
    compared: list[tuple[str, str]] = field(default_factory=list)

    def table(self, table: Sequence[CheckedKernel] = TABLE) -> tuple[CheckedKernel, ...]:
        return tuple(replace(kernel, cases=self._cases_of(kernel)) for kernel in table)

    def _cases_of(self, kernel: CheckedKernel) -> Callable[[Subject], Iterator[Case]]:
        def cases(subject: Subject) -> Iterator[Case]:
            yield Case("a case", lambda: self._run(kernel), equal_to(lambda: [torch.zeros(2)]))

        return cases

    def _run(self, kernel: CheckedKernel) -> list[Tensor]:
        variant = self._in_use(kernel)
        self.compared.append((kernel.name, variant))
        fault = self.broken.get((kernel.name, variant), "")
        if fault == "wrong":
            return [torch.ones(2)]
        if fault == "nan":
            return [torch.full((2,), torch.nan)]
        if fault == "compile":
            raise ValueError("out of resource: shared memory, Required: 131072, Hardware limit: 101376")
        if fault == "capture":
            raise RuntimeError("invalid resource handle")
        if fault == "lost":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "hang":
            threading.Event().wait(0.5)
        return [torch.zeros(2)]

    def _in_use(self, kernel: CheckedKernel) -> str:
        """Return the first variant whose omissions are all in force, of those with the most."""
        options = launch_options()
        fitting = [v for v in kernel.variants if v.avoids <= options.avoids and v.without <= options.without]
        return max(fitting, key=lambda v: len(v.avoids) + len(v.without)).name


def chooser(device: Device, folder: Path | None, subject: Subject = SUBJECT, again: bool = False) -> Chooser:
    def wait(event: threading.Event, seconds: float) -> bool:
        return event.wait(0.05 if "hang" in device.broken.values() else 30)  # a clock that runs faster

    return Chooser(subject, CheckRecord.read(folder, KEY), DEFAULTS, again, wait, device.table())


def choose(device: Device, folder: Path | None, **changes: bool) -> KernelChoice:
    once = chooser(device, folder, **changes)
    return once.choose(with_model=True, before=once.choose(with_model=False))


def test_all_best_variants_serve_where_all_are_right(tmp_path: Path) -> None:
    choice = choose(Device({}), tmp_path)
    assert not choice.fall_backs
    assert choice.options(DEFAULTS) == DEFAULTS
    assert choice.num_checked == len(TABLE)
    assert f"{len(TABLE)} checks of kernels against PyTorch" in choice.summary


def test_a_later_start_compares_nothing(tmp_path: Path) -> None:
    choose(Device({("products", "TMA"): "wrong"}), tmp_path)
    later = Device({})
    choice = choose(later, tmp_path)
    assert later.compared == []
    assert (choice.num_checked, choice.seconds, choice.summary) == (0, 0, "")
    assert [each.kernel for each in choice.fall_backs] == ["products"]
    assert choose(Device({}), tmp_path, again=True).fall_backs == ()


@pytest.mark.parametrize("fault", ["wrong", "nan", "compile", "capture"])
@pytest.mark.parametrize(("kernel", "variant"), [(k, v) for k in TABLE for v in k.variants[:-1]],
                         ids=lambda each: each.name)  # fmt: skip
def test_each_variant_that_fails_is_replaced_by_the_next(
    kernel: CheckedKernel, variant: KernelVariant, fault: str, tmp_path: Path
) -> None:
    better = kernel.variants[: kernel.variants.index(variant) + 1]
    choice = choose(Device({(kernel.name, each.name): fault for each in better}), tmp_path)
    (fall_back,) = choice.fall_backs
    assert choice.chosen[kernel.name] == fall_back.variant == kernel.variants[len(better)]
    assert [each.variant for each in fall_back.failures] == [each.name for each in better]
    told = str(fall_back)
    assert kernel.name in told
    assert fall_back.variant.name in told
    assert "doctor --gpu" in told
    options = choice.options(LaunchOptions(deterministic=True))
    assert options.deterministic
    assert options.without >= fall_back.variant.without
    assert options.avoids >= fall_back.variant.avoids


@pytest.mark.parametrize("fault", ["hang", "lost"])
def test_what_stops_the_gpu_ends_the_process_and_is_left_out_at_the_next_start(fault: str, tmp_path: Path) -> None:
    device = Device({("decode attention", "TMA"): fault})
    with pytest.raises(CheckStoppedDevice, match=r"decode attention \(TMA\) stopped the GPU"):
        choose(device, tmp_path)
    (journal,) = tmp_path.glob("checking-*.json")
    assert json.loads(journal.read_text())["variant"] == "TMA"
    choice = choose(device, tmp_path)
    assert not list(tmp_path.glob("checking-*.json"))
    assert choice.chosen["decode attention"].name == "pointers"
    assert choice.fall_backs[0].failures[0].why == STOPPED
    again = choose(Device({}), tmp_path, again=True)  # also --check-kernels always does not stop the GPU a second time
    assert again.chosen["decode attention"].name == "pointers"


def test_what_never_ends_on_the_device_after_its_launch_stops_the_check(tmp_path: Path) -> None:
    once = chooser(Device({}), tmp_path)
    once.wait = lambda event, seconds: seconds > LIMIT_S  # the launch returns, the device does not
    with pytest.raises(CheckStoppedDevice, match=f"did not end within {LIMIT_S:.0f} s"):
        once.choose(with_model=False)
    assert list(tmp_path.glob("checking-*.json"))


def test_a_process_that_ends_between_two_cases_blames_no_variant(tmp_path: Path) -> None:
    """The journal of a right case is gone before the next one begins."""
    once = chooser(Device({}), tmp_path)
    kernel = once.table[0]
    assert once._failure(kernel, kernel.variants[0], DEFAULTS) == (None, 1)
    assert not list(tmp_path.glob("checking-*.json"))


def test_a_journal_of_another_triton_blames_no_variant(tmp_path: Path) -> None:
    told = {"key": KEY._replace(triton="other")._asdict(), "kernel": "norms", "variant": "kernel", "case": "c"}
    (tmp_path / f"checking-{os.getpid()}.json").write_text(json.dumps(told))
    assert CheckRecord.read(tmp_path, KEY).failures == []
    assert not list(tmp_path.glob("checking-*.json"))


def test_a_journal_of_a_running_process_is_left_alone(tmp_path: Path) -> None:
    told = {"key": KEY._asdict(), "kernel": "norms", "variant": "kernel", "case": "c", "begun": 0}
    for pid in (os.getppid(), ENDED_PID):
        (tmp_path / f"checking-{pid}.json").write_text(json.dumps(told))
    record = CheckRecord.read(tmp_path, KEY)
    assert [path.name for path in tmp_path.glob("checking-*.json")] == [f"checking-{os.getppid()}.json"]
    assert [each.kernel for each in record.failures] == ["norms"]


@pytest.mark.parametrize("changed", RecordKey._fields)
def test_results_belong_to_one_driver_torch_triton_and_source(changed: str, tmp_path: Path) -> None:
    choose(Device({("products", "TMA"): "wrong"}), tmp_path)
    assert CheckRecord.read(tmp_path, KEY).passed
    other = CheckRecord.read(tmp_path, KEY._replace(**{changed: "other"}))
    assert (other.passed, other.failures) == ({}, [])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": 1}', "null"])
def test_a_damaged_file_costs_a_check(text: str, tmp_path: Path) -> None:
    (tmp_path / "checked.json").write_text(text)
    assert choose(Device({}), tmp_path).num_checked == len(TABLE)


def test_a_folder_that_cannot_be_written_costs_a_check_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert choose(Device({}), tmp_path / "file" / "gpu").num_checked == len(TABLE)


def test_what_the_settings_leave_out_is_not_recorded_as_right(tmp_path: Path) -> None:
    once = replace(chooser(Device({("early launch", "on"): "wrong"}), tmp_path), base=LaunchOptions(False, False))
    assert once.choose(with_model=False).chosen["early launch"].name == "off"
    assert choose(Device({("early launch", "on"): "wrong"}), tmp_path).fall_backs[0].kernel == "early launch"


def test_deterministic_mode_is_compared_by_itself(tmp_path: Path) -> None:
    once = chooser(Device({}), tmp_path)
    once.choose(with_model=False)
    assert replace(once, base=LaunchOptions(deterministic=True)).choose(with_model=False).num_checked


def test_too_little_memory_says_nothing_about_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Device, kernel: CheckedKernel) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Device, "_run", full)
    choice = choose(Device({}), None)
    assert not choice.fall_backs
    assert len(choice.unverified) == len(TABLE)


def test_an_older_gpu_has_no_variants_of_newer_ones() -> None:
    names = {kernel.name: kernel.variants_on(80)[0].name for kernel in TABLE}
    assert names["early launch"] == "off"
    assert names["decode attention"] == "pointers"
    assert without_failed(CheckRecord(None, KEY), 80, DEFAULTS).fall_backs == ()


def walk(seed: int, folder: Path) -> None:
    """Break variants at random, and start until the checks end."""
    dice = random.Random(seed)
    faults = ["wrong", "nan", "compile", "capture", "lost"]
    broken = {
        (kernel.name, variant.name): dice.choice(faults)
        for kernel in TABLE for variant in kernel.variants[:-1] if dice.random() < 0.4
    }  # fmt: skip
    device = Device(broken)
    for _ in range(1 + len(broken)):
        try:
            choice = choose(device, folder)
            break
        except CheckStoppedDevice:
            continue
    else:
        raise AssertionError("the checks never ended")
    served = {(name, variant.name) for name, variant in choice.chosen.items()}
    assert not served & broken.keys()
    for kernel in TABLE:
        chosen = choice.chosen[kernel.name]
        others = KernelChoice({name: variant for name, variant in choice.chosen.items() if name != kernel.name})
        left = candidates(kernel, 999, others.options(DEFAULTS))
        if chosen in left:  # otherwise a later kernel took more away, as attention's twin does
            assert all((kernel.name, variant.name) in broken for variant in left[: left.index(chosen)])
    assert without_failed(CheckRecord.read(folder, KEY), 999, DEFAULTS).chosen == choice.chosen


# 25 ms of processor time a walk, most of it to start and join threads, which a busy machine stretches tenfold.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.slow)], ids=["40", "1000"]
)
def test_any_combination_of_failing_variants_ends_with_right_ones(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        walk(seed, tmp_path / str(seed))


def test_numbers_are_judged_by_the_twins_own_error() -> None:
    right = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    half = right.half()
    judge = close_to(lambda: right, lambda: half)
    assert judge([half]).is_right
    assert not judge([half + 0.01]).is_right
    one_wrong = half.clone()
    one_wrong[7] += 1
    assert not judge([one_wrong]).is_right
    one_wrong[7] = torch.nan
    assert not judge([one_wrong]).is_right


def test_an_error_is_that_of_the_kernel_that_raised_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.kernels.paged_attention import device as module

    sources = {source for kernel in TABLE for source in kernel.sources}
    assert "paged_attention" in sources
    for function, name in (("filled_list", "decode attention"), ("plan_on_device", "prefill attention")):
        try:
            getattr(module, function)(*([None] * (3 if function == "filled_list" else 8)))
        except Exception as error:
            found = kernel_of(error)
            assert found is not None
            assert found.name == name
    assert kernel_of(ValueError("raised nowhere")) is None
