"""Copies of blocks between the KV cache and the host: `StepPlan.moves`.

The bytes of a block come from all tensors of its KV group, layer by layer, then from a drafter that shares the blocks.
On a device a copy out is gathered on the stream of the steps, behind the steps that wrote the blocks and before any
that reuses them; the host waits for it in `HostBlocks.result`, on another thread. A copy in is ordered likewise.
Does not know: names, files, who needs a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from localllm.engine.step import Bytes, HostBlocks, Move
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.kv_cache import KVCache
from localllm.runner.readback import StepTimer


class BlockCopies:
    """Copies blocks of some tensors. groups: of each KV group the tensors [heads, blocks, ...], contiguous."""

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = [
            [each.flatten(2).view(torch.uint8) for each in group] for group in groups
        ]  # [heads, blocks, bytes]
        self.block_bytes = tuple([sum(each.shape[0] * each.shape[2] for each in group) for group in self._groups])

    def apply(self, moves: Sequence[Move]) -> None:
        for move in moves:
            timer = StepTimer(self._groups[move.group][0].device)
            if move.is_load:
                self._copy_in(move)
            else:
                move.host.result = self._copy_out(move).result
            move.host.seconds = timer.stop().seconds

    def _copy_out(self, move: Move) -> HostBlocks:
        parts = self._groups[move.group]
        device = parts[0].device
        index = torch.tensor(move.blocks, device=device)
        staged = torch.empty((len(move.blocks), self.block_bytes[move.group]), dtype=torch.uint8, device=device)
        for part, place in zip(parts, self._places(move.group, staged), strict=True):
            place.copy_(part.index_select(1, index).transpose(0, 1))
        if device.type != "cuda":
            copied = list(staged.numpy())
            return HostBlocks(lambda: copied)
        host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(staged, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def result() -> Sequence[Bytes]:
            done.synchronize()
            return list(host.numpy())

        return HostBlocks(result)

    def _copy_in(self, move: Move) -> None:
        parts = self._groups[move.group]
        device = parts[0].device
        host = torch.empty(
            (len(move.blocks), self.block_bytes[move.group]), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        np.stack(move.host.result(), out=host.numpy())
        staged = host.to(device, non_blocking=True)
        index = torch.tensor(move.blocks, device=device)
        for part, place in zip(parts, self._places(move.group, staged), strict=True):
            part.index_copy_(1, index, place.transpose(0, 1))

    def _places(self, group: int, staged: Tensor) -> list[Tensor]:
        """Return where each tensor's part of the blocks is: [N, heads, bytes of a head]."""
        sizes = [part.shape[0] * part.shape[2] for part in self._groups[group]]
        split = staged.split(sizes, dim=1)
        return [
            each.unflatten(1, (part.shape[0], part.shape[2]))
            for each, part in zip(split, self._groups[group], strict=True)
        ]


def block_copies(kv: KVCache, drafter: OpenDrafter | None) -> BlockCopies:
    """Return what copies the blocks of a cache and of a drafter that shares them."""
    groups = kv.tensors_of_blocks()
    if drafter is not None:
        groups[drafter.main_group] += chain(*drafter.kv.tensors_of_blocks())
    return BlockCopies(groups)
