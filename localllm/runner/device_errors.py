"""Translates torch's exceptions, and recognises those after which the device is lost.

CUDA reports a kernel's error at any later call, so every call into the device (launches, waits, events, clean-up) must
be inside `translated`.
Does not know: what was being done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from localllm.engine.step import StepPlan
from localllm.errors import DeviceLost, DoesNotFit, StepFailed
from localllm.units import format_bytes


@contextmanager
def translated(plan: StepPlan | None = None) -> Iterator[None]:
    """Raise `StepFailed` or `DeviceLost` in place of torch's exceptions. Assertions pass: they are our own mistakes."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise StepFailed(
            "The step ran out of memory.",
            f"{_size(plan)}{first_line(error)}",
            "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs.",
        ) from error
    except RuntimeError as error:
        if is_device_loss(error):
            raise DeviceLost(
                "The GPU has reported an error from which this process cannot recover.",
                f"{_size(plan)}{first_line(error)}",
                "Start again with localllm up; localllm doctor checks the driver.",
            ) from error
        raise StepFailed("The step failed on the device.", f"{_size(plan)}{first_line(error)}") from error


@contextmanager
def loading_weights(num_bytes: int, device: str) -> Iterator[None]:
    """Raise `DoesNotFit` in place of an allocation's error. num_bytes: planned for the weights on the device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFit(
            "The memory ran out while the weights were loaded.",
            f"{format_bytes(num_bytes)} were planned for them on {device}. {first_line(error)}",
            "Another program took memory meanwhile: end it and start again, or see localllm fit for smaller models.",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a failed allocation, on a GPU or in this machine's memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def is_device_loss(error: BaseException) -> bool:
    """Return whether the error is one of a CUDA kernel:
    every later call in this process then fails with the same error."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def check_device(device: torch.device) -> None:
    """Raise `DeviceLost` if the device no longer answers, which an earlier error may not have shown."""
    if device.type == "cuda":
        with translated():
            torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _size(plan: StepPlan | None) -> str:
    return "" if plan is None else f"The step held {plan.num_tokens} tokens of {len(plan.rows)} requests. "
