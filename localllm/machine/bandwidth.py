"""The speeds of this machine that bound a model's: of memory, disk and processors, measured once and kept in the cache
folder.

A decode step reads every active weight once, so this number bounds the speed of a model on a CPU. It is measured as
weights are read: several threads at once, each through its part of a buffer. The C library's `memcmp` reads with vector
loads, two streams at once and without Python's lock, so neither numpy nor torch is imported.
A GPU's bandwidth comes from NVML (links.py). A disk's is measured by writing a file and reading it without the page
cache, several parts at once. The processors' products are measured by the kernels, which callers pass in.
Does not know: models, how a speed follows from the bandwidth (models/fit/speed.py).
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from localllm.files.folders import cache_folder, write_whole
from localllm.files.record_file import PART, READERS
from localllm.machine.hardware import Hardware, Speeds

FILE = "bandwidth.json"
BYTES_PER_THREAD = 40 * 1024**2  # more than a core's share of the last cache, on all but a few processors
LEAST_BYTES, MOST_BYTES = 64 * 1024**2, 1024**3
MOST_SHARE = 1 / 8  # of the available memory; a machine with less for the buffer is not measured
READ_S = 0.006  # time for reading, one pass at least; obtaining the pages takes about 25 ms
MOST_PASSES = 8
RAN_SHARE = 0.8  # of a pass; with less, other work had the processor
MOST_RESOLUTION_S = 1e-4
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
FILLED = 1
DISK_FILE = "disk_bandwidth.json"
PRODUCTS_FILE = "products.json"
DISK_BYTES = 256 * 1024**2
AGAIN_S = 60.0  # after which a disturbed measurement is repeated


class ProductSpeeds(NamedTuple):
    """Measured multiply-adds/s."""

    narrow: float  # with weights of 8 bits and less
    wide: float
    is_disturbed: bool = False  # other work took processors in every product: the speeds are at least these


Products = Callable[[], ProductSpeeds | None]
"""Measures products; None: they cannot be measured here."""


class Measured(NamedTuple):
    """A measured bandwidth."""

    bytes_per_s: float
    is_disturbed: bool = False  # other work took processors in every pass: the bandwidth is at least this


def probed(hardware: Hardware, products: Products, *, disk: bool = False) -> Hardware:
    """Return the hardware with its speeds, from the cache folder or measured now: at most 50 ms for the memory, half a
    second for products, and on most machines 5 s for the disk.

    products: measures the processors' multiply-adds/s. disk: measure the disk too, unless its speed is kept.
    """
    memory, found = memory_bandwidth(hardware), _product_speeds(hardware, products)
    read = disk_bandwidth(cache_folder()) if disk else _kept_disk(cache_folder())
    return replace(hardware, speeds=Speeds(memory, read, *(found or (None, None))[:2]))


def _product_speeds(hardware: Hardware, products: Products) -> ProductSpeeds | None:
    """Return the products' speeds, from the cache folder or measured now. Disturbed ones are treated as a disturbed
    bandwidth is."""
    path, machine = cache_folder() / PRODUCTS_FILE, _processors(hardware)
    kept = _read_products(path, machine)
    if kept is not None and not (kept.is_disturbed and _is_old(path)):
        return kept
    found = [each for each in (kept, products()) if each is not None]
    if not found:
        return None
    best = max(found, key=lambda each: (not each.is_disturbed, each.narrow))
    disturbed = {"disturbed": True} if best.is_disturbed else {}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**machine, "narrow": round(best[0]), "wide": round(best[1]), **disturbed}) + "\n")
    return best


def with_kept_speeds(hardware: Hardware) -> Hardware:
    """Return the hardware with the speeds that were measured before. Measures nothing."""
    folder = cache_folder()
    memory, disk = _read_measured(folder / FILE, _machine(hardware)), _kept_disk(folder)
    products = _read_products(folder / PRODUCTS_FILE, _processors(hardware)) or (None, None)
    speeds = Speeds(None if memory is None else memory.bytes_per_s, disk, *products[:2])
    return replace(hardware, speeds=speeds)


def _machine(hardware: Hardware) -> dict[str, Any]:
    """Return what names a machine: another processor or another number of cores is measured again."""
    return {"cpu": hardware.cpu_name, "cores": hardware.cpu_cores, "ram_bytes": hardware.ram_total_bytes}


def _processors(hardware: Hardware) -> dict[str, Any]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return {"cpu": hardware.cpu_name, "cores": hardware.cpu_cores, "threads": threads}


def _kept_disk(folder: Path) -> float | None:
    try:
        kept = _read(cache_folder() / DISK_FILE, {"device": folder.stat().st_dev})
    except OSError:
        return None
    return None if kept is None else kept["bytes_per_s"]


def memory_bandwidth(hardware: Hardware) -> float | None:
    """Return bytes/s, from the cache folder or measured now, which takes up to 50 ms; None: it cannot be measured here.
    A measurement that was disturbed is kept as a lower bound, and repeated by the first call a minute later."""
    path = cache_folder() / FILE
    machine = _machine(hardware)
    kept = _read_measured(path, machine)
    if kept is not None and not (kept.is_disturbed and _is_old(path)):
        return kept.bytes_per_s
    found = [each for each in (kept, measure(hardware)) if each is not None]
    if not found:
        return None
    if undisturbed := [each for each in found if not each.is_disturbed]:
        found = undisturbed
    best = max(found)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        disturbed = {"disturbed": True} if best.is_disturbed else {}
        write_whole(path, json.dumps({**machine, "bytes_per_s": round(best.bytes_per_s), **disturbed}) + "\n")
    return best.bytes_per_s


def disk_bandwidth(folder: Path) -> float | None:
    """Return the bytes/s at which large files of a folder's disk are read, from the cache folder or measured now, which
    writes and deletes a file of 256 MiB; None: it cannot be measured here."""
    path = cache_folder() / DISK_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        device = {"device": folder.stat().st_dev}
        if (kept := _read(path, device)) is not None:
            return kept["bytes_per_s"]
        if not hasattr(os, "O_DIRECT") or shutil.disk_usage(folder).free < 8 * DISK_BYTES:
            return None
        found = _read_speed(folder / f".{os.urandom(8).hex()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**device, "bytes_per_s": round(found)}) + "\n")
    except OSError:  # also a file system without direct reads
        return None
    return found


def _read_speed(path: Path) -> float:
    """Return bytes/s of a file that is written and deleted."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            part = os.urandom(PART)
            for _ in range(DISK_BYTES // PART):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffers = [mmap.mmap(-1, PART) for _ in range(READERS)]

        def read(reader: int) -> int:
            places = range(reader * PART, DISK_BYTES, READERS * PART)
            return sum(os.preadv(descriptor, [buffers[reader]], place) for place in places)

        try:
            with ThreadPoolExecutor(READERS, "bandwidth") as threads:
                began_s = time.perf_counter()
                count = sum(threads.map(read, range(READERS)))
                return count / (time.perf_counter() - began_s)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)


def measure(hardware: Hardware) -> Measured | None:
    """Read a buffer in as many threads as the process may use cores. Return the best pass, one that was not disturbed
    if there is one; None if there is too little memory."""
    libc, threads = _libc(), hardware.cpu_cores
    size = min(MOST_BYTES, max(LEAST_BYTES, threads * BYTES_PER_THREAD))
    if libc is None or size > hardware.ram_available_bytes * MOST_SHARE:
        return None
    part = size // threads // (2 * mmap.PAGESIZE) * 2 * mmap.PAGESIZE
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


def _best_pass(libc: Any, addresses: list[int], part: int) -> Measured:
    """Obtain the pages, then read all parts at once several times. Return the fastest pass that was not disturbed,
    else the fastest."""
    together = threading.Barrier(len(addresses))  # each thread takes one part, and all begin at once

    def obtain(address: int) -> None:
        together.wait()
        obtain_pages(libc, address, part)

    def read(address: int) -> _Span:
        together.wait()
        began_s, busy_s = time.perf_counter(), time.thread_time()
        libc.memcmp(address, address + part // 2, part // 2)  # the halves are equal, so it reads both to the end
        return _Span(began_s, time.perf_counter(), time.thread_time() - busy_s)

    best = disturbed = math.inf
    with ThreadPoolExecutor(len(addresses), "bandwidth") as threads:
        list(threads.map(obtain, addresses))
        end_s = time.perf_counter() + READ_S
        for _ in range(MOST_PASSES):
            spans = list(threads.map(read, addresses))
            best, disturbed = min(best, undisturbed_s(spans)), min(disturbed, lasted_s(spans))
            if time.perf_counter() > end_s:
                break
    num_bytes, is_disturbed = part * len(addresses), math.isinf(best)
    return Measured(num_bytes / (disturbed if is_disturbed else best), is_disturbed)


def obtain_pages(libc: Any, address: int, count: int) -> None:
    """Give each page memory of its own: until it is written, a page is a shared one of zeros, which the caches hold."""
    populate = getattr(libc, "madvise", None) if sys.platform == "linux" else None
    if populate is None or populate(ctypes.c_void_p(address), ctypes.c_size_t(count), POPULATE_WRITE) != 0:
        libc.memset(address, FILLED, count)


class _Span(NamedTuple):
    """One thread's pass over its part."""

    began_s: float
    ended_s: float
    busy_s: float  # of that time, how long the thread ran


def lasted_s(spans: Sequence[_Span]) -> float:
    """Return the seconds of a pass by all threads."""
    return max(span.ended_s for span in spans) - min(span.began_s for span in spans)


def undisturbed_s(spans: Sequence[_Span]) -> float:
    """Return the seconds of a pass by all threads; infinity if one of them had to wait for a processor."""
    lasted = lasted_s(spans)
    ran = min(span.busy_s / max(span.ended_s - span.began_s, 1e-9) for span in spans)
    together = max(span.ended_s - span.began_s for span in spans) / max(lasted, 1e-9)
    if time.get_clock_info("thread_time").resolution > MOST_RESOLUTION_S:  # Windows counts in steps of 16 ms
        ran = together
    return lasted if min(ran, together) >= RAN_SHARE else math.inf


def _libc() -> Any:
    """Return the C library with its functions declared; None where there is none to call."""
    try:
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        libc.memset.argtypes, libc.memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
        libc.memcmp.argtypes, libc.memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    except (OSError, AttributeError):
        return None
    return libc


def _read(path: Path, machine: dict[str, Any], names: Sequence[str] = ("bytes_per_s",)) -> dict[str, float] | None:
    """Return the speeds of these names that were kept for this machine; None: none, or another machine's."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = {name: float(kept.pop(name)) for name in names}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if kept == machine and all(0 < each < math.inf for each in found.values()) else None


def _read_measured(path: Path, machine: dict[str, Any]) -> Measured | None:
    for is_disturbed in (False, True):
        found = _read(path, machine | ({"disturbed": True} if is_disturbed else {}))
        if found is not None:
            return Measured(found["bytes_per_s"], is_disturbed)
    return None


def _read_products(path: Path, machine: dict[str, Any]) -> ProductSpeeds | None:
    for is_disturbed in (False, True):
        found = _read(path, machine | ({"disturbed": True} if is_disturbed else {}), ("narrow", "wide"))
        if found is not None:
            return ProductSpeeds(**found, is_disturbed=is_disturbed)
    return None


def _is_old(path: Path) -> bool:
    try:
        return not 0 <= time.time() - path.stat().st_mtime < AGAIN_S
    except OSError:
        return True
