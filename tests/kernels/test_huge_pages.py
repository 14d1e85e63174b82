"""Advice to the kernel changes where memory lies, never what it holds."""

from __future__ import annotations

import sys

import pytest
import torch

from localllm.kernels.huge_pages import HUGE_PAGE, advise_huge_pages
from localllm.kernels.linear import linear, pack_weight


@pytest.mark.parametrize("size", [0, 1, 4096, HUGE_PAGE - 1])
def test_less_than_a_huge_page_is_left_alone(size):
    assert not advise_huge_pages(HUGE_PAGE * 1000 + 1, size)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux")
def test_advice_keeps_every_byte():
    values = torch.arange(3 * HUGE_PAGE // 4, dtype=torch.float32)
    advise_huge_pages(values.data_ptr(), values.nbytes)
    assert torch.equal(values, torch.arange(3 * HUGE_PAGE // 4, dtype=torch.float32))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux")
def test_an_address_that_is_not_ours_is_refused_without_harm():
    assert not advise_huge_pages(1 << 46, 4 * HUGE_PAGE)


def test_packed_weights_on_huge_pages_still_multiply():
    torch.manual_seed(0)
    weight, x = torch.randn(2048, 1024), torch.randn(3, 1024)
    torch.testing.assert_close(linear(x, pack_weight(weight)), x @ weight.T, rtol=1e-4, atol=1e-3)
