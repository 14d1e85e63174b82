"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023, arXiv:2305.14314), and LLM.int8 (arXiv:2208.07339).

    4 bits   {stem}.weight uint8 [N K / 2, 1]     two weights per byte, the higher four bits first
             .absmax                              a scale for each block of 64 weights: fp32, or uint8 codes of
             .nested_absmax .nested_quant_map     scales that are quantised themselves, in blocks of 256
             .quant_map fp32 [16]                 the values of the codes
             .quant_state.bitsandbytes__nf4       JSON as bytes: shape, block sizes, nested_offset
    8 bits   {stem}.weight int8 [N, K], .SCB fp32 [N], .weight_format: 0, by rows

4-bit weights stay in 4 bits and are decoded through a table. Scales are rounded to fp16 and the table's values to the
activations' type, which together loses as much as a dequantised 16-bit weight would.
Does not know: kernels.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.int8_linear import Int8Weight
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
    finite,
    load_copy,
    load_scales,
    meta_table_weight,
    naming_matrix,
    present,
    refuse,
    shape_of,
    stored,
    table_weight,
)
from localllm.models.formats.stored_ints import meta_int8

INT8_TOP = 127.0


def bitsandbytes(config: Mapping[str, Any]) -> MatrixFormat:
    if config.get("load_in_8bit"):
        return LlmInt8()
    if config.get("load_in_4bit"):
        return Bnb4(str(config.get("bnb_4bit_quant_type", "fp4")))
    raise refuse(
        "This bitsandbytes checkpoint is neither in 4 nor in 8 bits.", "Supported: load_in_4bit and load_in_8bit."
    )


@dataclass(frozen=True, slots=True)
class QuantState:
    """The quantisation state that bitsandbytes stores beside a matrix."""

    rows: int
    columns: int
    block: int
    nested_block: int | None  # quantised scales: this many share a scale
    nested_offset: float


class Bnb4(MatrixFormat):
    stored_by_outputs = False

    def __init__(self, quant_type: str) -> None:
        if quant_type not in ("nf4", "fp4"):
            raise refuse(f"This bitsandbytes checkpoint is in {quant_type}.", "Supported: nf4 and fp4.")
        self.quant_type = quant_type

    @property
    def name(self) -> str:
        return f"bitsandbytes {self.quant_type.upper()}, 4 bits"

    @property
    def runs_as(self) -> str:
        return f"packed {self.quant_type}"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        if self._state_name(stem) not in checkpoint.tensors:
            return None
        state = self._state(checkpoint, stem)
        return self.quant_type, state.block

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        state = self._state(checkpoint, stem)
        return state.rows, state.columns

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        endings = [
            "weight",
            *(f"weight.{each}" for each in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
        ]
        return [*present(checkpoint, stem, endings), self._state_name(stem)]

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        state = self._state(checkpoint, stem)
        size = state.rows * state.columns
        if state.columns % state.block:
            raise refuse(
                f"{stem} has {state.columns} inputs in blocks of {state.block}.",
                "Blocks that span several rows are not supported.",
            )
        check_tensor(checkpoint, f"{stem}.weight", ["U8"], (size // 2, 1), (size // 2,))
        blocks = size // state.block
        types = ["F32"] if state.nested_block is None else ["U8"]
        check_tensor(checkpoint, f"{stem}.weight.absmax", types, (blocks,))
        check_tensor(checkpoint, f"{stem}.weight.quant_map", ["F32"], (16,))
        if state.nested_block is not None:
            check_tensor(checkpoint, f"{stem}.weight.nested_absmax", ["F32"], (-(-blocks // state.nested_block),))
            check_tensor(checkpoint, f"{stem}.weight.nested_quant_map", ["F32"], (256,))

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        state = self._state(checkpoint, stem)
        return whole_blocks(columns, state.block, state.columns)

    def _part(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> QuantizedWeight:
        return naming_matrix(part.stem, lambda: self._packed(checkpoint, part, device))

    def _packed(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> PlanarWeight:
        stem, state = part.stem, self._state(checkpoint, part.stem)
        packed = _chosen(stored(checkpoint, f"{stem}.weight"), part, state, 2).to(device)
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)
        scales = self._scales(checkpoint, part, state).to(device, torch.float16)
        table = load_scales(checkpoint, f"{stem}.weight.quant_map", torch.device("cpu"))
        return table_weight(codes, scales, _group(state), table.tolist())

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> PlanarWeight:
        return meta_table_weight(*shape, _group(self._state(checkpoint, stem)), torch.float16, (0.0,) * 16)

    def _scales(self, checkpoint: Checkpoint, part: StoredPart, state: QuantState) -> Tensor:
        """Return the scales of a part in fp32: [n, blocks of a row]."""
        name = f"{part.stem}.weight"
        codes = _chosen(stored(checkpoint, f"{name}.absmax"), part, state, state.block)
        if state.nested_block is None:
            return finite(codes, f"{name}.absmax")
        values = load_scales(checkpoint, f"{name}.nested_quant_map", CPU)[codes.int()]
        each = load_scales(checkpoint, f"{name}.nested_absmax", CPU).repeat_interleave(state.nested_block)
        blocks = state.rows * state.columns // state.block
        return values * _chosen(each[:blocks], part, state, state.block) + state.nested_offset

    def _state_name(self, stem: str) -> str:
        return f"{stem}.weight.quant_state.bitsandbytes__{self.quant_type}"

    def _state(self, checkpoint: Checkpoint, stem: str) -> QuantState:
        name = self._state_name(stem)
        check_tensor(checkpoint, name, ["U8"])
        check_rank(checkpoint, name, 1)
        raw = bytes(stored(checkpoint, name).tolist())
        try:
            said = json.loads(raw)
            (rows, columns), block = map(int, said["shape"]), int(said["blocksize"])
            nested = said.get("nested_blocksize")
            state = QuantState(
                rows, columns, block, None if nested is None else int(nested), float(said.get("nested_offset", 0))
            )
            if min(rows, columns, block, state.nested_block or 1) < 1:
                raise ValueError(f"shape {rows} x {columns}, blocks of {block}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptModel(f"{name} cannot be read.", f"{type(error).__name__}: {error}.") from error
        return state


def _chosen(flat: Tensor, part: StoredPart, state: QuantState, weights: int) -> Tensor:
    """Return a part's rows and columns of a flat tensor that has one value for each `weights` weights."""
    columns = range(state.columns) if part.columns is None else part.columns
    own = flat.reshape(state.rows, -1)[:, columns.start // weights : columns.stop // weights]
    return own if part.order is None else own[part.order.cpu()]


def _group(state: QuantState) -> int:
    """Return the block size as the kernel's group size. ValueError if the kernel does not support it."""
    if state.block not in (32, 64) and state.block % 128:
        raise ValueError(f"blocks of {state.block} weights: only 32, 64 and multiples of 128 are supported")
    return state.block


class LlmInt8(BlockFormat):
    stored_by_outputs = False
    notes = ("LLM.int8 runs with all activations in 16 bits: outlier columns are not treated separately.",)

    @property
    def name(self) -> str:
        return "bitsandbytes LLM.int8, per output"

    @property
    def runs_as(self) -> str:
        return "int8"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        return "int8" if f"{stem}.SCB" in checkpoint.tensors else None

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return shape_of(checkpoint, f"{stem}.weight")

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return present(checkpoint, stem, ("weight", "SCB", "weight_format"))

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        check_tensor(checkpoint, f"{stem}.weight", ["I8"])
        check_tensor(checkpoint, f"{stem}.SCB", ["F32"], (self.shape(checkpoint, stem)[0],))

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"weight": "NK", "SCB": "N"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return 1, 1

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> QuantizedWeight:
        order = f"{stem}.weight_format"
        if order in checkpoint.tensors and int(stored(checkpoint, order)) != 0:
            raise refuse(
                f"{stem} is stored in a GPU-specific tile layout.", "Supported: LLM.int8 weights stored by rows."
            )
        scales = load_scales(checkpoint, f"{stem}.SCB", device) / INT8_TOP
        return Int8Weight(load_copy(checkpoint, f"{stem}.weight", device), scales)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        return meta_int8(shape)
