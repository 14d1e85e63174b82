"""Asks the operating system to back memory with huge pages, so that reading weights causes fewer TLB misses.

Measured on a two-core AVX512 machine with packed fp32 weights [9728, 896], 2 MiB against 4 KiB pages: 1.15 times as
fast at one row and 1.10 times at 16; no gain at 128 rows, where arithmetic is the limit.

Making huge pages takes half as long as loading a model. They are therefore made while the engine is idle.
Linux only, and advisory: if it fails, everything works as before.
Does not know: what the memory holds.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Iterable

HUGE_PAGE = 2 << 20
PIECE = 8 * HUGE_PAGE  # made at a time: takes a few milliseconds
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1: at once, instead of whenever khugepaged runs


class HugePages:
    """The huge pages of some memory that are not made yet. The caller holds the memory."""

    def __init__(self, memory: Iterable[tuple[int, int]]) -> None:
        """memory: (address, bytes) pairs; of each, whole huge pages are used."""
        spans = (_whole_pages(address, size) for address, size in memory)
        self._left = deque(span for span in spans if span[1] > 0 and sys.platform.startswith("linux"))

    def make(self, seconds: float = float("inf")) -> bool:
        """Make huge pages for about `seconds` seconds, at least one piece. Return whether some are left."""
        if not self._left:
            return False
        until_s = time.perf_counter() + seconds
        libc = ctypes.CDLL(None)
        while self._left:
            start, length = self._left.popleft()
            span = ctypes.c_void_p(start), ctypes.c_size_t(min(length, PIECE))
            libc.madvise(*span, MADV_HUGEPAGE)
            libc.madvise(*span, MADV_COLLAPSE)  # fails where no huge page is free just now; the next piece may have one
            if length > PIECE:
                self._left.appendleft((start + PIECE, length - PIECE))
            if time.perf_counter() >= until_s:
                break
        return bool(self._left)


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """Return (first address, bytes) of the huge pages within the `size` bytes from `address`."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    return start, (address + size) // HUGE_PAGE * HUGE_PAGE - start
