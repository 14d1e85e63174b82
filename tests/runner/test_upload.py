"""Copies to the host: what was sampled stays as it was when its copy began."""

from __future__ import annotations

import pytest
import torch

from localllm.runner.upload import parts_to_host


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_parts_come_as_they_were(shared: bool, count: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = torch.zeros(8 * 12, dtype=torch.uint8, device=device)
    ids, best = whole[:64].view(torch.int64)[:count], whole[64:].view(torch.float32)[:count]
    if not shared:
        ids, best = ids.clone(), best.clone()
    ids.copy_(torch.arange(7, 7 + count))
    best.copy_(torch.arange(count) / 3)
    with torch.inference_mode():
        host_ids, host_best = parts_to_host(ids, best)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ids.zero_()
    best.zero_()
    assert host_ids.tolist() == list(range(7, 7 + count))
    assert host_best.tolist() == pytest.approx([i / 3 for i in range(count)])
    assert (host_ids.dtype, host_best.dtype) == (torch.int64, torch.float32)
    assert not shared or host_ids.untyped_storage().data_ptr() == host_best.untyped_storage().data_ptr(), "one copy"
