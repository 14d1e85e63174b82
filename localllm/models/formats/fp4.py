"""Matrices in 4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two per byte, the lower bits first.

    NVFP4   an e4m3 scale for each 16 weights, and one fp32 scale for all
    MXFP4   a power of two for each 32 (OCP Microscaling Formats, 2023)

They stay in 4 bits and are decoded through a table, with 16-bit activations; the fp4 x fp4 tensor cores of sm_100 are
not used. MXFP4's scales are exact in bf16. NVFP4's, a product of two, are rounded to fp16: an error of at most 0.05 %,
where converting the weights to 16 bits would have up to 0.4 %.

gpt-oss stores MXFP4 for the experts of a layer in one tensor; other matrices are unquantised:

    {stem}_blocks   uint8 [E, n, K / 32, 16]   two weights per byte, the lower four bits first
    {stem}_scales   uint8 [E, n, K / 32]       exponents: weight = e2m1 * 2^(scale - 127)

All E * n rows count as one matrix, from which an expert's rows are taken. Repacking is exact and gives the same layout
as GGUF's MXFP4.
Does not know: other tools' checkpoints (compressed_tensors.py), how matrices are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.cpu.stored_blocks import GGUFBlocks, meta_blocks, reads_blocks
from localllm.kernels.gguf_blocks import E2M1_DOUBLED
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.planar.linear import PlanarWeight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.blocks import BlockFormat, whole_blocks
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.linear_format import StoredPart
from localllm.models.formats.matrices import (
    CPU,
    MatrixFormat,
    check_rank,
    check_tensor,
    info,
    load_scales,
    meta_table_weight,
    present,
    refuse,
    shape_of,
    stored,
    table_weight,
)

PACKED = ("U8", "I8")
"""Types of bytes that hold two weights."""


@dataclass(frozen=True, slots=True)
class Fp4Names:
    """A tool's names for the tensors of a matrix."""

    codes: str
    scales: str
    global_scale: str | None  # None: MXFP4
    divides: bool = False  # divide by the global scale instead of multiplying with it


class Fp4(BlockFormat):
    stored_by_outputs = False

    def __init__(self, names: Fp4Names) -> None:
        self.names = names
        self.group = 32 if names.global_scale is None else 16

    @property
    def name(self) -> str:
        return "MXFP4" if self.names.global_scale is None else "NVFP4"

    @property
    def runs_as(self) -> str:
        return "packed fp4"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        codes = checkpoint.tensors.get(f"{stem}.{self.names.codes}")
        return self.name if codes is not None and codes.dtype in PACKED else None

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        rows, columns = shape_of(checkpoint, f"{stem}.{self.names.codes}")
        return rows, columns * 2

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        named = [self.names.codes, self.names.scales, self.names.global_scale or ""]
        return present(checkpoint, stem, [*filter(None, named), "input_global_scale", "input_scale"])

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        rows, columns = self.shape(checkpoint, stem)
        check_tensor(checkpoint, f"{stem}.{self.names.codes}", PACKED)
        types = ["U8", "F8_E8M0"] if self.names.global_scale is None else ["F8_E4M3"]
        check_tensor(checkpoint, f"{stem}.{self.names.scales}", types, (rows, -(-columns // self.group)))
        if self.names.global_scale is not None:
            check_tensor(checkpoint, f"{stem}.{self.names.global_scale}", ["F32"], (), (1,))

    @property
    def _axes(self) -> Mapping[str, str]:
        return {self.names.codes: "NK", self.names.scales: "NK"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return 1, self.group

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> PlanarWeight:
        scales = self._powers(checkpoint, stem) if self.names.global_scale is None else self._products(checkpoint, stem)
        packed = stored(checkpoint, f"{stem}.{self.names.codes}", device).view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        return table_weight(codes, scales.to(device), self.group, E2M1_DOUBLED)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> PlanarWeight:
        dtype = torch.bfloat16 if self.names.global_scale is None else torch.float16
        return meta_table_weight(*shape, self.group, dtype, E2M1_DOUBLED)

    def _powers(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        """Return the scales [N, G] bf16: half of 2^(e - 127), because the table holds doubled values."""
        exponents = stored(checkpoint, f"{stem}.{self.names.scales}").view(torch.uint8)
        return torch.exp2(exponents.float() - 128).to(torch.bfloat16)

    def _products(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        """Return the scales [N, G] fp16."""
        assert self.names.global_scale is not None
        whole = load_scales(checkpoint, f"{stem}.{self.names.global_scale}", torch.device("cpu"), torch.float32)
        scales = load_scales(checkpoint, f"{stem}.{self.names.scales}", torch.device("cpu"), torch.float32)
        wide = (scales / whole if self.names.divides else scales * whole) / 2
        narrow = wide.to(torch.float16)
        if not bool(torch.isfinite(narrow).all()):
            largest = float(wide.max())
            raise refuse(
                f"{stem} has a scale of {2 * largest:.3g}.", "The largest scale that fp16 supports here is 131008."
            )
        return narrow


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
        rows_of_blocks = torch.cat((scales.to(device), halves), dim=2).flatten(1)
        if _keeps_blocks(device):
            return GGUFBlocks((rows_of_blocks,), "MXFP4", len(own), is_copy=True)
        return repack_gguf(rows_of_blocks, "MXFP4", len(own))

    def read_meta(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> QuantizedWeight:
        weight = super().read_meta(checkpoint, parts, device, dtype)
        rows, columns = weight.shape
        return meta_blocks(rows, "MXFP4", columns) if _keeps_blocks(device) else weight

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> GGUFWeight:
        """Return the empty weight: repack one row, whose layout all rows share, and widen its tensors."""
        rows, columns = shape
        with torch.device("cpu"):
            row = torch.zeros((1, columns // GROUP * (BLOCK_BYTES + 1)), dtype=torch.uint8, device=CPU)
            return _with_rows(repack_gguf(row, "MXFP4", columns), rows)


def _keeps_blocks(device: torch.device) -> bool:
    """Return whether matrices are held as GGUF's blocks on that device."""
    return device.type == "cpu" and reads_blocks("MXFP4")


def _with_rows(one: GGUFWeight, rows: int) -> GGUFWeight:
    words = torch.empty((rows, one.words.shape[1]), dtype=one.words.dtype, device="meta")
    scales = torch.empty((one.scales.shape[0], rows), dtype=one.scales.dtype, device="meta")
    return replace(one, words=words, scales=scales)
