"""The memory bandwidth of this machine's processors, measured once and kept in the cache folder.

A decode step reads every active weight once, so this number bounds the speed of a model on a CPU. It is measured as
weights are read: several threads at once, each through its part of a buffer that is larger than most caches. The C
library's `memchr` reads with vector loads and without Python's lock, so neither numpy nor torch is imported.
A GPU's bandwidth comes from NVML (links.py).
Does not know: models, how a speed follows from the bandwidth (models/library/speed.py).
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from localllm.files.folders import cache_folder, write_whole
from localllm.machine.cpu import last_cache_bytes
from localllm.machine.hardware import Hardware

FILE = "bandwidth.json"
BUFFER_BYTES = 64 * 1024**2  # at least; twice the last cache if that is more
MOST_BYTES = 256 * 1024**2
MOST_SHARE = 1 / 8  # of the available memory; a machine with less for the buffer is not measured
READ_S = 0.015  # time for reading; filling the buffer takes about as long
MOST_PASSES = 8
RAN_SHARE = 0.8  # of a pass; with less, other work had the processor
MOST_RESOLUTION_S = 1e-4
FILLED, SEARCHED = 1, 0  # zeros would be one shared page, which the caches hold


def memory_bandwidth(hardware: Hardware) -> float | None:
    """Return bytes/s, from the cache folder or measured now, which takes up to 50 ms. None: it cannot be measured here,
    or other work took the processors meanwhile; the next call measures again."""
    path, machine = cache_folder() / FILE, _machine(hardware)
    kept = _read(path, machine)
    if kept is not None:
        return kept
    measured = measure(hardware)
    if measured is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({**machine, "bytes_per_s": round(measured)}) + "\n")
    return measured


def measure(hardware: Hardware) -> float | None:
    """Read a buffer in as many threads as the process may use cores. Return the bytes/s of the best pass; None if there
    is too little memory, or if other work took processors in every pass."""
    libc = _libc()
    size = min(MOST_BYTES, max(BUFFER_BYTES, 2 * last_cache_bytes()))
    if libc is None or size > hardware.ram_available_bytes * MOST_SHARE:
        return None
    threads = hardware.cpu_cores
    part = size // threads // mmap.PAGESIZE * mmap.PAGESIZE
    buffer = mmap.mmap(-1, part * threads)
    start = ctypes.c_char.from_buffer(buffer)
    try:
        with suppress(OSError, AttributeError, ValueError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(start)
        return _best_pass(libc, [address + index * part for index in range(threads)], part)
    finally:
        del start  # a buffer that is referred to cannot be closed
        buffer.close()


def _best_pass(libc: Any, addresses: list[int], part: int) -> float | None:
    """Fill the parts, then read them all at once several times. Return the bytes/s of the fastest pass."""
    together = threading.Barrier(len(addresses))  # each thread takes one part, and all begin at once

    def fill(address: int) -> None:
        together.wait()
        libc.memset(address, FILLED, part)

    def read(address: int) -> _Span:
        together.wait()
        began_s, busy_s = time.perf_counter(), time.thread_time()
        libc.memchr(address, SEARCHED, part)
        return _Span(began_s, time.perf_counter(), time.thread_time() - busy_s)

    best = math.inf
    with ThreadPoolExecutor(len(addresses), "bandwidth") as threads:
        list(threads.map(fill, addresses))
        end_s = time.perf_counter() + READ_S
        for _ in range(MOST_PASSES):
            best = min(best, undisturbed_s(list(threads.map(read, addresses))))
            if time.perf_counter() > end_s:
                break
    return None if math.isinf(best) else part * len(addresses) / best


class _Span(NamedTuple):
    """One thread's pass over its part."""

    began_s: float
    ended_s: float
    busy_s: float  # of that time, how long the thread ran


def undisturbed_s(spans: Sequence[_Span]) -> float:
    """Return the seconds of a pass by all threads; infinity if one of them had to wait for a processor."""
    lasted = max(span.ended_s for span in spans) - min(span.began_s for span in spans)
    ran = min(span.busy_s / max(span.ended_s - span.began_s, 1e-9) for span in spans)
    together = max(span.ended_s - span.began_s for span in spans) / max(lasted, 1e-9)
    if time.get_clock_info("thread_time").resolution > MOST_RESOLUTION_S:  # Windows counts in steps of 16 ms
        ran = together
    return lasted if min(ran, together) >= RAN_SHARE else math.inf


def _libc() -> Any:
    """Return the C library with the two functions declared; None where there is none to call."""
    try:
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        for function in (libc.memset, libc.memchr):
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    return libc


def _machine(hardware: Hardware) -> dict[str, Any]:
    """Return what the measurement depends on: another processor or another number of cores is measured anew."""
    return {"cpu": hardware.cpu_name, "cores": hardware.cpu_cores, "ram_bytes": hardware.ram_total_bytes}


def _read(path: Path, machine: dict[str, Any]) -> float | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        speed = float(kept.pop("bytes_per_s"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return speed if kept == machine and 0 < speed < math.inf else None
