"""The tensors for a builder as a checkpoint's headers describe them, for sizes without reading.

Does not know: how the parts make a model, sums over it (parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from localllm.kernels.cpu.half import pack_half
from localllm.kernels.cpu.pack import native_nbytes
from localllm.kernels.quantized_weight import MetaWeight
from localllm.models.formats import matrices
from localllm.models.formats.at_load import AtLoad
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.linear_format import LinearFormat, StoredPart
from localllm.models.layers.linear import Weight, device_layout_bytes
from localllm.models.weights.source import NORMS, ExpertCut
from localllm.models.weights.weights import Weights


class MetaWeights(Weights):
    """Tensors by header only: empty ones on `meta`, and matrices as sizes.

    A model built from them has as many bytes as the real one (parameters.py: held_bytes).
    """

    def _load_device(self, target: torch.device) -> torch.device:
        return torch.device("meta")

    def take(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        *,
        keep_narrow: bool = False,
        dtype: torch.dtype | None = None,
        rows: range | None = None,
    ) -> Tensor:
        """Return small tensors on the CPU: arithmetic on `meta` first imports torch's compiler, for seconds."""
        names = list(names)
        whole = super().take(names, shape, keep_narrow=keep_narrow, dtype=dtype, rows=rows)
        small = len(shape) == 1 or names[0].endswith(NORMS)
        return torch.empty(whole.shape, dtype=whole.dtype, device="cpu") if small else whole

    def values(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on the CPU, for the same reason."""
        found = super().values(name, shape, dtype=dtype)
        return torch.empty(shape, dtype=found.dtype, device="cpu")

    def _read(self, format: LinearFormat, parts: list[StoredPart], checkpoint: Checkpoint | None = None) -> Weight:
        return format.read_meta(checkpoint or self.layout.checkpoint, parts, self._target, self._dtype)

    def _slices(
        self, stacked: Sequence[str], stored_order: Tensor | None, shape: tuple[int, int, int], cut: ExpertCut, *,
        packs: bool,
    ) -> Iterator[Weight]:  # fmt: skip
        """Yield empty matrices: choosing rows on `meta` imports torch's compiler, for seconds."""
        stored, own = self._expert_views(stacked, shape)[0].dtype, cut.shape(*shape[1:])
        is_half = self._quantize is None and self.keeps_half(stored, own)
        for _ in cut.own:
            is_stored = is_half and self._dtype == torch.float32
            empty = torch.empty(own, dtype=stored if is_stored else self._dtype, device="meta")
            yield pack_half(empty) if is_half else self._finished(empty, self._quantize)
        self.read.add(stacked)

    def _finished(self, weight: Weight, quantize: AtLoad | None) -> Weight:
        weight = super()._finished(weight, quantize)
        if isinstance(weight, Tensor):
            return weight
        held = device_layout_bytes(weight, self._target, self.packer.mode)
        native = native_nbytes(weight, self.packer.mode) if self._target.type == "cpu" else None
        return MetaWeight((weight.shape[0], weight.shape[1]), held, native)

    def _stored(self, part: StoredPart) -> Tensor:
        info = matrices.info(self.layout.checkpoint, part.stem)
        dtype = matrices.TYPES.get(info.dtype, torch.float32)
        shape = info.shape[::-1] if part.transposed else info.shape
        rows = shape[0] if part.order is None else len(part.order)
        rest = shape[1:] if part.columns is None else (len(part.columns),)
        return torch.empty((rows, *rest), dtype=dtype, device="meta")
