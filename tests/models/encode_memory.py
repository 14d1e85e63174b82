"""The memory of encoding, planned and measured, for towers that are wider than those of other tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from localllm.models.fit.pictures import encode_bytes
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_tower
from tests.models.peak_bytes import PeakBytes
from tests.models.seeing import SEEING, Seeing, make_seeing, opened, picture

_SIDE, _TILE = 48, (48 // 8) ** 2  # pixels and tokens of a tile
_SQUARE = {"height": _SIDE, "width": _SIDE}
_POINTS = [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE, 2 * _SIDE]]
_FREE = {"size": {"shortest_edge": 64, "longest_edge": 64 * 200}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen2VLImageProcessorPil": _FREE,
    "Glm4vImageProcessorPil": {"size": {"shortest_edge": 128, "longest_edge": 128 * 200}},
    "Glm46VImageProcessorPil": {"size": {"shortest_edge": 128, "longest_edge": 128 * 200}},
    "Gemma3ImageProcessorPil": {"size": _SQUARE},
    "PixtralImageProcessorPil": {"size": {"longest_edge": 112}},
    "GotOcr2ImageProcessorPil": {"size": _SQUARE},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": _SIDE}, "crop_size": _SQUARE},
    "LlavaNextImageProcessorPil": {
        "size": {"shortest_edge": _SIDE}, "crop_size": _SQUARE, "image_grid_pinpoints": _POINTS
    },
    "LlavaOnevisionImageProcessorPil": {"size": _SQUARE, "image_grid_pinpoints": _POINTS},
}  # fmt: skip
_TILES = {"size": {"longest_edge": 2 * _SIDE}, "max_image_size": {"longest_edge": _SIDE}}
_OPTIONS |= dict.fromkeys(("SmolVLMImageProcessorPil", "Idefics3ImageProcessorPil"), _TILES)
_FIELDS = {"mm_tokens_per_image": _TILE, "image_seq_length": _TILE, "image_grid_pinpoints": _POINTS}
_TOWER = {
    "embed_dim": 96, "hidden_size": 96, "intermediate_size": 224, "depth": 2, "num_hidden_layers": 4, "head_dim": 48,
    "image_size": _SIDE, "mm_embed_dim": 96, "output_proj_dims": 96,
}  # fmt: skip


def make_wide(path: Path, name: str) -> Any:
    """Save a model with a tower 96 wide, and pictures of hundreds of patches. Return its spec."""
    tiny = SEEING[name]
    fields = {key: _FIELDS.get(key, value) for key, value in tiny.fields.items()}
    if isinstance(tiny.fields.get("vision_feature_layer"), list):
        fields["vision_feature_layer"] = [-4, -1]
    options = {**tiny.options, **_OPTIONS.get(tiny.processor, {})}
    tower = {**_TOWER, "hidden_size": 64} if tiny.config == "Qwen2VLConfig" else dict(_TOWER)  # the decoder's
    if tiny.processor.startswith(("Pixtral", "Glm")):
        del tower["image_size"]  # theirs bounds pictures of any size
    make_seeing(path, name, Seeing(tiny.config, tiny.processor, options, fields, tiny.changes), tower)
    return read_spec(path)


def planned_and_measured(path: Path, spec: Any, dtype: torch.dtype, side: int = 200) -> tuple[int, int]:
    """Return the bytes of encoding a square picture: what is planned for its rows, and what tensors held."""
    size, vision = dtype.itemsize, spec.vision
    tower = load_tower(path, vision, torch.device("cpu"), dtype)
    if vision.usual_tokens:  # Gemma 4 pads each picture
        vision = replace(vision, limits=replace(vision.limits, max_tokens=vision.usual_tokens))
    pixels = opened(path, replace(spec, vision=vision)).process_image(picture(side, side)).pixels()
    held = sum(each.nbytes for each in pixels.values() if isinstance(each, torch.Tensor))
    with PeakBytes() as measured:
        rows = len(tower.encode(pixels))
    if vision.usual_tokens or (not vision.limits.px_per_token and vision.limits.max_tiles == 1):
        rows = vision.limits.max_tokens
    return encode_bytes(vision, spec.hidden_size, rows, size, on_cpu=True), measured.peak + held
