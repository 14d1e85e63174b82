"""Linear layers with weights from a GGUF file, in the file's precision.

    GGUFWeight     W in the planar layout; `linear` runs the planar kernel, on CPU its twin
    repack_gguf    from the bytes of a GGUF tensor

Thirteen block types become four layouts that one kernel reads (gguf_blocks.py has the table):

    4 bits, evenly spaced    Q4_0 Q4_1 Q4_K per 32 weights; Q2_K Q3_K per 16
    4 bits, through a table  IQ4_NL IQ4_XS MXFP4
    8 bits                   Q8_0 Q5_0 Q5_1 Q5_K per 32; Q6_K per 16

Repacking is lossless: integers, small scales and 16-bit scales are stored separately and combined in fp32 inside the
kernel, and `dequantize` gives the same bits as ggml's definition. A weight takes as much memory as in the file, except
that Q5 and Q6 use 8 bits, Q3 and Q2 4 bits, and MXFP4 a second byte per scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.gguf_blocks import BLOCK_TYPES, BlockType
from localllm.kernels.planar.layout import pack_words, padded_columns
from localllm.kernels.planar.linear import PlanarWeight

REPACK_ELEMENTS = 1 << 20  # weights unpacked at a time, so that intermediate tensors stay in a cache


@dataclass(frozen=True, slots=True)
class GGUFWeight(PlanarWeight):
    """A planar weight that records its block type in the file."""

    block_type: str = ""


def repack_gguf(data: Tensor, block_type: str, columns: int) -> GGUFWeight:
    """Repack data [N, bytes of a row] uint8, as in the file, on the device that will use it -> W [N, columns].

    Raises ValueError if the type is not one of BLOCK_TYPES, or the number of bytes does not match `columns`.
    """
    if block_type not in BLOCK_TYPES:
        raise ValueError(f"GGUF block type {block_type} cannot be repacked: {', '.join(BLOCK_TYPES)} can")
    kind = BLOCK_TYPES[block_type]
    if columns % kind.size or data.shape[1] != columns // kind.size * kind.num_bytes:
        raise ValueError(f"{data.shape[1]} bytes a row are not {columns} weights of type {block_type}")
    rows, step = data.shape[0], max(1, REPACK_ELEMENTS // columns)
    tensors: dict[str, Tensor] = {}
    for start in range(0, max(1, rows), step):
        for name, part in _repack(data[start : start + step], kind, columns).items():
            if name == "words":
                whole = tensors.setdefault(name, part.new_empty((rows, part.shape[1])))
                whole[start : start + step] = part
            else:
                whole = tensors.setdefault(name, part.new_empty((part.shape[0], rows)))
                whole[:, start : start + step] = part
    return GGUFWeight(
        **tensors,
        columns=columns,
        bits=kind.bits,
        lanes=min(32, kind.group),
        group=kind.group,
        zero=kind.zero,
        table=kind.table,
        block_type=block_type,
    )


def _repack(data: Tensor, kind: BlockType, columns: int) -> dict[str, Tensor]:
    """Repack some rows. Return the tensors of a PlanarWeight by name."""
    rows = data.shape[0]
    fields = kind.split(data.reshape(-1, kind.num_bytes))
    padded = padded_columns(columns, kind.bits, min(32, kind.group))
    named = {"words": pack_words(fields.values.reshape(rows, columns), kind.bits, min(32, kind.group))}
    for name in ("scales", "mins"):
        if (per_group := getattr(fields, name)) is not None:
            by_row = per_group.reshape(rows, columns // kind.group)
            named[name] = F.pad(by_row, (0, padded // kind.group - by_row.shape[1])).t().contiguous()
    for name in ("super_scales", "super_mins"):
        if (per_block := getattr(fields, name)) is not None:
            named[name] = per_block.reshape(rows, columns // kind.size).t().contiguous()
    return named
