"""The part of a model that turns pictures into rows of the decoder's input: transformers' own modules.

The whole model is built without memory, its decoder is deleted, and the weights of the rest are read. A tower answers
for one picture at a time; of families that cut pictures into tiles, few tiles run at once on a CPU.
Does not know: which requests read the rows, where they are kept (runner/pictures.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.models.spec.vision import VisionSpec
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.module import read_module
from localllm.models.vision.families import TILES_AT_ONCE, family_of

_OF_TEXT = (r"(^|\.)(language_model|text_model)\.", r"^lm_head", r"^model\.(layers|embed_tokens|norm)\b", r"^mtp\.")


class Tower:
    """A loaded tower and its projector."""

    def __init__(self, module: Any, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.module, self.spec, self.device, self.dtype = module, spec, device, dtype
        taken = inspect.signature(module.get_image_features).parameters
        self._keywords = frozenset(taken)
        self._per_tile = family_of(spec).per_tile and device.type == "cpu"

    @property
    def bytes_held(self) -> int:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def encode(self, pixels: Mapping[str, Any]) -> Tensor:
        """Return the rows [rows, (1 + deep) * hidden] of one picture: the decoder's input, then what is added
        behind its first layers. pixels: `Processed.tensors`."""
        kept = {name: self._on_device(value) for name, value in pixels.items() if name in self._keywords}
        values, sizes = kept["pixel_values"], kept.get("image_sizes")
        if self.spec.model_type == "pixtral" and sizes is not None and sizes.max() <= self.spec.patch * self.spec.merge:
            # transformers 5.23 loses a dimension of pictures of one row: two of them are encoded
            return self._encode({name: torch.cat([each, each]) for name, each in kept.items()})[:1]
        axis = values.ndim - 4  # tiles are the dimension before channels, height and width
        if not self._per_tile or values.ndim < 4 or values.shape[axis] <= TILES_AT_ONCE:
            return self._encode(kept)
        parts = []
        for first in range(0, values.shape[axis], TILES_AT_ONCE):
            some = {
                name: each.narrow(axis, first, min(TILES_AT_ONCE, values.shape[axis] - first))
                for name, each in kept.items()
            }
            parts.append(self._encode(some))
        return torch.cat(parts)

    def _encode(self, kept: Mapping[str, Any]) -> Tensor:
        out = self.module.get_image_features(**kept, return_dict=True)
        rows = _rows(out.pooler_output)
        deep = getattr(out, "deepstack_features", None)
        if self.spec.deep and deep is not None:
            rows = torch.cat([rows, *map(_rows, deep)], dim=1)
        return rows

    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.device, non_blocking=True)
        return value.to(self.dtype) if value.is_floating_point() else value


def _rows(features: Any) -> Tensor:
    """Return features as [rows, hidden]."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def tower_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a tower computes in: the decoder's, but float32 where that is float16, in which towers
    overflow."""
    return torch.float32 if dtype is torch.float16 else dtype


def load_tower(path: Path, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> Tower:
    """Load the tower of the model in folder `path`, to compute in `dtype`. Raises `CorruptModel`,
    `UnsupportedModel`."""
    config, kind = _config(path), family_of(spec).text
    module = read_module(
        _without_text(_base(config), kind), path, config, dtype, attention="sdpa", trust_remote_code=False
    )
    return Tower(module.to(device), spec, device, dtype)


def tower_bytes(path: Path, spec: VisionSpec, dtype: torch.dtype) -> int:
    """Return the exact bytes of `load_tower`'s result, without reading a weight."""
    config = _config(path)
    with torch.device("meta"):
        module = _without_text(_base(config), family_of(spec).text)(config).to(dtype)
    return Tower(module, spec, torch.device("meta"), dtype).bytes_held


def _config(path: Path) -> Any:
    """Return the config, without the quantisation that its text part may have."""
    config = load_config(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _base(config: Any) -> type[Any]:
    """Return transformers' class of the model without a head."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        raise UnsupportedModel(
            f"Pictures of {config.model_type} are not supported.", "transformers has no tower of it."
        )
    base: type[Any] = MODEL_MAPPING[type(config)]
    return base


def _without_text(base: type[Any], text: str) -> type[Any]:
    """Return a class of the same model that has no decoder."""

    class WithoutText(base):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = _OF_TEXT

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            delattr(self, text)

        def tie_weights(self, *args: Any, **keywords: Any) -> None:
            """Nothing to tie."""

    WithoutText.__name__ = base.__name__
    return WithoutText
