"""Shared code of the safetensors formats: find a matrix's tensors, check them, join matrices.

A format only implements how a part of one matrix is read (`_part`) and its empty form on `meta` (`_meta_matrix`); the
rest of a `LinearFormat` follows from these two.
Does not know: any format, how a part is found in the tensors (blocks.py).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.stored_blocks import GGUFBlocks, joined_blocks
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.linear import StackedWeight
from localllm.kernels.planar.layout import pack_words, padded_columns
from localllm.kernels.planar.linear import PlanarWeight, stack_rows
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, TensorInfo
from localllm.models.formats.fp8_rows import joinable, piece_heights, stacked_fp8, take_block_rows
from localllm.models.formats.linear_format import StoredPart

T = TypeVar("T")
CPU = torch.device("cpu")
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class MatrixFormat(ABC):
    """A `LinearFormat` built from how one matrix is stored."""

    notes: Sequence[str] = ()
    stored_by_outputs = True  # packed tensors keep their shape even where the plain matrix would be [inputs, outputs]

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def runs_as(self) -> str: ...

    @abstractmethod
    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None: ...

    @abstractmethod
    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]: ...

    @abstractmethod
    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]: ...

    @abstractmethod
    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        """Raise `CorruptModel` unless the tensors' types and shapes fit each other and the config."""

    @abstractmethod
    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None: ...

    @abstractmethod
    def _part(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> QuantizedWeight:
        """Return the requested rows and columns of a matrix, already checked."""

    @abstractmethod
    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight of that shape on `meta`, as `_part` would read it."""

    def notes_on(self, device: str) -> Sequence[str]:
        return self.notes

    def ignores(self, name: str) -> bool:
        return False

    def check_present(self, checkpoint: Checkpoint) -> None:
        """Raise `CorruptModel` unless at least one matrix is stored as the config says."""
        stems = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors)
        if all(self.kind(checkpoint, stem) is None for stem in stems):
            raise CorruptModel(
                f"config.json says that this checkpoint is {self.name}, but none of its matrices is.",
                f"Its {len(checkpoint.tensors)} tensors are called {', '.join(sorted(checkpoint.tensors)[:3])}, ...",
                "Remove quantization_config if the weights are not quantised, or download the model again.",
            )

    def read(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> QuantizedWeight:
        self._check_parts(checkpoint, parts)
        return stacked([self._part(checkpoint, part, device) for part in parts], parts)

    def read_meta(
        self, checkpoint: Checkpoint, parts: Sequence[StoredPart], device: torch.device, dtype: torch.dtype
    ) -> QuantizedWeight:
        self._check_parts(checkpoint, parts)
        stem, columns = parts[0].stem, self._num_columns(checkpoint, parts[0])
        rows = [self.shape(checkpoint, part.stem)[0] if part.order is None else len(part.order) for part in parts]
        # Not per part: torch.cat on `meta` takes seconds the first time.
        whole = naming_matrix(stem, lambda: self._meta_matrix(checkpoint, stem, (sum(rows), columns)))
        if not isinstance(whole, Fp8Weight) or not whole.in_blocks:
            return whole
        heights = [height for part, count in zip(parts, rows, strict=True) for height in piece_heights(part, count)]
        each = [self._meta_matrix(checkpoint, stem, (sum(group), columns)) for group in joinable(heights)]
        return each[0] if len(each) == 1 else StackedWeight(each)

    def dequantize(self, checkpoint: Checkpoint, stem: str) -> Tensor:
        self._check(checkpoint, stem)
        return self._part(checkpoint, StoredPart(stem), CPU).dequantize(torch.float32)

    def _check_parts(self, checkpoint: Checkpoint, parts: Sequence[StoredPart]) -> None:
        for part in parts:
            self._check(checkpoint, part.stem)
            if part.transposed and not self.stored_by_outputs:
                raise refuse(f"{part.stem} is quantised as [inputs, outputs].", "Supported: [outputs, inputs].")
        columns = {part.stem: self._num_columns(checkpoint, part) for part in parts}
        if len(set(columns.values())) > 1:
            raise CorruptModel(
                "Matrices that one layer reads together have different numbers of inputs.",
                f"{', '.join(f'{stem}: {count}' for stem, count in columns.items())}.",
            )

    def _num_columns(self, checkpoint: Checkpoint, part: StoredPart) -> int:
        return self.shape(checkpoint, part.stem)[1] if part.columns is None else len(part.columns)


class FormatByMatrix(MatrixFormat):
    """A `MatrixFormat` whose matrices are each stored in one of several others."""

    stored_by_outputs = False

    @abstractmethod
    def _of(self, checkpoint: Checkpoint, stem: str) -> MatrixFormat:
        """Return the format of a matrix."""

    def kind(self, checkpoint: Checkpoint, stem: str) -> Hashable | None:
        return self._of(checkpoint, stem).kind(checkpoint, stem)

    def shape(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        return self._of(checkpoint, stem).shape(checkpoint, stem)

    def tensors(self, checkpoint: Checkpoint, stem: str) -> Sequence[str]:
        return self._of(checkpoint, stem).tensors(checkpoint, stem)

    def _check(self, checkpoint: Checkpoint, stem: str) -> None:
        self._of(checkpoint, stem)._check(checkpoint, stem)

    def widened(self, checkpoint: Checkpoint, stem: str, columns: range) -> range | None:
        return self._of(checkpoint, stem).widened(checkpoint, stem, columns)

    def _part(self, checkpoint: Checkpoint, part: StoredPart, device: torch.device) -> QuantizedWeight:
        return self._of(checkpoint, part.stem)._part(checkpoint, part, device)

    def _meta_matrix(self, checkpoint: Checkpoint, stem: str, shape: tuple[int, int]) -> QuantizedWeight:
        return self._of(checkpoint, stem)._meta_matrix(checkpoint, stem, shape)


# ---- matrices --------------------------------------------------------------------------------------------------------


def stacked(weights: Sequence[QuantizedWeight], parts: Sequence[StoredPart]) -> QuantizedWeight:
    """Stack all rows into one matrix, or a `StackedWeight` if the rows of scale blocks cross parts."""
    if len(weights) == 1:
        return weights[0]
    weights = [part for weight in weights for part in _parts_of(weight)]
    if all(isinstance(weight, PlanarWeight) for weight in weights):
        return naming_matrix(
            " + ".join(part.stem for part in parts),
            lambda: stack_rows([w for w in weights if isinstance(w, PlanarWeight)]),
        )
    if all(isinstance(weight, GGUFBlocks) for weight in weights):
        return joined_blocks([w for w in weights if isinstance(w, GGUFBlocks)])
    if all(isinstance(weight, Int8Weight) for weight in weights):
        return _stacked_int8([w for w in weights if isinstance(w, Int8Weight)])
    if all(isinstance(weight, Fp8Weight) for weight in weights):
        return stacked_fp8([w for w in weights if isinstance(w, Fp8Weight)])
    return StackedWeight(weights)


def _parts_of(weight: QuantizedWeight) -> Sequence[QuantizedWeight]:
    """Return the parts of a matrix whose rows are in several; they are all quantised."""
    if not isinstance(weight, StackedWeight):
        return [weight]
    return [part for part in weight.parts if not isinstance(part, Tensor)]


def _stacked_int8(weights: Sequence[Int8Weight]) -> Int8Weight:
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        weights[0],
        values=torch.cat([weight.values for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def take_rows(weight: QuantizedWeight, order: Tensor, stem: str) -> QuantizedWeight:
    """Choose rows: row i of the result is row order[i]."""
    if isinstance(weight, PlanarWeight):
        tensors = weight.tensors()
        chosen = {name: t[order] if name == "words" else t[:, order].contiguous() for name, t in tensors.items()}
        return replace(weight, **chosen)
    if isinstance(weight, Int8Weight):
        zeros = None if weight.zeros is None else weight.zeros[order]
        return replace(weight, values=weight.values[order], scales=weight.scales[order], zeros=zeros)
    if isinstance(weight, Fp8Weight) and not weight.in_blocks:
        values = weight.values.view(torch.uint8)[order].view(weight.values.dtype)
        return replace(weight, values=values, scales=weight.scales[order])
    assert isinstance(weight, Fp8Weight), type(weight).__name__
    return take_block_rows(weight, order, stem)


def table_weight(codes: Tensor, scales: Tensor, group: int, table: Sequence[float]) -> PlanarWeight:
    """Pack codes [N, K] uint8 below 16, whose values are in `table`, with scales [N, G]."""
    words = pack_words(codes, 4, min(32, group))
    return _table_weight(words, scales.t(), codes.shape[1], group, table)


def meta_table_weight(
    rows: int, columns: int, group: int, scale_type: torch.dtype, table: Sequence[float]
) -> PlanarWeight:
    """Return `table_weight`'s result on `meta`."""
    words = torch.empty((rows, padded_columns(columns, 4, min(32, group)) // 4), dtype=torch.int16, device="meta")
    scales = torch.empty((-(-columns // group), rows), dtype=scale_type, device="meta")
    return _table_weight(words, scales, columns, group, table)


def _table_weight(words: Tensor, scales: Tensor, columns: int, group: int, table: Sequence[float]) -> PlanarWeight:
    """Build the weight from scales [G, N], padded for the groups of the last chunk."""
    lanes = min(32, group)
    num_groups = -(-padded_columns(columns, 4, lanes) // group)
    filled = F.pad(scales, (0, 0, 0, num_groups - scales.shape[0])).contiguous()
    return PlanarWeight(words, filled, columns, bits=4, lanes=lanes, group=group, zero=0, table=tuple(table))


def with_zeros(weight: Int4Weight) -> Int4Weight:
    """Add zero points to every group even if all are the middle and were omitted, so that parts are alike."""
    if weight.zeros is not None:
        return weight
    middle = weight.zero if weight.bits == 4 else 128
    return replace(weight, zeros=torch.full_like(weight.scales, middle, dtype=torch.uint8))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def info(checkpoint: Checkpoint, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        raise CorruptModel(f"The checkpoint in {checkpoint.path} lacks {name}.", hint="Download the model again.")
    return checkpoint.tensors[name]


def check_tensor(checkpoint: Checkpoint, name: str, types: Sequence[str], *shapes: tuple[int, ...]) -> None:
    """Raise `CorruptModel` unless the tensor has one of these types and one of these shapes."""
    found = info(checkpoint, name)
    if found.dtype not in types:
        raise CorruptModel(f"{name} is stored as {found.dtype}.", f"It should be {' or '.join(types)}.")
    if shapes and found.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CorruptModel(
            f"{name} has shape {list(found.shape)}.", f"With its config and its other tensors it should be {wanted}."
        )


def check_rank(checkpoint: Checkpoint, name: str, rank: int) -> None:
    shape = info(checkpoint, name).shape
    if len(shape) != rank or 0 in shape:
        raise CorruptModel(f"{name} has shape {list(shape)}.", f"It should have {rank} dimensions, none of them 0.")


def shape_of(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Return the shape of a tensor with two dimensions."""
    check_rank(checkpoint, name, 2)
    rows, columns = info(checkpoint, name).shape
    return rows, columns


def present(checkpoint: Checkpoint, stem: str, endings: Sequence[str]) -> list[str]:
    """Return the names of those tensors that exist."""
    return [name for ending in endings if (name := f"{stem}.{ending}") in checkpoint.tensors]


def num_groups(columns: int, group: int, stem: str) -> int:
    if group != -1 and (group < 1 or columns % group):
        raise CorruptModel(f"{stem} has {columns} inputs.", f"They do not divide into groups of {group}.")
    return 1 if group == -1 else columns // group


def stored(checkpoint: Checkpoint, name: str, device: torch.device = CPU) -> Tensor:
    """Return the tensor as stored; on the CPU a temporary view of the file."""
    with torch.device("cpu"):  # the caller may have `meta` as its default device
        tensor = checkpoint.tensor(name)
    return tensor.to(device)


def load_copy(checkpoint: Checkpoint, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy that outlives the checkpoint file."""
    tensor = stored(checkpoint, name)
    return tensor.to(device, tensor.dtype if dtype is None else dtype, copy=True).contiguous()


def load_scales(checkpoint: Checkpoint, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return finite(load_copy(checkpoint, name, device, dtype), name)


def finite(scales: Tensor, name: str) -> Tensor:
    """Return the scales; `CorruptModel` unless all of them are finite."""
    if not bool(torch.isfinite(scales.float()).all()):
        raise CorruptModel(f"{name} contains NaN or infinite scales.", hint="Download the model again.")
    return scales


def scale_type(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """Return the 16-bit type for scales: as stored, fp16 for fp32."""
    found = TYPES[info(checkpoint, name).dtype]
    return torch.float16 if found == torch.float32 else found


SCALE_TYPES = tuple(FLOATS)


def naming_matrix(what: str, make: Callable[[], T]) -> T:
    """Call `make`, and translate a kernel's ValueError into an error that names the matrix."""
    try:
        return make()
    except ValueError as error:
        raise UnsupportedModel(
            f"{what} has a stored form that is not supported.", f"{error}.", "Use another quantisation of the model."
        ) from error


# ---- the config ------------------------------------------------------------------------------------------------------


def whole_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptModel(f"quantization_config has {name} = {value!r}.", "It must be a whole number.")
    return value


def group_size(value: object) -> int:
    """Parse a group size; -1: one group per row."""
    group = whole_number("group_size", value)
    if group < 1 and group != -1:
        raise CorruptModel(
            f"quantization_config has group_size = {group}.", "It must be above 0, or -1 for whole rows."
        )
    return group


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is a scale of the KV cache: self_attn.k_scale, self_attn.k_proj.k_scale, ..."""
    return re.search(r"\.(k|v|kv|q|prob)_(scale|zero_point)$", name) is not None


def refuse(what: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(what, why, "Use another quantisation, or the unquantised repository, of the same model.")


def groups_in_words(group: int) -> str:
    return "one group per row" if group == -1 else f"groups of {group}"
