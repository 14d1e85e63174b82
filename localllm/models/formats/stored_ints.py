"""Matrices of integers as compressed-tensors stores them: two's complement, with scales per group, output or tensor.

    packed    {stem}.weight_packed int32 [N, K * bits / 32], low bits first, each code plus the middle
              weight_scale [N, G], weight_zero_point int32 [N * bits / 32, G] packed likewise, weight_g_idx [K]
    plain     {stem}.weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G]

8 bits with one scale per output become an `Int8Weight`, everything else packed groups.
Does not know: the config (compressed_tensors.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.int4_linear import Int4Weight, meta_int4, pack_int4, unpack_words32
from localllm.kernels.int8_linear import Activations, Int8Weight
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.blocks import BlockFormat
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.gptq import groups_of_inputs, meta_order, order_digest, words_of
from localllm.models.formats.matrices import (
    SCALE_TYPES,
    check_tensor,
    groups_in_words,
    info,
    load_copy,
    load_scales,
    num_groups,
    present,
    scale_type,
    shape_of,
    stored,
    with_zeros,
)


@dataclass(frozen=True, slots=True)
class Ints:
    """Quantisation parameters of one matrix."""

    bits: int  # 2, 4 or 8
    group: int  # -1: one scale per output
    per_tensor: bool  # one scale for all
    symmetric: bool
    activations: Activations  # dynamic: x may be int8 too

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


class PackedInts(BlockFormat):
    stored_by_outputs = False

    def __init__(self, ints: Ints) -> None:
        self.ints = ints

    @property
    def name(self) -> str:
        return f"{self.ints.bits} bits, {groups_in_words(self.ints.group)}"

    @property
    def runs_as(self) -> str:
        return "int8 in groups" if self.ints.bits == 8 else "packed int4"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        if f"{stem}.weight_packed" not in checkpoint.tensors:
            return None
        scales = info(checkpoint, f"{stem}.weight_scale").dtype
        return "packed", self.ints, scales, self._digest(checkpoint, stem)

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        rows, words = shape_of(checkpoint, f"{stem}.weight_packed")
        return rows, words * 32 // self.ints.bits

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        endings = ("packed", "scale", "zero_point", "shape", "g_idx")
        return present(checkpoint, stem, [f"weight_{ending}" for ending in endings] + INPUT_ENDINGS)

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        rows, columns = self.shape(checkpoint, stem)
        check_tensor(checkpoint, f"{stem}.weight_packed", ["I32"])
        check_tensor(checkpoint, f"{stem}.weight_shape", ["I64", "I32"], (2,))
        groups = check_scales(checkpoint, stem, self.ints, rows, columns)
        if not self.ints.symmetric:
            packed = -(-rows * self.ints.bits // 32)
            check_tensor(checkpoint, f"{stem}.weight_zero_point", ["I32"], (packed, groups))
        if f"{stem}.weight_g_idx" in checkpoint.tensors:
            check_tensor(checkpoint, f"{stem}.weight_g_idx", ["I32", "I64"], (columns,))

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        return super().widened(checkpoint, stem, columns) if self._digest(checkpoint, stem) is None else None

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"weight_packed": "NK", "weight_scale": "NK", "weight_zero_point": "NK", "weight_g_idx": "K"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        word, group = words_of(self.ints.bits), self.ints.group
        return 1 if self.ints.symmetric else word, word if group == -1 else lcm(word, group)

    def _cut(self, checkpoint: Checkpoint, stem: str, rows: range, columns: range) -> Checkpoint:
        meant, held = stored(checkpoint, f"{stem}.weight_shape").tolist(), list(self.shape(checkpoint, stem))
        if meant != held:
            raise CorruptModel(f"{stem}.weight_shape says {meant}.", f"{stem}.weight_packed holds {held}.")
        return super()._cut(checkpoint, stem, rows, columns)

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> Int4Weight:
        rows, _ = self.shape(checkpoint, stem)
        scales = group_scales(checkpoint, stem, self.ints, rows, device)
        zeros = None
        if not self.ints.symmetric:
            packed = stored(checkpoint, f"{stem}.weight_zero_point", device).t().contiguous()
            zeros = unpack_words32(packed, self.ints.bits)[:, :rows].to(torch.int16)
        g_idx = None
        if self._digest(checkpoint, stem) is not None:
            g_idx = groups_of_inputs(checkpoint, f"{stem}.weight_g_idx", self.ints.group, device)
        codes = unpack_words32(stored(checkpoint, f"{stem}.weight_packed", device), self.ints.bits)
        weight = pack_int4(codes, scales, zeros, self.ints.group, self.ints.bits, g_idx)
        return weight if self.ints.symmetric else with_zeros(weight)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> Int4Weight:
        order = None if self._digest(checkpoint, stem) is None else meta_order(shape[1])
        return meta_groups(checkpoint, stem, self.ints, shape, order)

    def _digest(self, checkpoint: Checkpoint, stem: str) -> bytes | None:
        name = f"{stem}.weight_g_idx"
        if name not in checkpoint.tensors or self.ints.group == -1:
            return None
        check_tensor(checkpoint, name, ["I32", "I64"])
        if bool((stored(checkpoint, name) == -1).all()):  # the tool's marker for inputs in order
            return None
        return order_digest(checkpoint, name, self.ints.group)


class PlainInts(BlockFormat):
    stored_by_outputs = False

    def __init__(self, ints: Ints) -> None:
        self.ints = ints

    @property
    def name(self) -> str:
        scales = "per tensor" if self.ints.per_tensor else "per output"
        return f"int{self.ints.bits}, {scales if self.ints.group == -1 else groups_in_words(self.ints.group)}"

    @property
    def runs_as(self) -> str:
        return "int8" if self._per_output else "int8 in groups" if self.ints.bits == 8 else "packed int4"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        weight = checkpoint.tensors.get(f"{stem}.weight")
        if weight is None or weight.dtype != "I8":
            return None
        return "plain", self.ints, info(checkpoint, f"{stem}.weight_scale").dtype

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return shape_of(checkpoint, f"{stem}.weight")

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return present(checkpoint, stem, ["weight", "weight_scale", "weight_zero_point", *INPUT_ENDINGS])

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        rows, columns = self.shape(checkpoint, stem)
        check_tensor(checkpoint, f"{stem}.weight", ["I8"])
        groups = check_scales(checkpoint, stem, self.ints, rows, columns)
        if not self.ints.symmetric:
            shapes = ((1,), ()) if self.ints.per_tensor else ((rows, groups),) + (((rows,),) if groups == 1 else ())
            check_tensor(checkpoint, f"{stem}.weight_zero_point", ["I8"], *shapes)

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"weight": "NK", "weight_scale": "NK", "weight_zero_point": "NK"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return 1, 1 if self.ints.group == -1 else self.ints.group

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> QuantizedWeight:
        rows, _ = self.shape(checkpoint, stem)
        zeros = None if self.ints.symmetric else load_copy(checkpoint, f"{stem}.weight_zero_point", device)
        if zeros is not None and self.ints.per_tensor:
            zeros = zeros.reshape(1).expand(rows).contiguous()
        if self._per_output:
            scales = group_scales(checkpoint, stem, self.ints, rows, device)[0].float()
            values = load_copy(checkpoint, f"{stem}.weight", device)
            return Int8Weight(values, scales, None if zeros is None else zeros.reshape(-1), self.ints.activations)
        values = stored(checkpoint, f"{stem}.weight", device)
        if self.ints.bits < 8 and (int(values.min()) < -self.ints.middle or int(values.max()) >= self.ints.middle):
            raise CorruptModel(
                f"{stem}.weight holds {int(values.min())} to {int(values.max())}.",
                f"{self.ints.bits} bits reach from {-self.ints.middle} to {self.ints.middle - 1}.",
            )
        scales = group_scales(checkpoint, stem, self.ints, rows, device)
        above = None if zeros is None else (zeros.view(rows, -1).t().to(torch.int16) + self.ints.middle)
        codes = (values.to(torch.int16) + self.ints.middle).to(torch.uint8)
        weight = pack_int4(codes, scales, above, self.ints.group, self.ints.bits)
        return weight if zeros is None else with_zeros(weight)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        if not self._per_output:
            return meta_groups(checkpoint, stem, self.ints, shape, None)
        return meta_int8(shape, zeros=not self.ints.symmetric, activations=self.ints.activations)

    @property
    def _per_output(self) -> bool:
        return self.ints.bits == 8 and self.ints.group == -1


INPUT_ENDINGS = ["input_scale", "input_zero_point"]


def check_scales(checkpoint: Checkpoint, stem: str, ints: Ints, rows: int, columns: int) -> int:
    """Check the scales' shape; return the number of groups in a row."""
    groups = num_groups(columns, ints.group, stem)
    shapes = ((), (1,), (1, 1)) if ints.per_tensor else ((rows, groups),) + (((rows,),) if groups == 1 else ())
    check_tensor(checkpoint, f"{stem}.weight_scale", SCALE_TYPES, *shapes)
    return groups


def group_scales(checkpoint: Checkpoint, stem: str, ints: Ints, rows: int, device: torch.device) -> Tensor:
    """Return the scales [G, N] as stored."""
    scales = load_scales(checkpoint, f"{stem}.weight_scale", device)
    return (scales.reshape(1, 1).expand(rows, 1) if ints.per_tensor else scales.view(rows, -1)).t()


def meta_groups(
    checkpoint: Checkpoint, stem: str, ints: Ints, shape: tuple[int, int], order: Tensor | None
) -> Int4Weight:
    dtype = scale_type(checkpoint, f"{stem}.weight_scale")
    return meta_int4(shape, ints.group, dtype, bits=ints.bits, zeros=not ints.symmetric, input_order=order)


def meta_int8(shape: tuple[int, int], *, zeros: bool = False, activations: Activations = "16-bit") -> Int8Weight:
    values = torch.empty(shape, dtype=torch.int8, device="meta")
    scales = torch.empty(shape[0], dtype=torch.float32, device="meta")
    zero_points = torch.empty(shape[0], dtype=torch.int8, device="meta") if zeros else None
    return Int8Weight(values, scales, zero_points, activations)
