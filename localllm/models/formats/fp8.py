"""FP8 e4m3 checkpoints (Micikevicius et al. 2022, arXiv:2209.05433): one byte per weight, and scales.

    quant_method   weight                 scale                                             static input scale
    fp8            {stem}.weight e4m3     weight_scale_inv, per 128 x 128 block; or         input_scale or
                                          weight_scale, per tensor or output; scale         activation_scale
                                          (DeepSeek V4) or qscale_weight (Mistral)
    fbgemm_fp8     the same               weight_scale, per output
    modelopt FP8   the same               weight_scale, per tensor                          input_scale
    mxfp8, fp8     the same               the same names uint8 or e8m0, for each 32 inputs: exponents, plus 127

w = weight * scale, even if the scale is called "inv". Matrices that are stored unquantised stay so. MXFP8 (OCP
Microscaling Formats, 2023) is also one of compressed-tensors' and Model Optimizer's schemes. With expert_dtype = fp4
(DeepSeek V4) the experts are MXFP4 beside them: {stem}.weight int8 [N, K / 2], two weights per byte, and a power of two
for each 32 weights.
Does not know: how matrices are multiplied (kernels/fp8_linear.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.quantized_weight import SCALE_BLOCK, SCALE_GROUP
from localllm.models.formats.blocks import BlockFormat
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.fp4 import PACKED, Fp4, Fp4Names
from localllm.models.formats.matrices import (
    FormatByMatrix,
    MatrixFormat,
    check_tensor,
    load_copy,
    load_scales,
    present,
    refuse,
    shape_of,
)

E4M3 = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
ENDINGS = ("weight", *SCALES, "input_scale", "activation_scale", "qscale_act", "input_scale_ub", "weight_zero_point",
           "input_zero_point")  # fmt: skip
POWERS = ("U8", "F8_E8M0")
MXFP8 = (1, SCALE_GROUP)
MXFP8_NOTE = "Activations stay in 16 bits, although the checkpoint allows 8 bits."
Activations = Literal["dynamic", "static", "16-bit"]


def fp8(config: Mapping[str, Any]) -> MatrixFormat:
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise refuse(f"This FP8 checkpoint has the activation_scheme {scheme!r}.", "Supported: dynamic and static.")
    if config.get("fmt", "e4m3") != "e4m3":
        raise refuse(f"This checkpoint is FP8 in {config['fmt']}.", "Supported: e4m3.")
    block, experts = config.get("weight_block_size"), config.get("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4"):
        raise refuse(f"This checkpoint is FP8 with an expert_dtype of {experts!r}.", "Supported: fp8 and fp4.")
    matrices = mxfp8(config) if _is_mxfp8(block) else Fp8("FP8", scheme, None if block is None else block_size(block))
    return matrices if experts == "fp8" else Fp8AndFp4(matrices)


def mxfp8(config: Mapping[str, Any], notes: Sequence[str] = ()) -> Fp8:
    """Return the format. Fields like ignored_layers are not needed: the tensors' types show the same."""
    block = config.get("weight_block_size", MXFP8)
    if not _is_mxfp8(block):
        raise refuse(f"This checkpoint is MXFP8 with weight_block_size = {block!r}.", "Supported: [1, 32].")
    return Fp8("MXFP8", "16-bit", MXFP8, (MXFP8_NOTE, *notes))


def _is_mxfp8(block: object) -> bool:
    return isinstance(block, list | tuple) and tuple(block) == MXFP8


def fbgemm_fp8(config: Mapping[str, Any]) -> Fp8:
    """Return the format. activation_scale_ub, an upper bound of x's scale, is ignored: it only clips values."""
    bound = config.get("activation_scale_ub")
    note = f"activation_scale_ub = {bound} is not applied: activations are not clipped."
    return Fp8("FBGEMM FP8", "dynamic", None, () if bound is None else (note,))


def block_size(value: object) -> tuple[int, int]:
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise CorruptModel(f"quantization_config has weight_block_size = {value!r}.", "It must be two whole numbers.")
    rows, columns = value
    if rows % SCALE_BLOCK or columns % SCALE_BLOCK:
        raise refuse(
            f"This checkpoint is FP8 with a scale for each {rows} x {columns} weights.",
            f"Supported: blocks of {SCALE_BLOCK} x {SCALE_BLOCK} and their multiples, and of 1 x {SCALE_GROUP}.",
        )
    return rows, columns


class Fp8(BlockFormat):
    stored_by_outputs = False

    def __init__(
        self, label: str, activations: Activations, block: tuple[int, int] | None, notes: Sequence[str] = ()
    ) -> None:
        self.label, self.activations, self.block = label, activations, block
        self.notes = notes
        if block is not None and activations == "static":
            self.notes = (
                *notes,
                "Activations get a scale per token: static scales are not supported together with block scales.",
            )

    @property
    def name(self) -> str:
        size = "" if self.block in (None, MXFP8) else f", blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.label}{size}, {self.activations} activations"

    @property
    def runs_as(self) -> str:
        return "fp8"

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        weight = checkpoint.tensors.get(f"{stem}.weight")
        if weight is None or not weight.dtype.startswith("F8"):
            return None
        return "fp8", self.block, self.activations

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return shape_of(checkpoint, f"{stem}.weight")

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return present(checkpoint, stem, ENDINGS)

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        check_tensor(checkpoint, f"{stem}.weight", [E4M3])
        check_fp8_scale(checkpoint, self._scale(checkpoint, stem), self.shape(checkpoint, stem), self.block)
        if self._is_static:
            check_tensor(checkpoint, self._input_scale(checkpoint, stem), SCALE_TYPES, (), (1,))

    @property
    def _axes(self) -> Mapping[str, str]:
        return {"weight": "NK", **dict.fromkeys(SCALES, "NK")}

    def _block(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return self.block or (1, 1)

    def _matrix(self, checkpoint: Checkpoint, stem: str, device: torch.device) -> Fp8Weight:
        shape = self.shape(checkpoint, stem)
        scales = fp8_scales(checkpoint, self._scale(checkpoint, stem), shape, self.block, device)
        static = None
        if self._is_static:
            static = load_scales(checkpoint, self._input_scale(checkpoint, stem), device, torch.float32).view(1)
        return fp8_weight(load_copy(checkpoint, f"{stem}.weight", device), scales, static, self._unmeasured)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> Fp8Weight:
        return meta_fp8(shape, self.block, static=self._is_static, activations=self._unmeasured)

    @property
    def _unmeasured(self) -> Activations:
        """Treatment of activations that have no static scale."""
        return "16-bit" if self.activations == "16-bit" else "dynamic"

    @property
    def _is_static(self) -> bool:
        return self.activations == "static" and self.block is None

    def _scale(self, checkpoint: Checkpoint, stem: str) -> str:
        wanted = f"{stem}.weight_scale" if self.block is None else f"{stem}.weight_scale_inv"
        return next(iter(present(checkpoint, stem, SCALES)), wanted)

    def _input_scale(self, checkpoint: Checkpoint, stem: str) -> str:
        return next(iter(present(checkpoint, stem, ("activation_scale", "qscale_act"))), f"{stem}.input_scale")


class Fp8AndFp4(FormatByMatrix):
    """FP8 matrices, and MXFP4 ones beside them."""

    def __init__(self, matrices: Fp8) -> None:
        self._fp8, self.notes = matrices, matrices.notes

    @property
    def name(self) -> str:
        return f"{self._fp8.name}; experts in MXFP4"

    @property
    def runs_as(self) -> str:
        return f"{self._fp8.runs_as}, packed fp4"

    def _of(self, checkpoint: Checkpoint, stem: str) -> MatrixFormat:
        weight = checkpoint.tensors.get(f"{stem}.weight")
        if weight is None or weight.dtype not in PACKED:
            return self._fp8
        scales = next(iter(present(checkpoint, stem, SCALES)), f"{stem}.scale")
        return Fp4(Fp4Names("weight", scales.rpartition(".")[2], None))


def check_fp8_scale(checkpoint: Checkpoint, name: str, shape: tuple[int, int], block: tuple[int, int] | None) -> None:
    rows, columns = shape
    if block is not None:
        types = POWERS if block == MXFP8 else SCALE_TYPES
        check_tensor(checkpoint, name, types, (-(-rows // block[0]), -(-columns // block[1])))
    else:
        check_tensor(checkpoint, name, SCALE_TYPES, (), (1,), (1, 1), (rows,), (rows, 1))


def fp8_scales(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], block: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return fp32 scales: [N], repeated if there is one per tensor; or one for each 128 x 128 block. Of MXFP8 the
    exponents, uint8 [N, ceil(K/32)]."""
    if block == MXFP8:
        powers = load_copy(checkpoint, name, device).view(torch.uint8)
        if bool((powers == 255).any()):
            raise CorruptModel(f"{name} contains NaN scales.", hint="Download the model again.")
        return powers
    scales = load_scales(checkpoint, name, device, torch.float32)
    if block is None:
        return scales.reshape(-1).expand(shape[0]).contiguous()
    for dim, (size, length) in enumerate(zip(block, shape, strict=True)):
        scales = scales.repeat_interleave(size // SCALE_BLOCK, dim).narrow(dim, 0, -(-length // SCALE_BLOCK))
    return scales.contiguous()


def fp8_weight(
    values: Tensor, scales: Tensor, static: Tensor | None, activations: Activations = "dynamic"
) -> Fp8Weight:
    return Fp8Weight(values, scales, activations if static is None else "static", static)


def meta_fp8(
    shape: tuple[int, int], block: tuple[int, int] | None, *, static: bool, activations: Activations = "dynamic"
) -> Fp8Weight:
    rows, columns = shape
    if block == MXFP8:
        scales = torch.empty((rows, -(-columns // SCALE_GROUP)), dtype=torch.uint8, device="meta")
    else:
        blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        scales = torch.empty((rows,) if block is None else blocks, device="meta")
    return fp8_weight(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"),
        scales,
        torch.empty(1, device="meta") if static else None,
        activations,
    )
