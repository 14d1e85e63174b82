"""Matrices in GGUF's block types: repacked bit for bit if a kernel supports the type, else dequantised by the gguf
package. On a CPU with the native library all blocks stay as they are, views of the file, until they are packed.

F32 F16 BF16                              not quantised
Q4_0 ... Q6_K, IQ4_NL, IQ4_XS, MXFP4      repacked (list in kernels/gguf_blocks.py), as large as in the file
                                          or a little larger
IQ1_* IQ2_* IQ3_* TQ1_0 TQ2_0             dequantised to the activations' type elsewhere, with a note to the user
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.cpu.stored_blocks import (
    GGUFBlocks,
    block_size,
    dequantize_by_gguf,
    meta_blocks,
    reads_blocks,
)
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight, repack_gguf
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.blocks import whole_blocks
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, TensorInfo
from localllm.models.formats.linear_format import StoredPart

DEQUANTISED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
_ELEMENTS = 1 << 22  # weights to dequantise at a time


def gguf_matrices(quantization: Mapping[str, Any]) -> GGUFMatrices:
    """Return the format. quantization: from config.py, a label and the number of tensors of each type."""
    types = quantization.get("types") or {}
    return GGUFMatrices(str(quantization.get("label") or "no label"), {str(t): int(n) for t, n in types.items()})


class GGUFMatrices:
    """A `LinearFormat`, and a `TableFormat`."""

    def __init__(self, label: str, types: Mapping[str, int]) -> None:
        self._label, self._types = label, types

    @property
    def name(self) -> str:
        counts = ", ".join(f"{count} {block_type}" for block_type, count in self._types.items())
        return f"GGUF {self._label}" + (f" ({counts})" if counts else "")

    @property
    def runs_as(self) -> str:
        bits = sorted({BLOCK_TYPES[t].bits for t in self._types if t in BLOCK_TYPES})
        if not bits:
            return "dequantised to 16 or 32 bits on a GPU" if self._wide else "as stored"
        words = f"repacked to {' and '.join(map(str, bits))} bits, exactly"
        return f"{words}; {', '.join(self._wide)} dequantised on a GPU" if self._wide else words

    def notes_on(self, device: str) -> Sequence[str]:
        wide = [block_type for block_type in self._wide if _is_dequantised(block_type, device)]
        if not wide:
            return ()
        count, types = sum(self._types[block_type] for block_type in wide), ", ".join(wide)
        why = "no GPU kernel supports them as stored"
        if device == "cpu":
            why = (
                "the native library that multiplies them as stored is missing (localllm doctor) or wrong (see the log)"
            )
        return [f"{count} matrices in {types} are dequantised to the activations' dtype: {why}."]

    @property
    def _wide(self) -> list[str]:
        return [block_type for block_type in self._types if block_type in DEQUANTISED]

    def ignores(self, name: str) -> bool:
        return False

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        info = checkpoint.tensors.get(f"{stem}.weight")
        if info is None or info.dtype in (*FLOATS, "I32"):  # I32: a table of numbers
            return None
        if info.dtype not in BLOCK_TYPES and info.dtype not in DEQUANTISED:
            raise UnsupportedModel(
                f"{stem}.weight in {info.file.name} is stored as {info.dtype}.",
                f"Supported: {', '.join((*FLOATS, *BLOCK_TYPES, *DEQUANTISED))}.",
                "Use a file of another type: Q4_K_M, Q8_0, ...",
            )
        return info.dtype

    def is_table(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> bool:
        kind = self.kind(checkpoint, stem)
        return kind is not None and not _is_dequantised(str(kind), device.type)

    def read(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        kind, columns = str(self.kind(checkpoint, parts[0].stem)), _num_columns(checkpoint, parts[0])
        blocks = [_blocks(checkpoint, part) for part in parts]
        if _is_dequantised(kind, device.type):
            wide = [_by_reference(part, kind, columns, dtype).to(device) for part in blocks]
            return wide[0] if len(wide) == 1 else torch.cat(wide)
        if device.type == "cpu" and reads_blocks(kind):
            return GGUFBlocks(tuple(blocks), kind, columns)
        moved = [part.to(device) for part in blocks]
        return repack_gguf(moved[0] if len(moved) == 1 else torch.cat(moved), kind, columns)

    def read_meta(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> Tensor | QuantizedWeight:
        kind, columns = str(self.kind(checkpoint, parts[0].stem)), _num_columns(checkpoint, parts[0])
        rows = sum(self.shape(checkpoint, part.stem)[0] if part.order is None else part.order.numel() for part in parts)
        if _is_dequantised(kind, device.type):
            return torch.empty((rows, columns), dtype=dtype, device="meta")
        if device.type == "cpu" and reads_blocks(kind):
            return meta_blocks(rows, kind, columns)
        one = _one_row(kind, columns)
        tensors = {name: getattr(one, name) for name in ("words", "scales", "mins", "super_scales", "super_mins")}
        meta = {
            name: tensor.new_empty(
                (rows, tensor.shape[1]) if name == "words" else (tensor.shape[0], rows), device="meta"
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return replace(one, **meta)

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        *rows, columns = _info(checkpoint, stem).shape
        return prod(rows), columns  # experts are stacked by rows

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        info = _info(checkpoint, stem)
        return whole_blocks(columns, block_size(info.dtype)[0], info.shape[-1])

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return [f"{stem}.weight"]

    def dequantize(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        self.kind(checkpoint, stem)  # raises for unsupported types
        return widen(checkpoint.tensor(f"{stem}.weight"), _info(checkpoint, stem), torch.float32)


def _is_dequantised(block_type: str, device: str) -> bool:
    """Return whether no kernel of the device reads a type as stored."""
    return block_type in DEQUANTISED and not (device == "cpu" and reads_blocks(block_type))


def widen(stored: Tensor, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    """Return the values of a stored tensor, of info.shape, on the CPU. stored: from a GGUF checkpoint's `tensor`."""
    if info.dtype in FLOATS:
        return stored.to(dtype)
    return widen_rows(stored.flatten(0, -2), info.dtype, info.shape[-1], dtype).view(info.shape)


def widen_rows(blocks: Tensor, block_type: str, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the values [n, K] of rows in blocks, uint8 [n, bytes of a row], on the CPU."""
    if block_type in BLOCK_TYPES:
        return repack_gguf(blocks, block_type, columns).dequantize(dtype)
    return _by_reference(blocks, block_type, columns, dtype)


def _by_reference(blocks: Tensor, block_type: str, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantise blocks with the gguf package to [n, K]."""
    out = torch.empty((blocks.shape[0], columns), dtype=dtype, device="cpu")
    for start in range(0, blocks.shape[0], step := max(1, _ELEMENTS // columns)):
        out[start : start + step] = dequantize_by_gguf(GGUFBlocks((blocks[start : start + step],), block_type, columns))
    return out


def _info(checkpoint: Checkpoint, stem: str) -> TensorInfo:
    return checkpoint.tensors[f"{stem}.weight"]


def _num_columns(checkpoint: Checkpoint, part: StoredPart) -> int:
    return _info(checkpoint, part.stem).shape[-1] if part.columns is None else len(part.columns)


def _blocks(checkpoint: Checkpoint, part: StoredPart) -> Tensor:
    """Return a part's blocks, uint8 [n, bytes of a row]. Rows can be reordered while packed."""
    assert not part.transposed, "GGUF stores every matrix by rows"
    blocks = checkpoint.tensor(f"{part.stem}.weight").flatten(0, -2)
    if part.columns is not None:
        size, num_bytes = block_size(_info(checkpoint, part.stem).dtype)
        blocks = blocks[:, part.columns.start // size * num_bytes : part.columns.stop // size * num_bytes]
    if part.order is None or not len(part.order):
        return blocks if part.order is None else blocks[:0]
    order = part.order.cpu()
    first, count = int(order[0]), len(order)
    is_range = torch.equal(order, torch.arange(first, first + count, device="cpu"))
    return blocks[first : first + count] if is_range else blocks[order]


@lru_cache(maxsize=256)
def _one_row(block_type: str, columns: int) -> GGUFWeight:
    """Repack one row on the CPU; a repacked matrix consists of independent rows.

    Not on `meta`: shifts and copies there import torch's compiler, which takes 80 MiB permanently.
    """
    kind = BLOCK_TYPES[block_type]
    with torch.device("cpu"):
        row = torch.zeros((1, columns // kind.size * kind.num_bytes), dtype=torch.uint8)
        return repack_gguf(row, block_type, columns)
