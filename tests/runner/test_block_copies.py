"""Copies of blocks between the cache and the host, bit for bit, for each kind of cache; and answers from them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from localllm.engine.step import HostBlocks, Move
from localllm.kernels.layer_cache import LayerKV
from localllm.runner.block_copies import BlockCopies

HEADS, BLOCKS, SIZE, DIM = 3, 6, 4, 8


def out(group: int, blocks: Sequence[int]) -> Move:
    return Move(group, tuple(blocks), is_load=False, host=HostBlocks(list))


def layer(dtype: torch.dtype) -> LayerKV:
    k, v = ((torch.rand(HEADS, BLOCKS, SIZE, DIM) * 100).to(dtype) for _ in range(2))
    if dtype == torch.int8:
        return LayerKV(k, v, torch.rand(HEADS, BLOCKS, SIZE), torch.rand(HEADS, BLOCKS, SIZE))
    if dtype == torch.uint8:  # 4 bits, with a scale and a zero point for each group of numbers
        k_scale, v_scale = (torch.rand(HEADS, BLOCKS, SIZE, 2, groups).half() for groups in (1, 2))
        return LayerKV(k, v, k_scale, v_scale)
    return LayerKV(k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_round_trip_is_equal_to_the_bit(dtype: torch.dtype) -> None:
    """Two groups of two layers; blocks come back to other places, and no other block changes."""
    groups = [[tensor for _ in range(2) for tensor in layer(dtype).tensors()] for _ in range(2)]
    before = [[tensor.clone() for tensor in group] for group in groups]
    copies = BlockCopies(groups)
    assert copies.block_bytes[0] == sum(tensor.nbytes for tensor in groups[0]) // BLOCKS
    left = out(1, [4, 2])
    copies.apply([left])
    rows = [row.copy() for row in left.host.result()]
    assert [row.nbytes for row in rows] == [copies.block_bytes[1]] * 2
    for tensor in groups[1]:
        tensor[:, 4] = 0
    copies.apply([Move(1, (1, 3), is_load=True, host=HostBlocks(lambda: rows))])
    for tensor, was in zip(groups[1], before[1], strict=True):
        for place, source in ((1, 4), (3, 2), (2, 2), (5, 5), (0, 0)):
            assert torch.equal(tensor[:, place].view(torch.uint8), was[:, source].view(torch.uint8))
    for tensor, was in zip(groups[0], before[0], strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))


def test_moves_are_applied_in_their_order() -> None:
    """A block that leaves and is filled again in one step leaves with what it held before."""
    tensor = torch.arange(HEADS * BLOCKS * SIZE * DIM, dtype=torch.float32).view(HEADS, BLOCKS, SIZE, DIM)
    copies, was = BlockCopies([[tensor]]), tensor.clone()
    first, content = out(0, [2]), np.zeros(HEADS * SIZE * DIM * 4, np.uint8)
    last = out(0, [2])
    copies.apply([first, Move(0, (2,), is_load=True, host=HostBlocks(lambda: [content])), last])
    assert first.host.result()[0].tobytes() == was[:, 2].contiguous().numpy().tobytes()
    assert last.host.result()[0].tobytes() == content.tobytes()
