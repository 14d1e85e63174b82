"""Ask the kernel to back a range of memory with huge pages, so that streaming weights misses the TLB less.

Measured on a two-core AVX512 machine, packed fp32 weights, 2 MiB against 4 KiB pages: [9728, 896] 1.15 times at one
row and 1.10 times at 16; nothing to gain at 128 rows, where arithmetic is what takes the time.
Linux only, and advice only: where the kernel cannot, everything works as before.
Does not know: what the memory holds.
"""

from __future__ import annotations

import ctypes
import sys

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1: now, instead of whenever khugepaged comes by


def advise_huge_pages(address: int, size: int) -> bool:
    """Whether the whole huge pages within the `size` bytes from `address` are backed as such now."""
    if not sys.platform.startswith("linux"):
        return False
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + size) // HUGE_PAGE * HUGE_PAGE - start
    if length <= 0:
        return False
    libc = ctypes.CDLL(None)
    span = ctypes.c_void_p(start), ctypes.c_size_t(length)
    return bool(libc.madvise(*span, MADV_HUGEPAGE) == 0 and libc.madvise(*span, MADV_COLLAPSE) == 0)
