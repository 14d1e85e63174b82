"""Huge pages are wanted first and made later; memory that is gone by then does no harm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from localllm.kernels import huge_pages
from localllm.kernels.huge_pages import HUGE_PAGE, PIECE, collapse_huge_pages, register_huge_pages


@pytest.fixture(autouse=True)
def nothing_is_wanted() -> None:
    huge_pages._registered.clear()


def huge_kib(address: int) -> int:
    """AnonHugePages of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("not mapped")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="advice for Linux")
def test_pages_are_made_piece_by_piece_and_keep_what_they_hold() -> None:
    tensor = torch.arange((3 * PIECE + HUGE_PAGE) // 8)
    register_huge_pages(tensor.data_ptr(), tensor.nbytes)
    calls = 1
    while collapse_huge_pages(0.0):
        calls += 1
    assert calls in (3, 4), "a piece at a time"
    assert torch.equal(tensor, torch.arange(len(tensor)))
    middle = tensor.data_ptr() + tensor.nbytes // 2
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert huge_kib(middle) >= PIECE // 1024


def test_small_and_vanished_memory_is_left_alone() -> None:
    register_huge_pages(HUGE_PAGE + 1, HUGE_PAGE)  # no whole huge page inside
    assert not huge_pages._registered
    register_huge_pages(1 << 46, 4 * HUGE_PAGE)  # nobody's
    assert not collapse_huge_pages()
