"""Families of models that see, by what differs between them: marks, sizes, and the text that stands for a picture.

    Qwen        any size; 2 x 2 patches are a token; positions have rows and columns
    GLM-4V      as Qwen; its processor counts the pixels of two frames
    Gemma 3     each picture is one square of 256 tokens that attend to all of the picture
    Pixtral     any size; a token ends each row of patches (Mistral Small 3.1, Ministral 3, Pixtral)
    InternVL    square tiles and an overview
    Idefics 3   square tiles, each named by its row and column, and an overview (SmolVLM)
    LLaVA       one square; from 1.6 on also tiles, whose padding is cut off
    Gemma 4     any shape, scaled to fill one of five numbers of tokens

Arithmetic alone: nothing here reads a pixel, and what `layout` says holds for each picture of that size.
Does not know: torch, files, how a tower computes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

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
    """The tokens and the text of a picture of one size."""

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

    def function(self, name: str) -> Any:
        """Return a function of the processor's module."""
        return getattr(sys.modules[type(self.processor).__module__], name)

    def setting(self, name: str) -> Any:
        """Return a keyword of the call, or the processor's own value."""
        return self.keywords[name] if name in self.keywords else getattr(self.processor, name)


class Held(NamedTuple):
    """Counts of the tensors that a tower of transformers holds at its widest points; SigLIP by default."""

    attention: int = 8  # [patches, width], at the product behind attention
    mlp: int = 4  # [patches, width], beside `VisionSpec.mlp_tensors`
    projected: int = 0  # [rows, hidden], at the end; 0: fewer bytes than in a layer
    mask: Literal["", "bool", "added"] = ""  # of each pair of patches; numbers that are added have the tower's type
    copies_tiles: bool = False  # the tiles that are encoded together are copied first
    per_pixel: int = 0  # bytes beside the colours of a pixel


_SIGLIP = Held()


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One family of towers."""

    model_types: tuple[str, ...]
    mark: str  # what a chat template writes for a picture, and `Layout.prompt` replaces
    marks: tuple[str, ...]  # all special texts of the family
    read: Callable[[Config, Config], dict[str, Any]]  # config.json, the image processor's config: fields of VisionSpec
    layout: Callable[[Size, VisionSpec], Layout]
    keywords: Callable[[VisionSpec, ImageLimits, Detail], dict[str, Any]]
    frame: tuple[str, str, str]  # text before the rows, that of one row, and text behind them
    options: tuple[str, ...] = ()  # of mm_processor_kwargs
    text: str = "language_model"  # attribute of transformers' model that holds the decoder
    per_tile: bool = False  # the tower answers for each tile, so tiles can be run a few at a time
    scales: bool = True  # whether the tokens of a picture can be limited
    held: Held = _SIGLIP

    def prompt(self, rows: int) -> str:
        """Return the text that stands for a picture with this number of rows."""
        before, pad, behind = self.frame
        return f"{before}{pad * rows}{behind}"


_QUICK_GELU = ("clip_vision_model", "qwen2_vl")
"""Towers that have the activation of this name unless their config names another. It holds one tensor more."""


def _patch_facts(config: Config, *, gated: bool = False, rotates: bool = False) -> dict[str, Any]:
    """Return the sizes of a tower of patches, for the memory that it needs. gated: its feed-forward parts multiply two
    of their products; rotates: it holds cosines and sines of its own type."""
    vision = config["vision_config"]
    usual = "quick_gelu" if {vision.get("model_type"), config["model_type"]} & {*_QUICK_GELU} else "gelu"
    gated |= vision.get("hidden_act", usual) == "quick_gelu"
    width = int(vision.get("embed_dim") or vision.get("hidden_size") or 768)
    layers = int(vision.get("depth") or vision.get("num_hidden_layers") or 12)
    mlp = int(width * vision["mlp_ratio"]) if "mlp_ratio" in vision else vision.get("intermediate_size", 4 * width)
    patch = vision.get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) else patch
    taps = config.get("vision_feature_layer")
    heads = int(vision.get("num_heads") or vision.get("num_attention_heads") or 16)
    early = [tap for tap in taps if tap % (layers + 1) < layers - 1] if isinstance(taps, list) else []
    return {
        "patch": int(patch), "width": width, "mlp_width": int(mlp), "layers": layers, "mlp_tensors": 2 + gated,
        "kept_tensors": len(early) + (2 / heads if rotates else 0),
    }  # fmt: skip


# ---- Qwen --------------------------------------------------------------------------------------------------------


def _qwen_size(asked: Config, name: str, other: str, default: int) -> int:
    size = asked.get("size") or {}
    return int(asked.get(other) or size.get(name) or default)


def _read_qwen(config: Config, processor: Config) -> dict[str, Any]:
    vision, is_third = config["vision_config"], "num_position_embeddings" in config["vision_config"]
    facts = _patch_facts(config, gated=not is_third and config["model_type"] != "qwen2_vl")
    rotations = 2 * 4 * facts["width"] // int(vision.get("num_heads", 16))  # in float32, and so are positions
    facts["kept_bytes"] = rotations + (64 + 4 * facts["width"] if is_third else 16)
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
    return Layout(family_of(spec).prompt(rows), rows, (wide, tall), grid, rows * spec.merge**2)


QWEN = VisionFamily(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    "<|image_pad|>",
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
    _read_qwen,
    _qwen_layout,
    _qwen_keywords,
    ("", "<|image_pad|>", ""),
    ("min_pixels", "max_pixels"),
    held=Held(attention=10, mlp=3, projected=2),
)


# ---- GLM-4V --------------------------------------------------------------------------------------------------------

_FRAMES = 2
"""The processor reads a picture as two frames, and its bounds of pixels are of both."""


def _read_glm(config: Config, processor: Config) -> dict[str, Any]:
    sizes = {
        "min_pixels": (_FRAMES, 112 * 112, "shortest_edge"),
        "max_pixels": (_FRAMES, 28 * 28 * 15000, "longest_edge"),
    }
    frame = {name: _qwen_size(processor, edge, name, most) // by for name, (by, most, edge) in sizes.items()}
    facts = _read_qwen(config, {**processor, "size": {}, **frame})
    return {**facts, "mlp_width": int(config["vision_config"].get("out_hidden_size", facts["mlp_width"]))}


def _glm_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    size = _qwen_keywords(spec, limits, detail)["size"]
    return {"size": {edge: pixels * _FRAMES for edge, pixels in size.items()}}


def _glm_layout(asked: Size, spec: VisionSpec) -> Layout:
    factor, scale = spec.patch * spec.merge, 1.0
    if min(asked.height, asked.width) < factor:
        scale = max(factor / asked.height, factor / asked.width)
    sides = (int(asked.height * scale), int(asked.width * scale)) if scale > 1 else (asked.height, asked.width)
    edges = {edge: pixels // _FRAMES for edge, pixels in asked.keywords["size"].items()}
    return _qwen_layout(asked._replace(height=sides[0], width=sides[1], keywords={"size": edges}), spec)


GLM = replace(
    QWEN,
    model_types=("glm4v", "glm4v_moe", "glm46v"),
    mark="<|image|>",
    marks=(
        "<|begin_of_image|>",
        "<|image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|video|>",
        "<|end_of_video|>",
    ),
    read=_read_glm,
    layout=_glm_layout,
    keywords=_glm_keywords,
    frame=("", "<|image|>", ""),
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


def _read_square(config: Config, processor: Config) -> dict[str, Any]:
    tokens, is_gemma = _base_tokens(config), config["model_type"] == "gemma3"
    if is_gemma:
        tokens = int(config.get("mm_tokens_per_image", 256))
    limits = ImageLimits(tokens, tokens)
    return {**_patch_facts(config), "limits": limits, "both_ways": is_gemma, **_tile(config, tokens)}


def _base_tokens(config: Config) -> int:
    """Return the rows of one square: its patches, and a class token where the tower has one and all rows are taken."""
    has_class = config["vision_config"].get("model_type") == "clip_vision_model"
    takes_all = config.get("vision_feature_select_strategy", "default") != "default"
    return _side(config) ** 2 + int(has_class and takes_all)


def _square_layout(asked: Size, spec: VisionSpec) -> Layout:
    rows, size = spec.limits.max_tokens, asked.processor.crop_size or asked.processor.size
    return Layout(family_of(spec).prompt(rows), rows, (size["width"], size["height"]))


GEMMA3 = VisionFamily(
    ("gemma3",),
    "<start_of_image>",
    ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    _read_square,
    _square_layout,
    _no_keywords,
    ("\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n"),
    scales=False,
)
LLAVA = VisionFamily(
    ("llava",),
    "<image>",
    ("<image>",),
    _read_square,
    _square_layout,
    _no_keywords,
    ("", "<image>", ""),
    scales=False,
    held=Held(projected=2),
)


# ---- Gemma 4 -------------------------------------------------------------------------------------------------------

GEMMA4_TOKENS = (70, 140, 280, 560, 1120)
"""Tokens that a picture may have at most; each picture is scaled to have nearly as many."""


def _read_gemma4(config: Config, processor: Config) -> dict[str, Any]:
    """The model of 12B has no tower: it reads patches as large as a token, through one matrix."""
    vision, text = config["vision_config"], config.get("text_config") or {}
    facts = _patch_facts(config, gated=True, rotates=True)
    has_tower = config["model_type"] == "gemma4"
    patch, merge = int(processor.get("patch_size", 16)), int(processor.get("pooling_kernel_size", 3))
    least = GEMMA4_TOKENS[0] // 2  # of the most unlucky shape
    limits = ImageLimits(least, GEMMA4_TOKENS[-1], (patch * merge) ** 2)
    facts |= {"patch": patch, "merge": merge}
    if not has_tower:
        facts |= {"patch": patch * merge, "merge": 1, "width": int(vision["mm_embed_dim"]), "mlp_width": 0, "layers": 0}
        facts["kept_tensors"] = 0
    attention = text.get("use_bidirectional_attention", None if has_tower else "vision")
    return {
        **facts,
        "limits": limits,
        "usual_tokens": int(processor.get("max_soft_tokens", 280)),
        "both_ways": attention == "vision",
        "windowed_only": True,
    }


def _gemma4_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    wanted = {"low": GEMMA4_TOKENS[0], "auto": spec.usual_tokens}.get(detail.level, GEMMA4_TOKENS[-1])
    wanted = max(wanted, limits.min_tokens) if detail.level != "low" else wanted
    if detail.max_pixels is not None:
        wanted = min(wanted, detail.max_pixels // spec.limits.px_per_token)
    if detail.min_pixels is not None:
        wanted = max(wanted, detail.min_pixels // spec.limits.px_per_token)
    wanted = max(min(wanted, limits.max_tokens), GEMMA4_TOKENS[0])
    return {"max_soft_tokens": max(count for count in GEMMA4_TOKENS if count <= wanted)}


def _gemma4_layout(asked: Size, spec: VisionSpec) -> Layout:
    most = asked.setting("max_soft_tokens")
    if most not in GEMMA4_TOKENS:
        raise InvalidParameter(
            f"max_soft_tokens is {most!r}.", f"It is one of {', '.join(map(str, GEMMA4_TOKENS))}.",
            param="mm_processor_kwargs",
        )  # fmt: skip
    patches, scaled = most * spec.merge**2, asked.function("get_aspect_ratio_preserving_size")
    tall, wide = scaled(asked.height, asked.width, spec.patch, patches, spec.merge)
    rows = tall * wide // (spec.patch * spec.merge) ** 2
    return Layout(family_of(spec).prompt(rows), rows, (wide, tall), None, patches)


GEMMA4 = VisionFamily(
    ("gemma4", "gemma4_unified"),
    "<|image|>",
    ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>"),
    _read_gemma4,
    _gemma4_layout,
    _gemma4_keywords,
    ("<|image>", "<|image|>", "<image|>"),
    ("max_soft_tokens", "min_pixels", "max_pixels"),
    held=Held(attention=7, projected=2, mask="bool"),
)

# ---- Pixtral -------------------------------------------------------------------------------------------------------


def _read_pixtral(config: Config, processor: Config) -> dict[str, Any]:
    facts, merge = _patch_facts(config, gated=True, rotates=True), int(config.get("spatial_merge_size", 1))
    facts["kept_tensors"] += 1  # the patches before their norm
    edge = int((processor.get("size") or {}).get("longest_edge", 1024))
    side = -(-edge // (facts["patch"] * merge))
    limits = ImageLimits(1, side * side, (facts["patch"] * merge) ** 2)
    return {**facts, "merge": merge, "limits": limits}


def _pixtral_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    most = min(limits.max_tokens, LOW_TOKENS) if detail.level == "low" else limits.max_tokens
    if detail.max_pixels is not None:
        most = max(1, min(most, detail.max_pixels // spec.limits.px_per_token))
    factor = spec.patch * spec.merge
    return {"size": {"longest_edge": math.isqrt(most) * factor}, "patch_size": factor}


def _pixtral_layout(asked: Size, spec: VisionSpec) -> Layout:
    edge, factor = asked.keywords["size"]["longest_edge"], asked.keywords["patch_size"]
    shrink = max(asked.height / edge, asked.width / edge, 1)
    tall, wide = (math.floor(side / shrink) if shrink > 1 else side for side in (asked.height, asked.width))
    if not tall * wide:
        raise InvalidParameter(
            f"A picture of {asked.width} x {asked.height} pixels would be scaled to {wide} x {tall}.",
            f"Its longer side may have {edge} pixels.", "Send a part of it, or allow it more tokens.", param="messages",
        )  # fmt: skip
    lines, columns = -(-tall // factor), -(-wide // factor)
    prompt = ("[IMG]" * columns + "[IMG_BREAK]") * lines
    rows = lines * columns
    shown = columns * factor, lines * factor
    return Layout(f"{prompt.removesuffix('[IMG_BREAK]')}[IMG_END]", rows, shown, None, rows * spec.merge**2)


PIXTRAL = VisionFamily(
    ("pixtral",),
    "[IMG]",
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    _read_pixtral,
    _pixtral_layout,
    _pixtral_keywords,
    ("", "[IMG]", "[IMG_END]"),
    ("max_pixels",),
    held=Held(attention=10, projected=2, mask="added"),
)

# ---- tiles ---------------------------------------------------------------------------------------------------------


def _read_internvl(config: Config, processor: Config) -> dict[str, Any]:
    tokens, tiles = int(config.get("image_seq_length", 256)), int(processor.get("max_patches", 12))
    most = tokens * (tiles + 1 if tiles > 1 else 1)
    limits = ImageLimits(tokens, most, max_tiles=tiles)
    return {**_patch_facts(config), "limits": limits, **_tile(config, tokens)}


def _internvl_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    tiles = min(spec.limits.max_tiles, max(1, limits.max_tokens // spec.tile_tokens - 1))
    if detail.level == "low":
        tiles = 1
    return {"crop_to_patches": tiles > 1, "min_patches": 1, "max_patches": tiles}


def _internvl_layout(asked: Size, spec: VisionSpec) -> Layout:
    size, columns, lines = asked.processor.size, 1, 1
    if asked.setting("crop_to_patches"):
        sizes = (asked.height, asked.width), (size["height"], size["width"])
        least, most = asked.setting("min_patches"), asked.setting("max_patches")
        columns, lines = asked.function("get_optimal_tiled_canvas")(*sizes, least, most)
    rows = spec.tile_tokens * (columns * lines + 1 if columns * lines > 1 else 1)
    return Layout(family_of(spec).prompt(rows), rows, (columns * size["width"], lines * size["height"]))


INTERNVL = VisionFamily(
    ("internvl",),
    "<IMG_CONTEXT>",
    ("<IMG_CONTEXT>", "<img>", "</img>"),
    _read_internvl,
    _internvl_layout,
    _internvl_keywords,
    ("<img>", "<IMG_CONTEXT>", "</img>"),
    ("crop_to_patches", "max_patches"),
    per_tile=True,
    held=Held(mlp=5, projected=2),
)


def _read_idefics(config: Config, processor: Config) -> dict[str, Any]:
    tokens = _side(config) ** 2 // int(config.get("scale_factor", 2)) ** 2
    tile = int((processor.get("max_image_size") or {}).get("longest_edge", 364))
    edge = int((processor.get("size") or {}).get("longest_edge", 4 * tile))
    tiles = (-(-edge // tile)) ** 2 if processor.get("do_image_splitting", True) else 1
    limits = ImageLimits(tokens, tokens * (tiles + 1 if tiles > 1 else 1), max_tiles=tiles)
    return {**_patch_facts(config), "limits": limits, **_tile(config, tokens)}


def _idefics_keywords(spec: VisionSpec, limits: ImageLimits, detail: Detail) -> dict[str, Any]:
    side = math.isqrt(min(spec.limits.max_tiles, max(1, limits.max_tokens // spec.tile_tokens - 1)))
    if detail.level == "low" or side < 2:
        return {"do_image_splitting": False}
    tile = spec.patch * math.isqrt(spec.tile_patches)
    return {"do_image_splitting": True, "size": {"longest_edge": side * tile}}


def _idefics_layout(asked: Size, spec: VisionSpec) -> Layout:
    tile, lines, columns = asked.processor.max_image_size["longest_edge"], 0, 0
    if asked.setting("do_image_splitting"):
        _, lines, columns = asked.processor.get_number_of_image_patches(asked.height, asked.width, {**asked.keywords})
    pads = "<image>" * spec.tile_tokens
    whole = family_of(spec).prompt(spec.tile_tokens)
    if not lines * columns:
        return Layout(whole, spec.tile_tokens, (tile, tile))
    parts = "".join(
        "".join(f"<fake_token_around_image><row_{i + 1}_col_{j + 1}>{pads}" for j in range(columns)) + "\n"
        for i in range(lines)
    )
    return Layout(f"{parts}\n{whole}", spec.tile_tokens * (lines * columns + 1), (columns * tile, lines * tile))


IDEFICS = VisionFamily(
    ("idefics3", "smolvlm"),
    "<image>",
    ("<image>", "<fake_token_around_image>", "<global-img>"),
    _read_idefics,
    _idefics_layout,
    _idefics_keywords,
    ("<fake_token_around_image><global-img>", "<image>", "<fake_token_around_image>"),
    ("do_image_splitting",),
    text="text_model",
    per_tile=True,
    held=Held(projected=2, copies_tiles=True, per_pixel=8),
)

# ---- LLaVA ---------------------------------------------------------------------------------------------------------


def _read_anyres(config: Config, processor: Config) -> dict[str, Any]:
    tokens, vision, side = _base_tokens(config), config["vision_config"], _side(config)
    image = vision.get("image_size", 336)
    points = processor.get("image_grid_pinpoints") or config["image_grid_pinpoints"]
    tiles = max((tall // image) * (wide // image) for tall, wide in points)
    aspect = str(config.get("vision_aspect_ratio", "anyres_max_9")) if config["model_type"] == "llava_onevision" else ""
    most = int(aspect.removeprefix("anyres_max_") or 0)
    shown = tiles if not most else min(tiles, math.ceil(most * 1.21))
    limits = ImageLimits(tokens, tokens + shown * side * (side + 1), max_tiles=tiles)
    return {**_patch_facts(config), "limits": limits, **_tile(config, tokens), "merge": 1, "most_shown_tiles": most}


def _anyres_layout(asked: Size, spec: VisionSpec) -> Layout:
    """Count the rows as LLaVA-NeXT: tiles without the padding, a row's end for each line of patches, the overview."""
    side = math.isqrt(spec.tile_patches)
    tall, wide = _best_resolution(asked.height, asked.width, asked.processor.image_grid_pinpoints)
    tile = spec.patch * side
    lines, columns = tall // tile * side, wide // tile * side
    if asked.width / asked.height > columns / lines:
        inner = int(round(asked.height * (columns / asked.width), 7))
        lines -= (lines - inner) // 2 * 2
    else:
        inner = int(round(asked.width * (lines / asked.height), 7))
        columns -= (columns - inner) // 2 * 2
    if spec.most_shown_tiles:
        ratio = math.sqrt(lines * columns / (spec.most_shown_tiles * side**2))
        if ratio > 1.1:
            lines, columns = int(lines // ratio), int(columns // ratio)
    rows = lines * columns + lines + spec.tile_tokens
    return Layout(family_of(spec).prompt(rows), rows, (wide, tall))


def _best_resolution(height: int, width: int, points: Any) -> tuple[int, int]:
    """Return the canvas that shows most of a picture, and of several the one with the least padding."""

    def used(point: Any) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - point[0] * point[1]

    tall, wide = max(points, key=used)
    return int(tall), int(wide)


ANYRES = VisionFamily(
    ("llava_next", "llava_onevision"),
    "<image>",
    ("<image>",),
    _read_anyres,
    _anyres_layout,
    _no_keywords,
    ("", "<image>", ""),
    scales=False,
    held=Held(projected=3, copies_tiles=True),
)

FAMILIES = (QWEN, GLM, GEMMA3, GEMMA4, PIXTRAL, INTERNVL, IDEFICS, LLAVA, ANYRES)
_OF_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(spec: VisionSpec) -> VisionFamily:
    return family_of_type(spec.model_type)


def family_of_type(model_type: str) -> VisionFamily:
    return _OF_TYPE[model_type]


def kind_of(config: Config) -> str:
    """Return the name of the family of towers: that of the model, but Pixtral's tower is behind several."""
    vision = config.get("vision_config")
    inner = vision.get("model_type") if isinstance(vision, dict) else None
    return "pixtral" if inner == "pixtral" else str(config.get("model_type"))


def sees(config: Config) -> bool:
    """Return whether there is a family for a config.json."""
    return kind_of(config) in _OF_TYPE


def read_vision(config: Config, processor: Config) -> VisionSpec | None:
    """Return the part that reads pictures of a model with this config.json and this config of an image processor; None
    for a family whose text part alone is supported. Raises `CorruptModel` for a config that contradicts itself."""
    kind = kind_of(config)
    family = _OF_TYPE.get(kind)
    if family is None or not isinstance(config.get("vision_config"), dict):
        return None
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
    return VisionSpec(model_type=kind, placeholder_id=token, marks=family.marks, **fields)


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


def sees_as(architecture: str) -> bool:
    """Return whether there is a family for a class name in config.json, such as Qwen2_5_VLForConditionalGeneration."""
    kind = architecture.removesuffix("ForConditionalGeneration").replace("_", "").lower()
    return kind in {"mistral3", *(name.replace("_", "") for name in _OF_TYPE)}
