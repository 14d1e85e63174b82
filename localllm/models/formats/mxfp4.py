"""MXFP4 as published for gpt-oss (OCP Microscaling Formats, 2023): 4 bits per weight, a power of two for each 32.

    {stem}_blocks   uint8 [E, n, K / 32, 16]   two weights per byte, the lower four bits first
    {stem}_scales   uint8 [E, n, K / 32]       exponents: weight = e2m1 * 2^(scale - 127)

Only experts are stored so, those of a layer in one tensor. All E * n rows count as one matrix, from which an expert's
rows are taken. Repacking is exact and gives the same layout as GGUF's MXFP4. Other matrices are unquantised.
Does not know: how matrices are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from localllm.errors import CorruptModel
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.blocks import whole_blocks
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.linear_format import StoredPart
from localllm.models.formats.matrices import CPU, MatrixFormat, check_rank, check_tensor, info, stored

GROUP, BLOCK_BYTES = 32, 16


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """Return the format. Fields like modules_to_not_convert are ignored: the tensors' names show the same."""
    return Mxfp4()


class Mxfp4(MatrixFormat):
    @property
    def name(self) -> str:
        return "MXFP4"

    @property
    def runs_as(self) -> str:
        return "repacked to 4 bits, exactly"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        return "mxfp4" if f"{stem}_blocks" in checkpoint.tensors else None

    def check_present(self, checkpoint: Checkpoint) -> None:
        if not any(name.endswith("_blocks") for name in checkpoint.tensors):
            raise CorruptModel(
                "config.json says that this checkpoint is MXFP4, but none of its tensors is.",
                "Their names would end with _blocks and _scales.",
                "Remove quantization_config if the weights are not quantised, or download the model again.",
            )

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        *rows, groups, _ = info(checkpoint, f"{stem}_blocks").shape
        return math.prod(rows), groups * GROUP

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return [f"{stem}_blocks", f"{stem}_scales"]

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        check_rank(checkpoint, f"{stem}_blocks", 4)
        *scales, _ = shape = info(checkpoint, f"{stem}_blocks").shape
        check_tensor(checkpoint, f"{stem}_blocks", ["U8"], (*shape[:-1], BLOCK_BYTES))
        check_tensor(checkpoint, f"{stem}_scales", ["U8"], tuple(scales))

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        return whole_blocks(columns, GROUP, self.shape(checkpoint, stem)[1])

    def _part(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> QuantizedWeight:
        """Read only the requested rows and columns, one expert at a time."""
        rows, columns = self.shape(checkpoint, part.stem)
        own = range(columns) if part.columns is None else part.columns
        groups = slice(own.start // GROUP, own.stop // GROUP)
        blocks = stored(checkpoint, f"{part.stem}_blocks").view(rows, columns // GROUP, BLOCK_BYTES)[:, groups]
        scales = stored(checkpoint, f"{part.stem}_scales").view(rows, columns // GROUP, 1)[:, groups]
        if part.order is not None:
            blocks, scales = blocks[part.order], scales[part.order]
        blocks = blocks.to(device)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)  # [n, groups, 32]
        halves = codes[:, :, : GROUP // 2] | (codes[:, :, GROUP // 2 :] << 4)  # GGUF's order: 16 low, 16 high
        return repack_gguf(torch.cat((scales.to(device), halves), dim=2).flatten(1), "MXFP4", len(own))

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> GGUFWeight:
        """Return the empty weight: repack one row, whose layout all rows share, and widen its tensors."""
        rows, columns = shape
        with torch.device("cpu"):
            row = torch.zeros((1, columns // GROUP * (BLOCK_BYTES + 1)), dtype=torch.uint8, device=CPU)
            return _with_rows(repack_gguf(row, "MXFP4", columns), rows)


def _with_rows(one: GGUFWeight, rows: int) -> GGUFWeight:
    words = torch.empty((rows, one.words.shape[1]), dtype=one.words.dtype, device="meta")
    scales = torch.empty((one.scales.shape[0], rows), dtype=one.scales.dtype, device="meta")
    return replace(one, words=words, scales=scales)
