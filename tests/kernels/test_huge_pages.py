"""Huge pages are made piece by piece; memory without any does no harm."""

import sys
from pathlib import Path

import pytest
import torch

from localllm.kernels.huge_pages import HUGE_PAGE, PIECE, HugePages
from localllm.models.layers.linear import Linear
from localllm.models.weights.parameters import held_memory


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
    pages = HugePages([(tensor.data_ptr(), tensor.nbytes)])
    calls = 1
    while pages.make(0.0):
        calls += 1
    assert calls in (3, 4), "a piece at a time"
    assert torch.equal(tensor, torch.arange(len(tensor)))
    middle = tensor.data_ptr() + tensor.nbytes // 2
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert huge_kib(middle) >= PIECE // 1024


def test_small_and_foreign_memory_is_left_alone() -> None:
    assert not HugePages([(HUGE_PAGE + 1, HUGE_PAGE)]).make()  # no whole huge page inside
    assert not HugePages([(1 << 46, 4 * HUGE_PAGE)]).make()  # nobody's


def test_the_memory_of_a_model_is_named_once() -> None:
    shared, large = torch.zeros(100, 64), torch.ones(640, 896)
    layers = [Linear(shared[:50]), Linear(shared[50:], shared[0, :50]), Linear(large)]
    packed = layers[2].weight
    assert isinstance(packed, torch.Tensor)
    address = torch.ops.mkldnn.data_ptr(packed) if packed.is_mkldnn else packed.data_ptr()
    assert dict(held_memory(layers)) == {shared.data_ptr(): shared.nbytes, address: large.nbytes}
