"""The memory of reading pictures: the tower, the largest picture while it is encoded, and the rows that are kept. The
part that reads sound, and the encoder of an encoder-decoder with the prompts that it has read, take memory in the same
three ways.

The largest picture decides all three, so its tokens are chosen with the rest of the plan: at most 4096 unless asked
otherwise, fewer where the context would become short.
Does not know: torch, files, how a tower computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit, ModelError
from localllm.models.fit.activation_bytes import DTYPE_BYTES
from localllm.models.spec.model_spec import ModelSpec, kv_numbers_per_token
from localllm.models.spec.vision import HearingSpec, ImageLimits, VisionSpec
from localllm.models.vision.families import MOST_TOKENS, TILES_AT_ONCE, family_of
from localllm.units import format_bytes, format_count

FEWER_TOKENS = (2048, 1024, 512)
"""Tokens of the largest picture that are tried before the context becomes shorter than `GOOD_CONTEXT`."""
GOOD_CONTEXT = 8192
TEXT_TOKENS = 1024
"""Tokens of text that the context holds beside one picture."""


@dataclass(frozen=True, slots=True)
class PictureSizes:
    """The memory that reading pictures takes in one engine."""

    limits: ImageLimits
    kept_rows: int  # of encoded pictures, at least those of the largest
    tower_bytes: int
    encode_bytes: int  # of the largest picture's activations and pixels
    kept_bytes: int

    @property
    def rows(self) -> int:
        """Rows of the largest picture."""
        return self.limits.max_tokens

    def note(self) -> str:
        """Return the sizes as a sentence."""
        return (
            f"Pictures: the tower takes {format_bytes(self.tower_bytes)}; the largest picture has "
            f"{format_count(self.rows)} tokens and takes {format_bytes(self.encode_bytes)} while it is encoded; "
            f"{format_bytes(self.kept_bytes)} keep encoded pictures."
        )


MOST_SOUND_S = 1800
"""Seconds of the longest sound in a prompt, where the context holds its rows."""


@dataclass(frozen=True, slots=True)
class SoundSizes:
    """The memory that reading sound takes in one engine."""

    rows: int  # of the longest sound
    kept_rows: int  # of encoded sound, at least those of the longest
    tower_bytes: int
    encode_bytes: int  # of the activations and features of the longest sound
    kept_bytes: int
    most_s: float

    def note(self) -> str:
        """Return the sizes as a sentence."""
        return (
            f"Sound: the tower takes {format_bytes(self.tower_bytes)}; the longest sound has {self.most_s:.0f} s or "
            f"{format_count(self.rows)} tokens and takes {format_bytes(self.encode_bytes)} while it is encoded; "
            f"{format_bytes(self.kept_bytes)} keep encoded sound."
        )


def sound_sizes(spec: ModelSpec, config: EngineConfig, dtype: str, batched_tokens: int) -> SoundSizes:
    """Return the sizes for the longest sound that the context holds beside some text, at most `MOST_SOUND_S`."""
    from localllm.models.vision.sound import sound_family_of

    hearing = spec.hearing
    assert hearing is not None, "a model without a tower of sound"
    context = min(config.max_model_len or spec.max_position, spec.max_position)
    rows = max(context - TEXT_TOKENS, context // 2)
    most_s = sound_family_of(hearing).most_s or MOST_SOUND_S
    chunks = max(1, min(rows // hearing.chunk_rows, round(min(most_s, MOST_SOUND_S) * 100) // hearing.chunk))
    rows, frames = chunks * hearing.chunk_rows, chunks * hearing.chunk
    size = 4 if dtype == "float16" else DTYPE_BYTES[dtype]
    at_once = min(frames, hearing.piece or frames)
    kept = max(rows, batched_tokens)
    return SoundSizes(
        rows, kept, hearing.tower_bytes * size // 4, sound_encode_bytes(hearing, frames, at_once, size),
        kept * spec.hidden_size * DTYPE_BYTES[dtype], frames / 100,
    )  # fmt: skip


def sound_encode_bytes(hearing: HearingSpec, frames: int, at_once: int, size: int) -> int:
    """Return the most bytes that tensors hold while a sound is encoded: its features in float32 and in the tower's
    type, and the widest point of transformers' code for the frames that are encoded at once.

    size: bytes of a number in the tower.
    """
    width, states = hearing.width * size, at_once // 2  # the first layers halve the frames
    features = frames * hearing.num_mels * (4 + (size if size < 4 else 0))
    mlp = states * (4 * width + 2 * hearing.mlp_width * size)
    if hearing.channels and not hearing.piece:  # two convolutions halve both; attention is in float32
        states, pairs = at_once // 4, (at_once // 4) ** 2
        front = 3 * (at_once // 2) * (hearing.num_mels // 2) * hearing.channels * size
        layer = states * (2 * hearing.mlp_width * size + 16 * hearing.width * 4)
        return features + max(front, layer + 3 * pairs * size)
    if hearing.channels:  # convolutions over frames and mels halve both, three times
        front = at_once * hearing.num_mels // 4 * hearing.channels * 2 * size
        return features + max(front, mlp // 4)
    if hearing.piece:  # attention without a mask holds no pairs
        return features + mlp
    # biases by distance are added to the scores of pairs, which are in float32
    pairs = states * (4 * hearing.context * hearing.heads * 4 + 7 * width)
    return features + max(mlp, pairs + hearing.context**2 * width // hearing.heads)


def why_deaf(spec: ModelSpec, config: EngineConfig, *, on_gpu: bool) -> str:
    """Return why the tower of a model that hears is not loaded, as sentences; empty if it is, or there is none."""
    if spec.hearing is not None and not config.most_media("audio"):
        return "Without sound: --limit-mm-per-prompt audio=0."
    if spec.hearing is not None and config.deterministic and not on_gpu:
        return "Without sound: sound is not supported with --deterministic on a CPU."
    return ""


class EncoderSizes(NamedTuple):
    """The memory of all encoders of a model: towers take turns."""

    rows: int  # of the largest input
    kept_rows: int
    tower_bytes: int
    encode_bytes: int
    kept_bytes: int

    @staticmethod
    def of(sizes: Sequence[PictureSizes | SoundSizes | SourceSizes]) -> EncoderSizes | None:
        """Return the sizes of encoders whose rows are kept in one store; None: there are none."""
        if not sizes:
            return None
        return EncoderSizes(
            max(each.rows for each in sizes), max(each.kept_rows for each in sizes),
            sum(each.tower_bytes for each in sizes), max(each.encode_bytes for each in sizes),
            max(each.kept_bytes for each in sizes),
        )  # fmt: skip


SOURCE_TOKENS = 4096
"""Tokens of encoded prompts that an encoder-decoder keeps, if the longest prompt is not longer."""


@dataclass(frozen=True, slots=True)
class SourceSizes:
    """The memory that the prompts of an encoder-decoder take in one engine."""

    rows: int  # of the longest prompt, in whole blocks
    kept_rows: int  # of encoded prompts
    tower_bytes: int  # of the encoder
    encode_bytes: int  # of the longest prompt's activations
    kept_bytes: int
    not_used: tuple[str, ...]

    def note(self) -> str:
        """Return the sizes in words, and which wishes of the checkpoint are not used."""
        wishes = "; ".join(self.not_used)
        asked = f" generation_config.json asks for {wishes}, which only requests choose (use_beam_search, n)."
        return (
            f"Prompts: the encoder takes {format_bytes(self.tower_bytes)}, and {format_bytes(self.encode_bytes)} while "
            f"it reads {format_count(self.rows)} tokens; {format_bytes(self.kept_bytes)} keep "
            f"{format_count(self.kept_rows)} encoded tokens.{asked if wishes else ''}"
        )


def source_sizes(spec: ModelSpec, dtype: str, block_size: int) -> SourceSizes | None:
    """Return the sizes of an encoder-decoder's prompts; None: another model."""
    if spec.source is None:
        return None
    size, length = DTYPE_BYTES[dtype], -(-spec.source.max_length // block_size) * block_size
    kept = max(length, SOURCE_TOKENS // block_size * block_size)
    width = 12 * spec.hidden_size + 7 * spec.intermediate_size // 2
    encode = length * width * size + 2 * spec.num_heads * length**2 * 4
    tower = spec.source.encoder_bytes * size // 4
    kept_bytes = (kept + block_size) * kv_numbers_per_token(spec) * size
    return SourceSizes(length, kept, tower, encode, kept_bytes, spec.source.not_used)


def why_text_only(spec: ModelSpec, config: EngineConfig, *, first_layers: int, on_gpu: bool) -> str:
    """Return why the tower of a model that has one is not loaded, as sentences; empty if it is.

    first_layers: layers of the first pipeline stage.
    """
    if spec.vision is None:
        return f"Text only: {spec.why_unseeing}" if spec.why_unseeing else ""
    if not config.most_media("image"):
        return "Text only: --limit-mm-per-prompt image=0."
    if first_layers < spec.vision.deep:
        why = f"its pictures are read by the first {spec.vision.deep} layers, and the first stage has {first_layers}"
        return f"Text only: {why}."
    if config.deterministic and not on_gpu:
        return "Text only: pictures are not supported with --deterministic on a CPU."
    return ""


def picture_sizes(
    spec: ModelSpec, config: EngineConfig, dtype: str, batched_tokens: int, most_tokens: int | None = None
) -> PictureSizes:
    """Return the sizes for pictures of at most `most_tokens` tokens; None: as many as the settings say."""
    vision = spec.vision
    assert vision is not None, "a model without a tower"
    limits, asked = vision.limits, config.image_max_tokens
    if family_of(vision).scales:
        context = min(config.max_model_len or spec.max_position, spec.max_position)
        most = min(limits.max_tokens, MOST_TOKENS, max(context - TEXT_TOKENS, context // 2)) if asked is None else asked
        most = most if most_tokens is None else min(most, most_tokens)
        least = limits.min_tokens if config.image_min_tokens is None else config.image_min_tokens
        limits = replace(limits, min_tokens=min(least, most), max_tokens=most)
    size = 4 if dtype == "float16" else DTYPE_BYTES[dtype]  # towers overflow in float16
    encode = encode_bytes(vision, spec.hidden_size, limits.max_tokens, size, on_cpu=config.device == "cpu")
    rows = max(limits.max_tokens, batched_tokens)
    kept = rows * (1 + vision.deep) * spec.hidden_size * DTYPE_BYTES[dtype]
    return PictureSizes(limits, rows, vision.tower_bytes * size // 4, encode, kept)


def encode_bytes(vision: VisionSpec, hidden_size: int, rows: int, size: int, *, on_cpu: bool) -> int:
    """Return the most bytes that tensors hold while a picture of `rows` tokens is encoded: its pixels, and the widest
    point of transformers' code, which is in attention, in a feed-forward part or at the end.

    hidden_size: of the decoder; size: bytes of a number in the tower.
    """
    family, width = family_of(vision), vision.width * size
    held, patches = family.held, rows * vision.merge**2
    if vision.tile_patches:
        tiles = -(-rows // max(1, vision.tile_tokens)) if family.scales else vision.limits.max_tiles
        patches = vision.tile_patches * (tiles + (not family.scales and tiles > 1))
    at_once = min(patches, vision.tile_patches * TILES_AT_ONCE) if family.per_tile and on_cpu else patches
    frames = 2 if vision.grids else 1  # Qwen's processors make two of a picture
    colours, other = 3 * vision.patch**2 * frames, held.per_pixel * vision.patch**2
    pixels = patches * (4 * colours + other + (size * colours if size < 4 else 0))  # also in the tower's type
    pixels += at_once * (size * colours + other) if held.copies_tiles else 0
    attention, mlp = held.attention * width, held.mlp * width + vision.mlp_tensors * vision.mlp_width * size
    if vision.grids and size < 4:  # q and k are rotated in float32
        attention = max(attention, 5 * width + 6 * 4 * vision.width)
    if not vision.layers:  # normalised patches, one product, and positions that are added in float32
        attention, mlp = size * colours + width, 3 * 4 * vision.width
    pairs = at_once**2 if vision.layers else 0
    attention = attention * at_once + (pairs * size if held.mask == "bool" else 0)  # it is widened
    kept = int(vision.kept_tensors * width + vision.kept_bytes) * at_once
    kept += pairs * {"": 0, "bool": 1, "added": size}[held.mask] + rows * vision.deep * hidden_size * size
    end = rows * held.projected * (1 + vision.deep) * hidden_size * size + 2 * at_once * width
    return pixels + max(kept + attention, kept + mlp * at_once, end)


def most_tokens_to_try(spec: ModelSpec, config: EngineConfig) -> Iterator[int | None]:
    """Yield the tokens of the largest picture to plan for, the most first."""
    yield None
    assert spec.vision is not None
    if config.image_max_tokens is None and family_of(spec.vision).scales:
        yield from (count for count in FEWER_TOKENS if count < spec.vision.limits.max_tokens)


def with_tower(path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the bytes of its tower, or of its encoder. Without the tower if transformers cannot build
    it."""
    if spec.source is not None:
        from localllm.models.encoders.source import with_encoder_bytes

        return with_encoder_bytes(path, spec)
    if spec.vision is None and spec.hearing is None:
        return spec
    import torch

    from localllm.models.vision.tower import sound_tower_bytes, tower_bytes

    try:
        if spec.hearing is not None and not spec.hearing.tower_bytes:
            found = sound_tower_bytes(path, spec.hearing, torch.float32)
            spec = replace(spec, hearing=replace(spec.hearing, tower_bytes=found))
        if spec.vision is not None and not spec.vision.tower_bytes:
            found = tower_bytes(path, spec.vision, torch.float32)
            spec = replace(spec, vision=replace(spec.vision, tower_bytes=found))
    except DoesNotFit:
        raise
    except ModelError as error:
        return replace(spec, vision=None, hearing=None, why_unseeing=f"{error.what} {error.why}")
    return spec
