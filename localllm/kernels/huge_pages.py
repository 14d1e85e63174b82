"""Asks the operating system to back memory with huge pages, so that reading weights causes fewer TLB misses.

Measured on a two-core AVX512 machine with packed fp32 weights [9728, 896], 2 MiB against 4 KiB pages: 1.15 times as
fast at one row and 1.10 times at 16; no gain at 128 rows, where arithmetic is the limit.

Making huge pages takes half as long as loading a model. A load therefore only registers memory for them
(`register_huge_pages`), and they are made while the engine is idle (`collapse_huge_pages`). Linux only, and advisory:
if it fails, or the memory has been freed meanwhile, everything works as before.
Does not know: what the memory holds.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque

HUGE_PAGE = 2 << 20
PIECE = 8 * HUGE_PAGE  # made at a time: takes a few milliseconds
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1: at once, instead of whenever khugepaged runs

_registered: deque[tuple[int, int]] = deque()  # (first address, bytes) of huge pages to make


def register_huge_pages(address: int, size: int) -> None:
    """Record the whole huge pages within the `size` bytes from `address`."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + size) // HUGE_PAGE * HUGE_PAGE - start
    if length > 0 and sys.platform.startswith("linux"):
        _registered.append((start, length))


def collapse_huge_pages(seconds: float = float("inf")) -> bool:
    """Make recorded huge pages for about so many seconds, at least one piece. Return whether some are left."""
    if not _registered:
        return False
    until_s = time.perf_counter() + seconds
    libc = ctypes.CDLL(None)
    while _registered:
        start, length = _registered.popleft()
        span = ctypes.c_void_p(start), ctypes.c_size_t(min(length, PIECE))
        if libc.madvise(*span, MADV_HUGEPAGE) == 0 and length > PIECE:  # otherwise the memory is gone
            _registered.appendleft((start + PIECE, length - PIECE))
        libc.madvise(*span, MADV_COLLAPSE)  # fails where no huge page is free just now; the next piece may have one
        if time.perf_counter() >= until_s:
            break
    return bool(_registered)
