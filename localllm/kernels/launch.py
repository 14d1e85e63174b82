"""What every kernel file leans on: Triton where there is one, and the decision when to use it.

    from localllm.kernels.launch import runs_triton, tl, triton

An operation runs its kernel where its tensors lie on a GPU, its plain-torch twin elsewhere. With TRITON_INTERPRET=1 in
the environment kernels also run on CPU tensors, in Triton's interpreter: that is how one suite of tests compares both.
Where triton has no wheel (macOS, Windows) kernels can be defined and not launched; the twins carry the engine.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON", "INTERPRETED", "Options", "TensorDescriptor", "cdiv", "early_launch", "next_power_of_2", "options",
    "runs_triton", "tl", "triton", "wait_for_inputs",
]  # fmt: skip

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.10 turns a*b+c into two roundings where unset
try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _NoTriton:
        """Stands in for `triton` and `tl` while kernels are being defined: a decorator gives back what it is given."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = tl = TensorDescriptor = _NoTriton()

INTERPRETED: bool = HAS_TRITON and bool(triton.knobs.runtime.interpret)
"""Read when triton is imported, as `triton.jit` does."""


class _OfThread(threading.local):
    deterministic = False


_of_thread = _OfThread()


@dataclass(slots=True)
class Options:
    """What holds for every launch of this process, but for `deterministic`: that holds for launches of a thread."""

    @property
    def deterministic(self) -> bool:
        """Each row's result has the same bits whatever else is in the batch: no choice may depend on the batch's size.

        A runner says so before each step, so that models of both kinds can be served at once.
        """
        return _of_thread.deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        _of_thread.deterministic = value

    programmatic_launch: bool = False
    """On sm_90 and later a kernel may start while the one before it drains, and waits before it reads its input."""

    cpu_weights: str = "fast"
    """fast, small or exact: how quantised weights are laid out on a CPU (kernels/cpu/pack.py); what is there stays."""


options = Options()


class _Compiles:
    """Counts what Triton compiles or fetches from its cache on disk, in this process."""

    count = 0

    def __call__(self, *args: Any, **facts: Any) -> None:
        self.count += 1


_compiles = _Compiles()
if HAS_TRITON:
    triton.knobs.runtime.jit_post_compile_hook = _compiles


def num_compiles() -> int:
    """Kernels made ready so far: each costs milliseconds to seconds, so none may happen while somebody waits."""
    return _compiles.count


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on x takes the kernel (True) or the plain-torch twin."""
    return x.is_cuda or INTERPRETED


def early_launch(device: torch.device) -> dict[str, bool]:
    """Launch arguments for a kernel that begins with `wait_for_inputs`: PDL tells the kernel, launch_pdl the driver."""
    if options.programmatic_launch and _can_launch_early(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _can_launch_early(device: torch.device) -> bool:
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """In a kernel, before it reads what another one wrote; weights may be read sooner. The next kernel may start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n < 2."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """How many pieces of `size` cover n."""
    return -(-n // size)
