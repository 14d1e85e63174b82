"""compressed-tensors, the format of llm-compressor, and NVIDIA Model Optimizer's, which stores matrices alike.

A group of modules has one scheme; tensor names show its form.

    weight_packed int32              2, 4, 8 bits (W4A16, W8A16)         stored_ints.py
    weight int8                      int8, int4 (W8A8, W4A8)             stored_ints.py
    weight e4m3                      FP8 per tensor, output, block; MXFP8  fp8.py
    weight_packed uint8              NVFP4, MXFP4                        fp4.py

A group's `targets` (a class, a name, or "re:" and a pattern) decide how the integers and scales of its modules are
read. Matrices that are stored unquantised are read as they are, whatever `ignore` says.

Model Optimizer's checkpoints are FP8 per tensor, MXFP8 or NVFP4. The method is in config.json's quantization_config, or
in hf_quant_config.json. Unquantised matrices stay so.

    FP8      {stem}.weight e4m3, weight_scale, input_scale                        fp8.py
    MXFP8    {stem}.weight e4m3, weight_scale uint8                               fp8.py
    NVFP4    {stem}.weight uint8, weight_scale e4m3, weight_scale_2, input_scale  fp4.py

Does not know: kernels.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import CorruptModel
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.fp4 import Fp4, Fp4Names
from localllm.models.formats.fp8 import MXFP8, MXFP8_NOTE, Fp8, block_size, mxfp8
from localllm.models.formats.matrices import FormatByMatrix, MatrixFormat, group_size, is_kv_scale, refuse, whole_number
from localllm.models.formats.stored_ints import Ints, PackedInts, PlainInts

FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
NVFP4 = Fp4Names("weight_packed", "weight_scale", "weight_global_scale", divides=True)
MXFP4 = Fp4Names("weight_packed", "weight_scale", None)


@dataclass(frozen=True, slots=True)
class QuantGroup:
    """The modules of a group, and the formats of their matrices."""

    targets: tuple[str, ...]
    matrices: tuple[MatrixFormat, ...]
    notes: tuple[str, ...]

    @property
    def means_a_class(self) -> bool:
        """Return whether a target is a class, such as Linear: it stands for all modules that no other group names."""
        return any(not target.startswith("re:") and "." not in target for target in self.targets)

    def names(self, stem: str) -> bool:
        """Return whether a target is this module's name, or a pattern that matches it."""
        return any(
            re.match(target[3:], stem) is not None if target.startswith("re:") else target == stem
            for target in self.targets
        )


def compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key) or {}
        if isinstance(value, Mapping) and value.get("format", "dense") == "dense" and not value.get("config_groups"):
            continue
        raise refuse(
            f"This checkpoint's quantization_config has a {key}.", "Only dense, untransformed weights are supported."
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CorruptModel("quantization_config says compressed-tensors and has no config_groups.")
    notes = kv_note(config.get("kv_cache_scheme"))
    return CompressedTensors([_group(group, config) for group in groups.values()], notes)


def kv_note(scheme: object) -> tuple[str, ...]:
    if not scheme:
        return ()
    return ("The checkpoint's scales for an 8-bit KV cache are ignored: the cache uses its own scales, or 16 bits.",)


def _group(group: Mapping[str, Any], config: Mapping[str, Any]) -> QuantGroup:
    layout, weights = group.get("format") or config.get("format"), group.get("weights")
    targets = group.get("targets")
    if layout not in FORMATS:
        raise refuse(f"This checkpoint is compressed-tensors in format {layout}.", f"Supported: {', '.join(FORMATS)}.")
    if not isinstance(weights, Mapping) or not isinstance(targets, list | tuple):
        raise refuse(
            "This checkpoint quantises activations only, or names no targets.", "Supported: quantised weights."
        )
    _check_patterns(targets)
    bits, inputs = whole_number("num_bits", weights.get("num_bits")), group.get("input_activations")
    if weights.get("type", "int") == "int":
        ints, notes = _ints(bits, weights, inputs)
        return QuantGroup(tuple(targets), (PackedInts(ints), PlainInts(ints)), notes)
    if bits == 4:
        notes = ("Activations stay in 16 bits, although the checkpoint allows 4 bits.",) if inputs else ()
        return QuantGroup(tuple(targets), (Fp4(MXFP4 if weights.get("group_size") == 32 else NVFP4),), notes)
    if bits == 8 and weights.get("strategy") == "group" and weights.get("group_size") == MXFP8[1]:
        matrices = mxfp8({}) if inputs else Fp8("MXFP8", "16-bit", MXFP8)
        return QuantGroup(tuple(targets), (matrices,), tuple(matrices.notes))
    if bits != 8 or weights.get("strategy") not in ("tensor", "channel", "block"):
        raise refuse(
            f"This checkpoint has floats of {bits} bits with scales per {weights.get('strategy')}.",
            "Supported: FP8 per tensor, channel and block, MXFP8, NVFP4 and MXFP4.",
        )
    block = block_size(weights.get("block_structure")) if weights["strategy"] == "block" else None
    activations = "16-bit" if not inputs else "static" if not inputs.get("dynamic") else "dynamic"
    matrices = Fp8("FP8", activations, block)  # type: ignore[arg-type]
    return QuantGroup(tuple(targets), (matrices,), tuple(matrices.notes))


def _ints(bits: int, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[Ints, tuple[str, ...]]:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if bits not in (2, 4, 8) or strategy not in ("tensor", "channel", "group"):
        raise refuse(
            f"This checkpoint has integers of {bits} bits with scales per {strategy}.",
            "Supported: 2, 4 and 8 bits with scales per tensor, channel and group.",
        )
    group = group_size(weights.get("group_size")) if strategy == "group" else -1
    notes: tuple[str, ...] = ()
    activations = "16-bit"
    if inputs:
        activations = "dynamic" if bits == 8 and group == -1 and inputs.get("type", "int") == "int" else "16-bit"
        if activations == "16-bit":
            notes = (f"W{bits}A{inputs.get('num_bits', 8)} runs as W{bits}A16: activations stay in 16 bits.",)
        elif not inputs.get("dynamic") or not inputs.get("symmetric", True):
            notes = (
                "Activations are quantised with a symmetric scale per token instead of the checkpoint's static scales.",
            )
    symmetric = bool(weights.get("symmetric", True))
    return Ints(bits, group, strategy == "tensor", symmetric, activations), notes  # type: ignore[arg-type]


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, AttributeError) as error:
            raise CorruptModel(f"quantization_config's target {target!r} cannot be read.", f"{error}.") from error


class CompressedTensors(FormatByMatrix):
    """All matrices of the checkpoint, each with the scheme of its group."""

    def __init__(self, groups: Sequence[QuantGroup], notes: Sequence[str]) -> None:
        self.groups = groups
        self.notes = tuple(dict.fromkeys([*notes, *(note for group in groups for note in group.notes)]))
        self.has_kv_scales = bool(notes)

    @property
    def name(self) -> str:
        return "compressed-tensors: " + "; ".join(dict.fromkeys(group.matrices[0].name for group in self.groups))

    @property
    def runs_as(self) -> str:
        return ", ".join(dict.fromkeys(group.matrices[-1].runs_as for group in self.groups))

    def ignores(self, name: str) -> bool:
        return self.has_kv_scales and is_kv_scale(name)

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        if not any(f"{stem}.{ending}" in checkpoint.tensors for ending in ("weight_packed", "weight_scale")):
            return None
        return super().kind(checkpoint, stem)

    def _of(self, checkpoint: Checkpoint, stem: str) -> MatrixFormat:
        """Return the format of a matrix. A group that names it takes precedence over one that names a class."""
        named = [group for group in self.groups if group.names(stem)]
        for group in named or [group for group in self.groups if group.means_a_class]:
            for matrices in group.matrices:
                if matrices.kind(checkpoint, stem) is not None:
                    return matrices
        there = ", ".join(
            f"{name} ({info.dtype})" for name, info in checkpoint.tensors.items() if name.startswith(f"{stem}.")
        )
        raise CorruptModel(f"No group of quantization_config describes {stem}.", f"It is stored as {there}.")


_MODELOPT_NVFP4 = Fp4Names("weight", "weight_scale", "weight_scale_2")


def modelopt(config: Mapping[str, Any]) -> MatrixFormat:
    """Return the format of a checkpoint that NVIDIA Model Optimizer wrote."""
    algorithm = config.get("quant_algo")
    notes = kv_note(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))
    if algorithm == "FP8":
        return ModelOptFp8("Model Optimizer FP8", "static", None, notes)
    if algorithm == "MXFP8":
        return ModelOptFp8("Model Optimizer MXFP8", "16-bit", MXFP8, (MXFP8_NOTE, *notes))
    if algorithm == "NVFP4":
        return ModelOptFp4(notes)
    raise refuse(f"This checkpoint is Model Optimizer's {algorithm}.", "Supported: FP8, MXFP8 and NVFP4.")


class ModelOptFp8(Fp8):
    def ignores(self, name: str) -> bool:
        return any(note != MXFP8_NOTE for note in self.notes) and is_kv_scale(name)


class ModelOptFp4(Fp4):
    def __init__(self, notes: tuple[str, ...]) -> None:
        super().__init__(_MODELOPT_NVFP4)
        self.has_kv_scales = bool(notes)
        self.notes = ("Activations stay in 16 bits, although the checkpoint allows 4 bits.", *notes)

    @property
    def name(self) -> str:
        return "Model Optimizer NVFP4"

    def ignores(self, name: str) -> bool:
        return self.has_kv_scales and is_kv_scale(name)
