"""Try the variants of each kernel, best first, and choose the first one that is right on this device.

A case has LIMIT_S seconds on the device, after its launch, which compiles, has returned. One that takes longer, or
after which the device does not answer, ends the process: `CheckStoppedDevice`. The journal (record.py) then has the
name, and the next start takes the next variant.
Does not know: models, where cases come from, who starts again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localllm.errors import CheckStoppedDevice, DeviceLost
from localllm.kernels.checks.case import Case, Subject
from localllm.kernels.checks.record import STOPPED, CheckRecord, VariantFailure
from localllm.kernels.checks.table import TABLE, CheckedKernel, KernelVariant
from localllm.kernels.choice import Feature, Kernel
from localllm.kernels.launch import LaunchOptions, launching_with

log = logging.getLogger(__name__)

LIMIT_S = 20.0
COMPILE_S = 120.0
REPORT = "Please report: localllm doctor --gpu --report"

Wait = Callable[[threading.Event, float], bool]
"""Waits for a thread's event. Returns False if the seconds have passed."""


@dataclass(frozen=True, slots=True)
class FallBack:
    """A kernel that is not served by its best variant."""

    kernel: str
    variant: KernelVariant
    failures: tuple[VariantFailure, ...]  # of the better variants

    def __str__(self) -> str:
        failed = "; ".join(f"{each.variant}: {each.why}" for each in self.failures)
        cost = f" {self.variant.cost[0].upper()}{self.variant.cost[1:]}." if self.variant.cost else ""
        return f"{self.kernel}: {self.variant.name} ({failed}).{cost} {REPORT}"


@dataclass(frozen=True)
class KernelChoice:
    """The variant of each kernel that is served."""

    chosen: dict[str, KernelVariant] = field(default_factory=dict)
    fall_backs: tuple[FallBack, ...] = ()
    num_checked: int = 0  # cases compared now
    unverified: tuple[str, ...] = ()  # cases for which there was too little memory
    seconds: float = 0.0

    def options(self, base: LaunchOptions) -> LaunchOptions:
        """Return launch options with every feature and kernel left out that the chosen variants do without."""
        without: frozenset[Kernel] = frozenset().union(*(variant.without for variant in self.chosen.values()))
        avoids: frozenset[Feature] = frozenset().union(*(variant.avoids for variant in self.chosen.values()))
        return replace(base, without=base.without | without, avoids=base.avoids | avoids)

    @property
    def summary(self) -> str:
        """Return one line about what was compared now; empty if nothing was."""
        return (
            f"{self.num_checked} checks of kernels against PyTorch on this GPU in {self.seconds:.1f} s, once"
            if self.num_checked
            else ""
        )


@dataclass
class Chooser:
    """The checks of one device. again: cases that passed before are compared again, too."""

    subject: Subject
    record: CheckRecord
    base: LaunchOptions
    again: bool = False
    wait: Wait = field(default=lambda event, seconds: event.wait(seconds))
    table: Sequence[CheckedKernel] = TABLE
    unverified: list[str] = field(default_factory=list)

    def choose(self, *, with_model: bool, before: KernelChoice | None = None) -> KernelChoice:
        """Choose a variant of every kernel that needs a model, or of the others. before: what was chosen already."""
        choice = before or KernelChoice()
        begun, count = time.monotonic(), 0
        for kernel in self.table:
            if kernel.needs_model == with_model:
                fall_back, variant, compared = self._first_right(kernel, choice.options(self.base))
                count += compared
                fall_backs = choice.fall_backs if fall_back is None else (*choice.fall_backs, fall_back)
                choice = replace(choice, chosen={**choice.chosen, kernel.name: variant}, fall_backs=fall_backs)
        seconds = time.monotonic() - begun
        if self.record.has_changed:
            self.record.seconds += seconds
            self.record.write()
        self.record.end()
        return replace(
            choice, num_checked=choice.num_checked + count, unverified=tuple(self.unverified),
            seconds=choice.seconds + seconds * (count > 0),
        )  # fmt: skip

    def rehearse(self, *, with_model: bool) -> None:
        """Launch what `choose` launches first and compare nothing: for `compile_ahead`, which leaves launches out."""
        choice = without_failed(self.record, self.subject.arch, self.base, self.table)
        options = choice.options(self.base)
        subject = replace(self.subject, record=None)  # a graph without launches cannot be recorded
        for kernel in self.table:
            if kernel.needs_model != with_model:
                continue
            for case in kernel.cases(subject):
                if self._has_passed(kernel, choice.chosen[kernel.name], case, options) and not self.again:
                    continue
                with torch.inference_mode(), launching_with(options):
                    try:
                        case.run()
                    except Exception as error:  # the comparison meets it again, and chooses another variant
                        log.info("kernel %r cannot be launched case=%r error=%r", kernel.name, case.name, error)

    def _has_passed(self, kernel: CheckedKernel, variant: KernelVariant, case: Case, options: LaunchOptions) -> bool:
        return self.record.passed_with(kernel.name, variant.name, _name_with(case, options))

    def _first_right(
        self, kernel: CheckedKernel, options: LaunchOptions
    ) -> tuple[FallBack | None, KernelVariant, int]:  # fmt: skip
        *variants, last = candidates(kernel, self.subject.arch, options)
        failures: list[VariantFailure] = []
        compared = 0
        for variant in variants:
            failure, count = self._failure(kernel, variant, options)
            compared += count
            if failure is None:
                last = variant
                break
            failures.append(failure)
            log.warning(
                "kernel %r variant %r failed case=%r why=%s", kernel.name, variant.name, failure.case, failure.why
            )
        return FallBack(kernel.name, last, tuple(failures)) if failures else None, last, compared

    def _failure(
        self, kernel: CheckedKernel, variant: KernelVariant, options: LaunchOptions
    ) -> tuple[VariantFailure | None, int]:
        """Return why a variant is not right, and how many cases were compared."""
        known = self.record.failed_with(kernel.name, variant.name)
        if known is not None and (not self.again or known.why == STOPPED):
            return known, 0
        options, compared = KernelChoice({"": variant}).options(options), 0
        for case in kernel.cases(self.subject):
            if self._has_passed(kernel, variant, case, options) and not self.again:
                continue
            case = case._replace(name=_name_with(case, options))
            compared += 1
            why = self._compare(kernel, variant, case, options)
            if why:
                failure = VariantFailure(kernel.name, variant.name, case.name, why)
                self.record.fail(failure)
                return failure, compared
        return None, compared

    def _compare(self, kernel: CheckedKernel, variant: KernelVariant, case: Case, options: LaunchOptions) -> str:
        """Return what is wrong with a case; nothing if it passed."""
        self.record.begin(kernel.name, variant.name, case.name)
        try:
            with torch.inference_mode(), launching_with(options):
                judged = case.judge(self._results(case))
        except torch.OutOfMemoryError:  # says nothing about the kernel
            self.record.end()
            self.unverified.append(f"{kernel.name}, {case.name}")
            return ""
        except Exception as error:  # compilers, drivers and torch raise errors of many kinds
            self._require_device(kernel, variant, error)
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self.record.end()
        if not judged.is_right:
            return f"the error was {judged.error:.2g} (limit {judged.limit:.2g})"
        self.record.pass_(kernel.name, variant.name, case.name, judged.error)
        return ""

    def _results(self, case: Case) -> Sequence[Tensor]:
        """Run a case in a thread of its own. Raises what the case raises, `TimeoutError` if it does not end."""
        launched, done = threading.Event(), threading.Event()
        results: list[Sequence[Tensor]] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                if self.subject.device.type == "cuda":
                    torch.cuda.set_device(self.subject.device)
                with torch.inference_mode():
                    results.append(case.run())
                launched.set()
                if self.subject.device.type == "cuda":
                    torch.cuda.synchronize(self.subject.device)
            except BaseException as error:  # raised again below, in the caller's thread
                errors.append(error)
            finally:
                launched.set()
                done.set()

        context = copy_context()
        threading.Thread(target=lambda: context.run(run), daemon=True, name="kernel-check").start()
        if not self.wait(launched, COMPILE_S) or not self.wait(done, LIMIT_S):
            raise TimeoutError(f"it did not end within {LIMIT_S:.0f} s")
        if errors:
            raise errors[0]
        return results[0]

    def _require_device(self, kernel: CheckedKernel, variant: KernelVariant, error: Exception) -> None:
        """Raise `CheckStoppedDevice` if the device fails every call from now on, or never ends; the journal stays."""
        lost = isinstance(error, TimeoutError | DeviceLost | torch.AcceleratorError) or "CUDA error" in str(error)
        try:
            if not lost and self.subject.device.type == "cuda":
                torch.cuda.synchronize(self.subject.device)
        except RuntimeError:
            lost = True
        if not lost:
            self.record.end()
            return
        raise CheckStoppedDevice(
            f"The check of {kernel.name} ({variant.name}) stopped the GPU.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Start again with localllm up: the next start does without this variant.",
        ) from error


def _name_with(case: Case, options: LaunchOptions) -> str:
    return f"deterministic, {case.name}" if options.deterministic else case.name


def candidates(kernel: CheckedKernel, arch: int, options: LaunchOptions) -> tuple[KernelVariant, ...]:
    """Return the variants that can still be used, best first: those before one whose omissions are in force already,
    by the settings or by another kernel's choice, would compute the same as that one."""
    variants = kernel.variants_on(arch)
    avoids = options.avoids if options.programmatic_launch else options.avoids | {"early launch"}
    in_force = [
        place
        for place, variant in enumerate(variants)
        if (variant.avoids or variant.without) and variant.avoids <= avoids and variant.without <= options.without
    ]
    return variants[in_force[-1] :] if in_force else variants


def without_failed(
    record: CheckRecord, arch: int, base: LaunchOptions, table: Sequence[CheckedKernel] = TABLE
) -> KernelChoice:
    """Return the best variants that have not failed on this GPU, without any comparison."""
    choice = KernelChoice()
    for kernel in table:
        *better, last = candidates(kernel, arch, choice.options(base))
        failures = []
        for variant in better:
            if (failure := record.failed_with(kernel.name, variant.name)) is None:
                last = variant
                break
            failures.append(failure)
        fall_backs = (*choice.fall_backs, *([FallBack(kernel.name, last, tuple(failures))] if failures else []))
        choice = replace(choice, chosen={**choice.chosen, kernel.name: last}, fall_backs=fall_backs)
    return choice
