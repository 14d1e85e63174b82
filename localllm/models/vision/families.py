"""Families of models that see, by what differs between them: marks, sizes, and the text that stands for a picture.

    Qwen        any size; 2 x 2 patches are a token; positions have rows and columns
    Gemma 3     each picture is one square of 256 tokens that attend to all of the picture
    Pixtral     any size; a token ends each row of patches (Mistral Small 3.1, Ministral 3, Pixtral)
    InternVL    square tiles and an overview
    Idefics 3   square tiles, each named by its row and column, and an overview (SmolVLM)
    LLaVA       one square; from 1.6 on also tiles, whose padding is cut off

Arithmetic alone: nothing here reads a pixel, and what `layout` says holds for each picture of that size.
Does not know: torch, files, how a tower computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from localllm.errors import CorruptModel, InvalidParameter
from localllm.models.spec.family import Config
from localllm.models.spec.vision import Detail, ImageLimits, VisionSpec

LOW_TOKENS, HIGH_TOKENS = 256, 1024
"""Most tokens of a picture in low detail, and least tokens in high detail."""
MOST_TOKENS = 4096
"""Most tokens of a picture unless asked otherwise: A4 at 200 dpi in Qwen3-VL."""
TILES_AT_ONCE = 4
"""Tiles of one picture that a CPU encodes together: 17 tiles of SmolVLM at once take 1.6 GB in float32."""


class Layout(NamedTuple):
    """What becomes of a picture of one size."""

    prompt: str
    rows: int
    shown: tuple[int, int]  # width, height
    grid: tuple[int, int] | None = None  # rows, columns
    patches: int = 0  # that the tower reads at once; 0: those of `VisionSpec`'s tiles


class Size(NamedTuple):
    """A picture's size and how its processor is called. processor: transformers' image processor."""

    width: int
    height: int
    processor: Any
    keywords: Mapping[str, Any]

    def setting(self, name: str) -> Any:
        """Return a keyword of the call, or the processor's own value."""
        return self.keywords[name] if name in self.keywords else getattr(self.processor, name)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One family of towers."""

    model_types: tuple[str, ...]
    mark: str  # what a chat template writes for a picture, and `Layout.prompt` replaces
    marks: tuple[str, ...]  # all special texts of the family
    read: Callable[[Config, Config], dict[str, Any]]  # config.json, the image processor's config: fields of VisionSpec
    layout: Callable[[Size, VisionSpec], Layout]
    keywords: Callable[[VisionSpec, ImageLimits, Detail], dict[str, Any]]
    options: tuple[str, ...] = ()  # of mm_processor_kwargs
    text: str = "language_model"  # attribute of transformers' model that holds the decoder
    per_tile: bool = False  # the tower answers for each tile, so tiles can be run a few at a time


def _patch_facts(config: Config) -> dict[str, Any]:
    """Return the sizes of a tower of patches, for the memory that it needs."""
    vision = config["vision_config"]
    width = int(vision.get("embed_dim") or vision.get("hidden_size") or 768)
    layers = int(vision.get("depth") or vision.get("num_hidden_layers") or 12)
    mlp = vision.get("intermediate_size") or int(width * vision.get("mlp_ratio", 4))
    patch = vision.get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) else patch
    return {"patch": int(patch), "width": width, "mlp_width": int(mlp), "layers": layers}


# ---- Qwen --------------------------------------------------------------------------------------------------------


def _qwen_size(asked: Config, name: str, other: str, default: int) -> int:
    size = asked.get("size") or {}
    return int(asked.get(other) or size.get(name) or default)


def _read_qwen(config: Config, processor: Config) -> dict[str, Any]:
    facts, vision = _patch_facts(config), config["vision_config"]
    facts["patch"] = int(processor.get("patch_size", facts["patch"]))
    merge = int(processor.get("merge_size") or vision.get("spatial_merge_size", 2))
    per_token = (facts["patch"] * merge) ** 2
    least = _qwen_size(processor, "shortest_edge", "min_pixels", 56 * 56)
    most = _qwen_size(processor, "longest_edge", "max_pixels", 28 * 28 * 1280)
    limits = ImageLimits(max(1, least // per_token), max(1, most // per_token), per_token)
    deep = len(vision.get("deepstack_visual_indexes") or ())
    return {**facts, "limits": limits, "merge": merge, "deep": deep, "grids": True}


def _qwen_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    per_token = spec.limits.px_per_token
    least, most = limits.min_tokens * per_token, limits.max_tokens * per_token
    if detail.level == "low":
        most = min(most, max(LOW_TOKENS * per_token, least))
    if detail.level == "high":
        least = max(least, min(most, HIGH_TOKENS * per_token))
    if detail.max_pixels is not None:
        most = min(most, max(detail.max_pixels, per_token))
        least = min(least, most)
    if detail.min_pixels is not None:
        least = max(least, min(detail.min_pixels, most))
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def fitted(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width nearest to a picture's, in multiples of `factor`, with `least` to `most` pixels.
    The same as `smart_resize` of transformers."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < least:
        grow = math.sqrt(least / (height * width))
        tall, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def _qwen_layout(asked: Size, spec: VisionSpec) -> Layout:
    factor, size = spec.patch * spec.merge, asked.keywords["size"]
    tall, wide = fitted(asked.height, asked.width, factor, size["shortest_edge"], size["longest_edge"])
    grid = tall // factor, wide // factor
    rows = grid[0] * grid[1]
    return Layout("<|image_pad|>" * rows, rows, (wide, tall), grid, rows * spec.merge**2)


QWEN = VisionFamily(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    "<|image_pad|>",
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
    _read_qwen,
    _qwen_layout,
    _qwen_keywords,
    ("min_pixels", "max_pixels"),
)


# ---- one square ----------------------------------------------------------------------------------------------------


def _no_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    return {}


def _tile(config: Config, tokens: int) -> dict[str, Any]:
    return {"tile_tokens": tokens, "tile_patches": _side(config) ** 2}


def _side(config: Config) -> int:
    """Return the patches of a side of the tower's picture."""
    vision = config["vision_config"]
    size, patch = vision.get("image_size", 336), vision.get("patch_size", 14)
    size, patch = (each[0] if isinstance(each, list) else each for each in (size, patch))
    return int(size) // int(patch)


def _read_gemma3(config: Config, processor: Config) -> dict[str, Any]:
    tokens = int(config.get("mm_tokens_per_image", 256))
    return {**_patch_facts(config), "limits": ImageLimits(tokens, tokens), "both_ways": True, **_tile(config, tokens)}


def _gemma3_layout(asked: Size, spec: VisionSpec) -> Layout:
    rows, size = spec.limits.max_tokens, asked.processor.size
    pads = "<image_soft_token>" * rows
    return Layout(f"\n\n<start_of_image>{pads}<end_of_image>\n\n", rows, (size["width"], size["height"]))


GEMMA3 = VisionFamily(
    ("gemma3",),
    "<start_of_image>",
    ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    _read_gemma3,
    _gemma3_layout,
    _no_keywords,
)


def _read_llava(config: Config, processor: Config) -> dict[str, Any]:
    full = config.get("vision_feature_select_strategy", "default") != "default"
    tokens = _side(config) ** 2 + full
    return {**_patch_facts(config), "limits": ImageLimits(tokens, tokens), **_tile(config, tokens)}


def _llava_layout(asked: Size, spec: VisionSpec) -> Layout:
    rows, size = spec.limits.max_tokens, asked.processor.crop_size
    return Layout("<image>" * rows, rows, (size["width"], size["height"]))


LLAVA = VisionFamily(("llava",), "<image>", ("<image>",), _read_llava, _llava_layout, _no_keywords)

FAMILIES = (QWEN, GEMMA3, LLAVA)
_OF_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(spec: VisionSpec) -> VisionFamily:
    return family_of_type(spec.model_type)


def family_of_type(model_type: str) -> VisionFamily:
    return _OF_TYPE[model_type]


def sees(model_type: object) -> bool:
    """Return whether there is a family for a config.json's model_type."""
    return model_type in _OF_TYPE


def read_vision(config: Config, processor: Config) -> VisionSpec | None:
    """Return the part that reads pictures of a model with this config.json and this config of an image processor; None
    for a family whose text part alone is supported. Raises `CorruptModel` for a config that contradicts itself."""
    model_type = config.get("model_type")
    if (
        not isinstance(model_type, str)
        or model_type not in _OF_TYPE
        or not isinstance(config.get("vision_config"), dict)
    ):
        return None
    family = _OF_TYPE[model_type]
    token = next(
        (config[name] for name in ("image_token_id", "image_token_index") if config.get(name) is not None), None
    )
    try:
        fields = family.read(config, processor)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise CorruptModel(
            "config.json's vision_config cannot be read.", f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise CorruptModel(f"config.json has image_token_id = {token!r}.", "It must be a token id.")
    return VisionSpec(model_type=model_type, placeholder_id=token, marks=family.marks, **fields)


def keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    """Return how the image processor is called for a picture. Raises `InvalidParameter` for an option that the family
    does not have."""
    family, options = family_of(spec), dict(detail.options)
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        known = f"It has {', '.join(family.options)}." if family.options else "Its pictures always have one size."
        raise InvalidParameter(
            f"mm_processor_kwargs has {', '.join(unknown)}, which this model's pictures do not have.",
            known, "Leave it out.", param="mm_processor_kwargs",
        )  # fmt: skip
    pixels = {name: options.pop(name) for name in ("min_pixels", "max_pixels") if name in options}
    return {**family.keywords(spec, limits, detail._replace(**pixels)), **options}
