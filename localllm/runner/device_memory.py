"""Process-wide state of torch and CUDA: the current device, the allocator's cache, the recording of graphs.

Memory must not be returned to the driver while a graph is recorded: `torch.cuda.empty_cache()` then fails an internal
assertion of torch in every thread. One engine may record in its idle time while another model is loaded, closed or put
to sleep, so both take one lock.
Does not know: what is recorded.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from localllm.models.layers.far import Crossing

log = logging.getLogger(__name__)

UNENDED = "captures_underway"  # in the failed assertion of an allocator for which a recording goes on
Pool = Any  # what `torch.cuda.graph_pool_handle` returns

_lock = threading.Lock()


class CaptureFailed(RuntimeError):
    """A step could not be recorded, and no other step can be recorded in its memory pool."""


def record(
    graph: torch.cuda.CUDAGraph, pool: Pool, device: torch.device, step: Callable[[], None],
    crossing: Crossing | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Record what `step` launches, and return what replays it: one graph, or several and what the host does between
    them. crossing: to layers that the host computes; None: there are none. Raises what `step` raises, and
    `CaptureFailed` if nothing can be recorded."""
    calls = list[Callable[[], None]]()

    def begin() -> None:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def split(work: Callable[[], None]) -> None:
        """End a segment at the host's work, and begin the next one. Tensors that are alive stay in the pool."""
        nonlocal graph
        graph.capture_end()
        calls.extend((graph.replay, work))
        graph = type(graph)()
        begin()

    with _lock, torch.cuda.stream(_stream(device)):
        use_cublas(device)  # not while recording: the workspace would be part of this graph
        begin()
        try:
            if crossing is not None:
                crossing.split = split
            step()
            graph.capture_end()
        except BaseException as error:
            if not _end_failed(graph, pool, device) and isinstance(error, Exception):
                raise CaptureFailed(str(error)) from error
            raise
        finally:
            if crossing is not None:
                crossing.split = None
    calls.append(graph.replay)

    def replay() -> None:
        for call in calls:
            call()

    return replay if len(calls) > 1 else graph.replay


def empty_cache() -> None:
    """Call `torch.cuda.empty_cache` while no thread records a graph. Does nothing if torch has not used a GPU, or
    believes that a recording which could not be ended still goes on."""
    if not torch.cuda.is_initialized():
        return
    with _lock:
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            if UNENDED not in str(error):
                raise


def make_current(device: torch.device) -> None:
    """Make the device current on the calling thread: kernels are launched there, wherever their tensors are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_cublas(device: torch.device) -> None:
    """Multiply once, so that cuBLAS has a handle for this thread and a workspace for the current stream.

    Both last for the life of the process. Creating them takes tens of milliseconds and up to 100 MB.
    """
    torch.mm(torch.ones(16, 16, device=device), torch.ones(16, 16, device=device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's stream of a device:
    for each stream cuBLAS keeps a workspace of up to 32 MiB and never frees it."""
    return torch.cuda.Stream(device)


def _end_failed(graph: torch.cuda.CUDAGraph, pool: Pool, device: torch.device) -> bool:
    """End a failed recording. Return False if torch cannot end it, and so permanently believes that it is under way.

    torch before 2.12 raises in `capture_end` before its allocator knows of the end (pytorch#180395), so the allocator
    is informed here; it refuses if it knows already.
    """
    with suppress(RuntimeError):
        graph.capture_end()
        return True
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    try:
        if end is None:
            raise RuntimeError("this version of torch has no call that ends it")
        end(torch.cuda.current_device() if device.index is None else device.index, pool)
    except RuntimeError as error:
        if "not currently recording" in str(error):
            return True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))  # the allocator goes on to ask it at each allocation
        log.error(
            "a capture of a CUDA graph could not be ended; this process keeps freed GPU memory until it ends reason=%r",
            str(error).splitlines()[0],
        )
        return False
    return True
