"""Resident memory of this process, and giving back to the system what nothing uses any more.

glibc keeps what was freed, in one arena for each thread that has allocated: a server that has parsed a few large bodies
goes on holding them. Few arenas hold less, and `trim` empties them.
Does not know: who allocates, when it is a good time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

import psutil

ARENAS = 2
"""Threads share so many: the event loop has one for itself, and whatever runs beside it shares the other."""
_M_ARENA_MAX = -8


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def bound_arenas(count: int = ARENAS) -> bool:
    """Before threads are started. False where the allocator is not glibc's, or MALLOC_ARENA_MAX says otherwise."""
    libc = _glibc()
    return libc is not None and "MALLOC_ARENA_MAX" not in os.environ and libc.mallopt(_M_ARENA_MAX, count) == 1


def trim() -> bool:
    """Give freed pages back: milliseconds. False where the allocator is not glibc's."""
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "malloc_trim") else None
