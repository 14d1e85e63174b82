"""Common parts of all kernel files: importing Triton if it is installed, and deciding when to use it.

    from localllm.kernels.launch import runs_triton, tl, triton

An operation runs its kernel if its tensors are on a GPU, its plain-torch twin otherwise. With TRITON_INTERPRET=1 in the
environment, kernels also run on CPU tensors in Triton's interpreter, so that one test suite compares both. Without a
GPU, Triton is not imported: it would take 65 MiB of memory and not be used. Kernels are then defined but cannot be
launched, as where triton has no wheel (macOS, Windows), and the engine runs on the twins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from localllm.kernels.choice import Feature, Kernel
from localllm.kernels.triton_build import build_with_zig, has_compiler, leave_out_launch

__all__ = [
    "DEFAULTS", "HAS_TRITON", "INTERPRETED", "DeviceFeatures", "LaunchOptions", "TensorDescriptor", "cdiv",
    "device_features", "early_launch", "is_last_program", "launch_options", "launches_early", "launching_with",
    "next_power_of_2", "prefetch_rows", "reads_lengths_on_device", "runs_triton", "tl", "triton",
    "uses", "wait_for_inputs",
]  # fmt: skip

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # if unset, Triton 3.10 computes a*b+c with two roundings
_IS_USED = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" or "triton" in sys.modules
"""Programs that compile kernels for a GPU elsewhere import triton before any kernel."""

try:
    if not _IS_USED:
        raise ImportError("there is no GPU to launch kernels on")
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _NoTriton:
        """Replaces `triton` and `tl` while kernels are defined: each decorator returns its argument."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = TensorDescriptor = _NoTriton()

INTERPRETED: bool = HAS_TRITON and bool(triton.knobs.runtime.interpret)
"""Set when triton is imported, like the mode of `triton.jit`."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of kernel launches. A runner holds the options of its model and applies them in each step."""

    deterministic: bool = False
    """Each row's result has the same bits in any batch: no launch setting may depend on the batch's size."""

    programmatic_launch: bool = True
    """On sm_90 and later a kernel may start while the previous one finishes, and waits before it reads its input."""

    without: frozenset[Kernel] = frozenset()
    """Groups of kernels whose twins are used instead (choice.py). Most twins cannot be recorded in a graph."""

    avoids: frozenset[Feature] = frozenset()
    """Features that kernels do without (choice.py)."""

    counters: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[COUNTERS] int32 zeros for products of one stream (fused_epilogue.py); None: the current stream's counters."""


class OnDevice(Protocol):
    """A tensor, or a product that is not computed yet."""

    @property
    def device(self) -> torch.device: ...


DEFAULTS = LaunchOptions()
_current: ContextVar[LaunchOptions] = ContextVar("launch_options", default=DEFAULTS)


def launch_options() -> LaunchOptions:
    """Return the options of the innermost `launching_with` around the caller; outside of one, the defaults."""
    return _current.get()


@contextmanager
def launching_with(options: LaunchOptions) -> Iterator[None]:
    """Launch every kernel of the block with `options`; then restore the previous ones.

    A context variable and not a parameter, because a dozen operations read the options below layers that would only
    pass them on. Each thread has its own, so of two models that are served at once, one may be deterministic.
    """
    before = _current.set(options)
    try:
        yield
    finally:
        _current.reset(before)


class _Compiles:
    """Counts the kernels that Triton compiles, or loads from its cache on disk, in this process."""

    count = 0

    def __call__(self, *args: Any, **facts: Any) -> None:
        self.count += 1


_compiles = _Compiles()
if HAS_TRITON:
    triton.knobs.runtime.jit_post_compile_hook = _compiles
    triton.knobs.runtime.jit_cache_hook = leave_out_launch
    if triton.knobs.build.impl is None and not has_compiler():
        triton.knobs.build.impl = build_with_zig


def num_compiles() -> int:
    """Return how many kernels have been prepared.
    Each takes milliseconds to seconds, so none should be while a request waits."""
    return _compiles.count


def runs_triton(x: OnDevice, kernel: Kernel) -> bool:
    """Return whether an operation on x uses its kernel (True) or the plain-torch twin (False), as on a CPU. On a GPU
    it is the kernel, unless the model is served without it."""
    return (INTERPRETED or x.device.type == "cuda") and kernel not in launch_options().without


def reads_lengths_on_device(x: OnDevice) -> bool:
    """Return whether attention on x's device reads the lengths of a step there (True) or on the host."""
    return runs_triton(x, "attention") and runs_triton(x, "indexer")


def uses(feature: Feature) -> bool:
    """Return whether kernels may use a feature (choice.py)."""
    return feature not in launch_options().avoids


def early_launch(device: torch.device) -> dict[str, bool]:
    """Return launch arguments for a kernel that begins with `wait_for_inputs`: PDL for the kernel, launch_pdl for the
    driver."""
    if launches_early() and _can_launch_early(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def launches_early() -> bool:
    """Return whether kernels may start early, on a GPU that can."""
    return launch_options().programmatic_launch and uses("early launch")


@cache
def _can_launch_early(device: torch.device) -> bool:
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait, in a kernel, for the previous kernel's output; weights may be read before.
    The next kernel may now start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_last_program(counter_ptr, count):
    """Count this program; return whether `count` programs have been counted, and then set the counter to zero.

    All threads of the last program may then read what the others had written before they counted: the addition releases
    what this program has written, and acquires what was released before.
    """
    tl.debug_barrier()  # until all threads have written their share
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1 == count
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def prefetch_rows(row_ptrs, first, width, LINES: tl.constexpr):
    """Start to load LINES lines of 128 bytes into L2 from each of `row_ptrs`, beginning with element `first` of rows of
    `width` elements; nothing waits for them. For weights, before `wait_for_inputs`: memory is idle by then."""
    LINE: tl.constexpr = 128 // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.minimum(first + tl.arange(0, LINES) * LINE, width - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [row_ptrs[:, None] + at[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for n < 2."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up."""
    return -(-n // size)


class DeviceFeatures(NamedTuple):
    """Features of the device that kernels may use."""

    arch: int  # compute capability as 75, 80, 90; 80 for other vendors
    tma: bool  # also: programmatic dependent launch
    ptx: bool


@cache
def device_features(device: torch.device) -> DeviceFeatures:
    if INTERPRETED or torch.version.hip is not None:
        return DeviceFeatures(80, False, False)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFeatures(10 * major + minor, major >= 9, True)
