"""Measures candidates for a kernel's launch settings on the GPU and records the fastest.

Not used while serving: a measurement compiles, allocates and waits. `scripts/bench_kernels --tune` calls it.
Does not know: kernels.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

import torch

from localllm.kernels.tuned import Key, LaunchT, Table, table

log = logging.getLogger(__name__)

LAUNCHES = 20  # launches in one graph
REPLAYS = 5
L2_SHARE = 2  # a measurement cycles through data of this many times the L2 cache

LOST_CONTEXT: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""Exceptions of torch after a device failure, after which no other candidate can run."""

Run = Callable[[int], object]
"""run(turn): one launch, on copy `turn % number of copies` of its data."""


def tune(
    kernel: str,
    key: Key,
    candidates: Sequence[LaunchT],
    cost: Callable[[LaunchT], float],
    heuristic: Callable[..., LaunchT],
    *,
    into: Table | None = None,
) -> LaunchT:
    """Record and return the cheapest candidate for `key`. The heuristic's own choice is always a candidate, and the
    first. The best so far is recorded at once: an interruption loses only the candidates that have not been measured.

    cost(settings): microseconds (`launch_us`), or a sum over several uses of the key. It raises for a candidate that
    does not compile, gives wrong results or needs too much shared memory, which is then skipped. Asserts that the
    server is not ready yet; raises `RuntimeError` if no candidate runs.
    """
    into = into or table()
    assert not into.is_sealed, f"{kernel}: nothing is measured while serving"
    best, least = None, float("inf")
    for settings in dict.fromkeys((heuristic(*key), *candidates)):
        try:
            found = cost(settings)
        except LOST_CONTEXT:
            raise
        except Exception as error:  # Triton has its own exceptions: OutOfResources, CompilationError
            log.debug("candidate fails kernel=%s key=%s settings=%s error=%s", kernel, key, settings, error)
            continue
        if found < least:
            best, least = settings, found
            into.record(kernel, key, best, least, heuristic)
    if best is None:
        raise RuntimeError(f"{kernel} {key}: not one of {len(candidates)} candidates runs")
    into.record(kernel, key, best, least, heuristic)
    return best


def launch_us(run: Run, launches: int = LAUNCHES, replays: int = REPLAYS) -> float:
    """Return microseconds per launch on the GPU: the median of several replays of a graph of `launches` launches.

    A graph is used because Python's launcher takes longer than most of these kernels.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):  # compiles, and lets libraries allocate their workspaces
            run(turn)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(launches):
            run(turn)
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) * 1e3 / launches)
    return statistics.median(times)


def num_copies(nbytes: int, l2_bytes: int) -> int:
    """Return how many copies of `nbytes` of data a measurement must cycle through to miss the L2 cache each time."""
    return max(1, -(-L2_SHARE * l2_bytes // max(1, nbytes)) + 1)
