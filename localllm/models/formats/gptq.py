"""GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323) of 2, 3, 4 or 8 bits, as AutoGPTQ and GPTQModel write them.

    qweight [K * bits / 32, N] int32   low bits first; 3-bit codes cross word boundaries
    qzeros  [K / group, N * bits / 32] zero points minus one in format "gptq" (v1), unchanged in "gptq_v2"
    scales  [K / group, N]
    g_idx   [K] int32                  each input's group; unordered with desc_act

With desc_act the inputs of a matrix are sorted by group, and x with them. The parts of one layer may share that order
(then their `kind` is equal) or have different ones.
Does not know: kernels' layouts (kernels/int4_linear.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.int4_linear import Int4Weight, meta_int4, repack_gptq
from localllm.models.formats.blocks import BlockFormat
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.matrices import (
    CPU,
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
    whole_number,
    with_zeros,
)

BITS = (2, 3, 4, 8)
SETTINGS = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True, slots=True)
class Packing:
    """Quantisation parameters of one matrix."""

    bits: int
    group: int
    desc_act: bool
    sym: bool  # every zero point is the middle


def gptq(config: Mapping[str, Any]) -> Gptq:
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise refuse(f"This checkpoint is GPTQ in the {layout} layout.", "Supported: gptq and gptq_v2.")
    return Gptq(_packing(config), layout, _overrides(config))


def _packing(config: Mapping[str, Any]) -> Packing:
    bits = whole_number("bits", config.get("bits"))
    if bits not in BITS:
        raise refuse(f"This checkpoint is GPTQ with {bits} bits.", f"Supported: {', '.join(map(str, BITS))} bits.")
    return Packing(
        bits,
        group_size(config.get("group_size", -1)),
        bool(config.get("desc_act", False)),
        bool(config.get("sym", False)),
    )


def _overrides(config: Mapping[str, Any]) -> tuple[tuple[re.Pattern[str], Packing | None], ...]:
    """Parse GPTQModel's `dynamic`: name patterns with their own settings, or (after "-:") excluded."""
    found: list[tuple[re.Pattern[str], Packing | None]] = []
    for pattern, changes in (config.get("dynamic") or {}).items():
        skipped = pattern.startswith("-:")
        own = {name: changes[name] for name in SETTINGS if name in changes}
        try:
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise CorruptModel(f"quantization_config's pattern {pattern!r} cannot be read.", f"{error}.") from error
        found.append((compiled, None if skipped else _packing({**config, **own})))
    return tuple(found)


class Gptq(BlockFormat):
    def __init__(
        self, packing: Packing, layout: str, overrides: Sequence[tuple[re.Pattern[str], Packing | None]]
    ) -> None:
        self.packing, self.layout, self.overrides = packing, layout, overrides

    @property
    def name(self) -> str:
        extra = ", inputs by importance (desc_act)" if self.packing.desc_act else ""
        mixed = ", some matrices with other settings" if any(packing for _, packing in self.overrides) else ""
        return f"GPTQ, {self.packing.bits} bits, {groups_in_words(self.packing.group)}{extra}{mixed}"

    @property
    def runs_as(self) -> str:
        bits = self.packing.bits
        return "int8 in groups" if bits == 8 else "packed int4" + ("" if bits == 4 else f" ({bits} bits held in 4)")

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        if f"{stem}.qweight" not in checkpoint.tensors:
            return None
        return self._packing_of(stem), info(checkpoint, f"{stem}.scales").dtype, self._order_digest(checkpoint, stem)

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        words, rows = shape_of(checkpoint, f"{stem}.qweight")
        return rows, words * 32 // self._packing_of(stem).bits

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return present(checkpoint, stem, ("qweight", "qzeros", "scales", "g_idx"))

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        packing = self._packing_of(stem)
        rows, columns = self.shape(checkpoint, stem)
        groups = num_groups(columns, packing.group, stem)
        check_tensor(checkpoint, f"{stem}.qweight", ["I32"], (columns * packing.bits // 32, rows))
        check_tensor(checkpoint, f"{stem}.qzeros", ["I32"], (groups, rows * packing.bits // 32))
        check_tensor(checkpoint, f"{stem}.scales", SCALE_TYPES, (groups, rows))
        if f"{stem}.g_idx" in checkpoint.tensors or (packing.desc_act and packing.group != -1):
            check_tensor(checkpoint, f"{stem}.g_idx", ["I32", "I64"], (columns,))

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        return super().widened(checkpoint, stem, columns) if self._order_digest(checkpoint, stem) is None else None

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"qweight": "KN", "qzeros": "KN", "scales": "KN", "g_idx": "K"}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        packing = self._packing_of(stem)
        word = words_of(packing.bits)
        return word, word if packing.group == -1 else lcm(word, packing.group)

    def _cut(self, checkpoint: Checkpoint, stem: str, rows: range, columns: range) -> Checkpoint:
        name, group = f"{stem}.g_idx", self._packing_of(stem).group
        is_cut = len(columns) < self.shape(checkpoint, stem)[1]
        if is_cut and group != -1 and name in checkpoint.tensors and order_digest(checkpoint, name, group) is not None:
            raise _out_of_order(stem)
        return super()._cut(checkpoint, stem, rows, columns)

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> Int4Weight:
        packing = self._packing_of(stem)
        weight = repack_gptq(
            stored(checkpoint, f"{stem}.qweight", device),
            stored(checkpoint, f"{stem}.qzeros", device),
            load_scales(checkpoint, f"{stem}.scales", device),
            self._g_idx(checkpoint, stem, device),
            self.layout,
            packing.bits,
            packing.group,
        )
        if packing.sym and weight.zeros is not None:
            middle = 1 << (packing.bits - 1)
            found = int(weight.zeros[weight.zeros != weight.zero][0])
            raise CorruptModel(
                f"{stem}.qzeros holds zero points that are not {middle}: {found} for one.",
                f"config.json says sym, in checkpoint_format {self.layout}; one of the three is wrong.",
                "Use another quantisation of the same model.",
            )
        if weight.input_order is not None and not packing.desc_act:
            raise _out_of_order(stem)
        return weight if packing.sym else with_zeros(weight)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> Int4Weight:
        packing, columns = self._packing_of(stem), shape[1]
        return meta_int4(
            shape,
            packing.group,
            scale_type(checkpoint, f"{stem}.scales"),
            bits=packing.bits,
            zeros=not packing.sym,
            input_order=None if self._order_digest(checkpoint, stem) is None else meta_order(columns),
        )

    def _packing_of(self, stem: str) -> Packing:
        for pattern, packing in self.overrides:
            if pattern.match(stem):
                if packing is None:
                    raise CorruptModel(
                        f"{stem} is stored in GPTQ's format.",
                        f"config.json's dynamic excludes it from quantisation: {pattern.pattern!r}.",
                    )
                return packing
        return self.packing

    def _g_idx(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> Tensor | None:
        packing = self._packing_of(stem)
        if f"{stem}.g_idx" not in checkpoint.tensors or packing.group == -1:
            return None
        return groups_of_inputs(checkpoint, f"{stem}.g_idx", packing.group, device)

    def _order_digest(self, checkpoint: Checkpoint, stem: str) -> bytes | None:
        packing = self._packing_of(stem)
        if not packing.desc_act or packing.group == -1:
            return None
        return order_digest(checkpoint, f"{stem}.g_idx", packing.group)


def words_of(bits: int) -> int:
    """Return the number of codes in the fewest whole words of 32 bits."""
    return 32 // gcd(32, bits)


def _out_of_order(stem: str) -> CorruptModel:
    return CorruptModel(f"{stem}.g_idx is not in order.", "config.json says desc_act is false.")


def groups_of_inputs(checkpoint: Checkpoint, name: str, group: int, device: torch.device) -> Tensor:
    """Return each input's group [K]."""
    g_idx = stored(checkpoint, name, device)
    groups, least, most = g_idx.shape[0] // group, int(g_idx.min()), int(g_idx.max())
    if least < 0 or most >= groups:
        raise CorruptModel(f"{name} names the groups {least} to {most}.", f"There are {groups}, counted from 0.")
    return g_idx


def order_digest(checkpoint: Checkpoint, name: str, group: int) -> bytes | None:
    """Return a hash of the input order, equal for matrices that share it; None: inputs are in order."""
    check_tensor(checkpoint, name, ["I32", "I64"])
    g_idx = stored(checkpoint, name).int()
    num_groups(len(g_idx), group, name)
    if torch.equal(g_idx, torch.arange(len(g_idx), dtype=torch.int32, device=CPU) // group):
        return None
    return hashlib.blake2b(g_idx.numpy().tobytes(), digest_size=16).digest()


@cache
def meta_order(columns: int) -> Tensor:
    """Return an empty order on `meta`, the same object for all parts of one kind."""
    return torch.empty(columns, dtype=torch.int64, device="meta")
