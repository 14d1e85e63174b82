"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978), in the `gemm` layout that AutoAWQ writes.

    qweight [K, N / 8] int32    eight outputs per word, in the order 0 2 4 6 1 3 5 7
    qzeros  [K / group, N / 8]  in the same order; missing without zero_point: the zero point is 8
    scales  [K / group, N]

Does not know: kernels' layouts (kernels/int4_linear.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from localllm.kernels.int4_linear import Int4Weight, meta_int4, repack_awq
from localllm.models.formats.blocks import BlockFormat
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.matrices import (
    SCALE_TYPES,
    check_tensor,
    group_size,
    groups_in_words,
    info,
    load_scales,
    num_groups,
    present,
    refuse,
    scale_type,
    shape_of,
    stored,
    with_zeros,
)

MIDDLE_ZEROS = -2004318072  # 0x88888888: eight zero points of 8


def awq(config: Mapping[str, Any]) -> Awq:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    version = "llm-awq" if config.get("backend") == "llm-awq" else version
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm":
        raise refuse(f"This checkpoint is AWQ in the {version} layout.", "Supported: the gemm layout.")
    if bits != 4:
        raise refuse(f"This checkpoint is AWQ with {bits} bits.", "AWQ has 4.")
    group = group_size(config.get("group_size", config.get("q_group_size", 128)))
    return Awq(group, zero_point=config.get("zero_point") is not False)


class Awq(BlockFormat):
    def __init__(self, group: int, *, zero_point: bool = True) -> None:
        """zero_point: every matrix has zero points."""
        self.group, self.zero_point = group, zero_point

    @property
    def name(self) -> str:
        return f"AWQ, 4 bits, {groups_in_words(self.group)}"

    @property
    def runs_as(self) -> str:
        return "packed int4"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        if f"{stem}.qweight" not in checkpoint.tensors:
            return None
        return info(checkpoint, f"{stem}.scales").dtype, f"{stem}.qzeros" in checkpoint.tensors

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        columns, words = shape_of(checkpoint, f"{stem}.qweight")
        return words * 8, columns

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return present(checkpoint, stem, ("qweight", "qzeros", "scales"))

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        rows, columns = self.shape(checkpoint, stem)
        groups = num_groups(columns, self.group, stem)
        check_tensor(checkpoint, f"{stem}.qweight", ["I32"])
        check_tensor(checkpoint, f"{stem}.scales", SCALE_TYPES, (groups, rows))
        if self.zero_point or self._has_zeros(checkpoint, stem):
            check_tensor(checkpoint, f"{stem}.qzeros", ["I32"], (groups, rows // 8))

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"qweight": "KN", "qzeros": "KN", "scales": "KN"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return 8, 1 if self.group == -1 else self.group

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> Int4Weight:
        scales = load_scales(checkpoint, f"{stem}.scales", device)
        qweight = stored(checkpoint, f"{stem}.qweight", device)
        if not self._has_zeros(checkpoint, stem):
            shape = (scales.shape[0], qweight.shape[1])
            zeros = torch.full(shape, MIDDLE_ZEROS, dtype=torch.int32, device=device)
            return repack_awq(qweight, zeros, scales, self.group)
        return with_zeros(repack_awq(qweight, stored(checkpoint, f"{stem}.qzeros", device), scales, self.group))

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> Int4Weight:
        scales = scale_type(checkpoint, f"{stem}.scales")
        return meta_int4(shape, self.group, scales, zeros=self._has_zeros(checkpoint, stem))

    def _has_zeros(self, checkpoint: Checkpoint, stem: str) -> bool:
        return f"{stem}.qzeros" in checkpoint.tensors
