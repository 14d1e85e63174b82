"""The parts of a model that read pictures and sound, as its config.json describes them.

A picture or a sound becomes `rows` input embeddings at the places of a placeholder token. Which modules make them is in
models/vision/; what differs between families is in models/vision/families.py and in models/vision/sound.py.
Does not know: torch, pixels, samples, files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Level = Literal["auto", "low", "high", "original"]
"""How finely a picture is read, by OpenAI's names."""


class Detail(NamedTuple):
    """The wishes of a request for one picture."""

    level: Level = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    options: tuple[tuple[str, Any], ...] = ()  # mm_processor_kwargs, sorted by name


AUTO = Detail()


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The sizes of pictures that are read. Token counts are rows of one picture."""

    min_tokens: int
    max_tokens: int
    px_per_token: int = 0  # pixels that become one token; 0: the count does not follow from the size alone
    max_tiles: int = 1  # most parts that a large picture is cut into, without the overview

    @property
    def is_fixed(self) -> bool:
        """Return whether each picture takes the same number of tokens."""
        return self.min_tokens == self.max_tokens


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The tower of a model that sees, and how its rows enter the decoder."""

    model_type: str  # of config.json, e.g. qwen2_5_vl
    placeholder_id: int  # token whose embedding a picture's row replaces
    marks: tuple[str, ...]  # special texts of the family that stand for pictures or surround them
    limits: ImageLimits
    merge: int = 1  # patches of a side that become one token
    deep: int = 0  # further rows for each token, which are added behind the first decoder layers
    both_ways: bool = False  # tokens of a picture attend to all of the picture
    windowed_only: bool = False  # of `both_ways`: in windowed layers alone (Gemma 4)
    grids: bool = False  # positions have a time, a row and a column
    patch: int = 14  # pixels of a patch's side
    width: int = 0  # hidden size of the tower
    mlp_width: int = 0  # of its feed-forward parts
    mlp_tensors: int = 2  # [patches, mlp_width] that a feed-forward part holds at once
    kept_tensors: float = 0  # [patches, width] that are held through all layers, besides the residual stream
    kept_bytes: int = 0  # of a patch, as long: positions and rotations that do not have the tower's type
    layers: int = 0
    tile_tokens: int = 0  # rows of one tile, where pictures are squares or are cut into tiles; 0: they are not
    tile_patches: int = 0  # patches of one tile
    most_shown_tiles: int = 0  # tiles' worth of rows to which a picture is reduced; 0: it is not (LLaVA-OneVision)
    usual_tokens: int = 0  # most tokens of a picture unless a request asks for more; 0: as many as are allowed
    projector: str = ""  # GGUF file of the tower; empty: its tensors are among the model's
    tower_bytes: int = 0  # of the tower in float32; 0: not counted yet (models/fit/pictures.py)


@dataclass(frozen=True, slots=True)
class HearingSpec:
    """The tower of a model that hears, and how its rows enter the decoder. A frame is 10 ms of sound."""

    model_type: str  # of config.json, e.g. voxtral
    placeholder_id: int  # token whose embedding a row of sound replaces
    num_mels: int
    width: int  # hidden size of the tower
    mlp_width: int  # of its feed-forward parts
    layers: int
    heads: int
    chunk: int = 3000  # frames that are encoded by themselves; a sound is padded to a multiple of them
    piece: int = 3000  # frames that the tower reads at once, a multiple of `chunk`; 0: the whole sound
    chunk_rows: int = 375  # rows of a whole chunk
    context: int = 0  # frames of the tower that attend to each other; 0: all of a piece
    channels: int = 0  # of the convolutions on the spectrogram; 0: they run along the time alone
    adapter: str = ""  # folder of the LoRA adapter that prompts with sound use; empty: there is none
    tower_bytes: int = 0  # of the tower in float32; 0: not counted yet (models/fit/pictures.py)
