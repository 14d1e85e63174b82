"""Where a builder's tensors come from: read from a checkpoint, or only promised by its headers.

Names are Llama's everywhere; `Storage` (architectures/family.py) says what the checkpoint calls a tensor and how its
rows are ordered, the checkpoint's `LinearFormat` how its matrices are stored.
Does not know: how the parts make a model (architectures/builder.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.quantized_weight import PromisedWeight
from localllm.kernels.stacked_weight import StackedWeight
from localllm.models.architectures.family import Storage
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, TensorInfo
from localllm.models.formats.linear_format import LinearFormat, Part
from localllm.models.layers.linear import Linear, Weight
from localllm.models.spec import ModelSpec

Progress = Callable[[int, int], None]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """What a builder asks for its tensors. Shapes are checked: what comes back has the shape that was asked for."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are: the model's device, or `meta` where only headers are read."""
        ...

    def has(self, name: str) -> bool: ...

    def take(self, names: Iterable[str], shape: tuple[int, ...], *, keep_narrow: bool = False) -> Tensor:
        """The named tensors one above the other, together of `shape`, in the model's type.

        keep_narrow: stay in the stored type where that is the smaller one.
        """
        ...

    def linear(
        self, stems: Sequence[str], shape: tuple[int, int], *, bias: bool = False, order: Tensor | None = None
    ) -> Linear:
        """The matrices `stem`.weight above one another as one layer, with the biases `stem`.bias.

        order [rows] int64: row i of the layer is row order[i] of the stacked matrices.
        """
        ...


class Weights:
    """The checkpoint's tensors as the builder asks for them: shaped, converted, counted. Nothing stays mapped."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        storage: Storage,
        format: LinearFormat | None,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self._checkpoint, self._spec, self._storage, self._format = checkpoint, spec, storage, format
        self._dtype, self._progress = dtype, progress
        self._stems = {name.rpartition(".")[0] for name in checkpoint.tensors}
        self._used: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = sum(info.num_bytes for n, info in checkpoint.tensors.items() if not self._is_ignored(n))

    def has(self, name: str) -> bool:
        return self._name(name) in self._checkpoint.tensors

    def take(self, names: Iterable[str], shape: tuple[int, ...], *, keep_narrow: bool = False) -> Tensor:
        stored = [self._name(name) for name in names]
        return self._plain([Part(name, None, self._is_transposed(name)) for name in stored], shape, keep_narrow)

    def linear(
        self, stems: Sequence[str], shape: tuple[int, int], *, bias: bool = False, order: Tensor | None = None
    ) -> Linear:
        parts = self._parts(stems, order)
        runs = [(kind, list(run)) for kind, run in groupby(parts, self._kind)]
        weights = [self._matrix(kind, run, shape) for kind, run in runs]
        weight = weights[0] if len(weights) == 1 else StackedWeight(weights)
        if tuple(weight.shape) != shape:
            raise _wrong_shape([part.stem for part in parts], weight.shape, shape)
        biases = self._plain([Part(f"{p.stem}.bias", p.order) for p in parts], shape[:1]) if bias else None
        return Linear(weight, biases)

    def check_all_used(self) -> None:
        """A tensor that nobody asked for would change the answers if it were dropped in silence."""
        left = [n for n in self._checkpoint.tensors if n not in self._used and not self._is_ignored(n)]
        if left:
            raise CorruptModel(
                f"The checkpoint holds {len(left)} tensors that {self._spec.architecture} does not use.",
                f"Unexpected: {_some(sorted(left))}.",
            )

    # -- matrices

    def _parts(self, stems: Sequence[str], order: Tensor | None) -> list[Part]:
        """The stored matrices that hold the rows of `stems`, with the rows that are wanted of each."""
        stems = list(stems)
        fused, stored_order = self._fused(stems)
        stored = [self._name(f"{stem}.weight").removesuffix(".weight") for stem in fused]
        transposed = [self._is_transposed(f"{stem}.weight") for stem in stored]
        if len(stored) == 1:
            if order is not None and stored_order is not None:
                order = stored_order[order]
            return [Part(stored[0], order if order is not None else stored_order, transposed[0])]
        if order is None:
            return [Part(stem, None, flag) for stem, flag in zip(stored, transposed, strict=True)]
        starts = [0]
        for stem in stored:
            starts.append(starts[-1] + self._rows_of(stem))
        slices = zip(stored, transposed, starts, starts[1:], strict=False)
        return [Part(stem, order[a:b] - a, flag) for stem, flag, a, b in slices]

    def _fused(self, stems: list[str]) -> tuple[list[str], Tensor | None]:
        """The stems under which a checkpoint that fuses them stores these, and where their rows are in it."""
        storage, spec = self._storage, self._spec
        prefix, _, first = stems[0].rpartition(".")
        if storage.fused_qkv and first == "q_proj" and len(stems) == 3:
            rows = storage.qkv_rows
            sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
            order = None if rows is None else torch.tensor(rows(*sizes), device="cpu")
            return [f"{prefix}.{storage.fused_qkv}"], order
        if storage.fused_gate_up and first == "gate_proj" and len(stems) == 2:
            return [f"{prefix}.{storage.fused_gate_up}"], None
        return stems, None

    def _kind(self, part: Part) -> object:
        return None if self._format is None else self._format.kind(self._checkpoint, part.stem)

    def _rows_of(self, stem: str) -> int:
        if self._format is not None and self._format.kind(self._checkpoint, stem) is not None:
            return self._format.shape(self._checkpoint, stem)[0]
        shape = self._info(f"{stem}.weight").shape
        return shape[-1] if self._is_transposed(f"{stem}.weight") else shape[0]

    def _matrix(self, kind: object, parts: list[Part], layer: tuple[int, int]) -> Weight:
        """The parts of one kind of a layer of shape `layer`; that their rows fill it is checked by the caller."""
        if kind is None:
            named = [Part(f"{part.stem}.weight", part.order, part.transposed) for part in parts]
            return self._plain(named, None, columns=layer[1])
        assert self._format is not None
        weight = self._format.read(self._checkpoint, parts, self.device, self._dtype)
        self._count([name for part in parts for name in self._format.tensors(self._checkpoint, part.stem)])
        return weight

    # -- plain tensors; here a part's stem is the whole stored name

    def _plain(
        self,
        parts: Sequence[Part],
        shape: tuple[int, ...] | None,
        keep_narrow: bool = False,
        *,
        columns: int | None = None,
    ) -> Tensor:
        """The parts above one another: of `shape`, or any number of rows of so many columns."""
        tensors = [self._stored(part) for part in parts]
        width = shape[1:] if shape is not None else (columns,)
        for part, tensor in zip(parts, tensors, strict=True):
            if tuple(tensor.shape[1:]) != width:
                raise _wrong_shape([part.stem], tensor.shape, shape or ("any", columns))
        got = (sum(tensor.shape[0] for tensor in tensors), *width)
        if shape is not None and got != shape:
            raise _wrong_shape([part.stem for part in parts], got, shape)
        narrow = keep_narrow and tensors[0].dtype.itemsize < self._dtype.itemsize
        dtype = tensors[0].dtype if narrow else self._dtype
        if len(tensors) == 1:
            whole = tensors[0].to(self.device, dtype, copy=True).contiguous()
        else:
            whole = torch.cat([tensor.to(self.device, dtype) for tensor in tensors])
        self._count([name for part in parts for name in self._names(part.stem)])
        return whole

    def _stored(self, part: Part) -> Tensor:
        info = self._info(part.stem)
        stem = part.stem.removesuffix(".weight")
        if self._format is not None and self._format.kind(self._checkpoint, stem) is not None:
            tensor = self._format.dequantize(self._checkpoint, stem)
        elif info.dtype in FLOATS:
            tensor = self._checkpoint.tensor(part.stem)
        else:
            raise UnsupportedModel(
                f"{part.stem} in {info.file.name} is stored as {info.dtype}.", f"Supported: {', '.join(FLOATS)}."
            )
        tensor = tensor.t() if part.transposed else tensor
        return tensor if part.order is None else tensor[part.order.to(tensor.device)]

    def _names(self, name: str) -> Sequence[str]:
        stem = name.removesuffix(".weight")
        if self._format is not None and self._format.kind(self._checkpoint, stem) is not None:
            return self._format.tensors(self._checkpoint, stem)
        return [name]

    def _name(self, name: str) -> str:
        """What the checkpoint calls it. A matrix may be stored as several tensors, so its stem counts too."""
        spellings = self._storage.spellings(self._storage.stored_name(name))
        there = self._checkpoint.tensors
        found = (each for each in spellings if each in there or each.removesuffix(".weight") in self._stems)
        return next(found, spellings[0])

    def _info(self, name: str) -> TensorInfo:
        if name not in self._checkpoint.tensors:
            raise CorruptModel(
                f"The checkpoint in {self._checkpoint.path} lacks {name}.", hint="Fetch the model again."
            )
        return self._checkpoint.tensors[name]

    def _is_transposed(self, stored: str) -> bool:
        return bool(self._storage.transposed) and stored.endswith(self._storage.transposed)

    def _is_ignored(self, stored: str) -> bool:
        """Tensors that may be there and carry nothing: tables that are recomputed, a second copy of a tied head."""
        head = self._name(LM_HEAD)
        return (
            stored.endswith("rotary_emb.inv_freq")
            or (self._spec.tie_word_embeddings and stored == head)
            or any(re.fullmatch(pattern, stored) for pattern in self._storage.ignored)
        )

    def _count(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._used]
        self._used.update(new)
        self._done_bytes += sum(self._checkpoint.tensors[name].num_bytes for name in new)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class PromisedWeights(Weights):
    """The same questions answered from headers: tensors on `meta`, matrices as promises. `target`: where they would be.

    A model built from it holds as many bytes as the real one (parameters.py: held_bytes).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        storage: Storage,
        format: LinearFormat | None,
        target: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(checkpoint, spec, storage, format, torch.device("meta"), dtype)
        self._target = target

    def _matrix(self, kind: object, parts: list[Part], layer: tuple[int, int]) -> Weight:
        if kind is None:
            return super()._matrix(kind, parts, layer)
        assert self._format is not None
        shapes = [self._format.shape(self._checkpoint, part.stem) for part in parts]
        held = self._format.held_bytes(self._checkpoint, parts, self._target, self._dtype)
        return PromisedWeight((sum(rows for rows, _ in shapes), shapes[0][1]), held)

    def _stored(self, part: Part) -> Tensor:
        info = self._info(part.stem)
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}.get(info.dtype, torch.float32)
        shape = info.shape[::-1] if part.transposed else info.shape
        rows = shape[0] if part.order is None else len(part.order)
        return torch.empty((rows, *shape[1:]), dtype=dtype, device="meta")


def _wrong_shape(names: Sequence[str], got: Iterable[int], wanted: Iterable[object]) -> CorruptModel:
    return CorruptModel(f"{' + '.join(names)} has shape {list(got)}.", f"The model's config asks for {list(wanted)}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
