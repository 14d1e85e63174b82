"""Matrices in 4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two per byte, the lower bits first.

    NVFP4   an e4m3 scale for each 16 weights, and one fp32 scale for all
    MXFP4   a power of two for each 32 (OCP Microscaling Formats, 2023)

They stay in 4 bits and are decoded through a table, with 16-bit activations; the fp4 x fp4 tensor cores of sm_100 are
not used. MXFP4's scales are exact in bf16. NVFP4's, a product of two, are rounded to fp16: an error of at most 0.05 %,
where converting the weights to 16 bits would have up to 0.4 %.
Does not know: which tool wrote the checkpoint (compressed_tensors.py, modelopt.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.gguf_blocks import E2M1_DOUBLED
from localllm.kernels.planar.linear import PlanarWeight
from localllm.models.formats.blocks import BlockFormat
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.matrices import (
    check_tensor,
    load_scales,
    meta_table_weight,
    present,
    refuse,
    shape_of,
    stored,
    table_weight,
)


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
        return self.name if codes is not None and codes.dtype == "U8" else None

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        rows, columns = shape_of(checkpoint, f"{stem}.{self.names.codes}")
        return rows, columns * 2

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        named = [self.names.codes, self.names.scales, self.names.global_scale or ""]
        return present(checkpoint, stem, [*named, "input_global_scale", "input_scale"])

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        rows, columns = self.shape(checkpoint, stem)
        check_tensor(checkpoint, f"{stem}.{self.names.codes}", ["U8"])
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
        packed = stored(checkpoint, f"{stem}.{self.names.codes}", device)
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
