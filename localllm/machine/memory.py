"""Keep the resident memory of this process small: limit glibc's arenas, and return unused memory to the system.

glibc keeps freed memory in one arena per allocating thread, so a server that has parsed a few large bodies keeps their
memory. Fewer arenas keep less, and `trim` empties them.
Does not know: who allocates, when to trim.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import psutil

ARENAS = 2
"""Number of arenas: one for the event loop, one shared by all other threads."""
_M_ARENA_MAX = -8


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def limit_arenas(count: int = ARENAS) -> bool:
    """Limit the number of arenas; call it before threads start. Return False if the allocator is not glibc's, or if
    MALLOC_ARENA_MAX is set."""
    libc = _glibc()
    return libc is not None and "MALLOC_ARENA_MAX" not in os.environ and libc.mallopt(_M_ARENA_MAX, count) == 1


def trim() -> bool:
    """Return freed pages to the system, which takes milliseconds. Return False if the allocator is not glibc's."""
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage while the block makes many objects of which none is garbage: the collector would visit all of
    them again and again. It is a tenth of the time of a start, and nine tenths of parsing large JSON."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def permanent_objects() -> Iterator[None]:
    """Collect no garbage while the block imports or makes what lives as long as this process, and never visit these
    objects again. Use it before requests: what is garbage at its end, and refers to itself, is kept.
    """
    with paused_collection():
        yield
        gc.freeze()


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "malloc_trim") else None
