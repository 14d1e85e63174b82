"""Prompts with pictures: inputs that an encoder has made, positions to rotate by, and limits of what tokens see.

    GivenRows      the rows of one span of a prompt: prompt embeddings, or a picture that is looked up by its digest
    SlotGiven      the spans of one slot, with the positions to rotate by and the limits of what each token sees
    PictureEncoder the tower, and the encoded pictures that the scheduler keeps (engine/media.py)

Positions of a picture with a grid, after Qwen2-VL (arXiv:2409.12191): its tokens have one time, and a row and a column
each; the text behind it goes on after the larger side. Elsewhere all three are the place in the prompt plus a shift.
Does not know: how a tower computes, which pictures are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.media import MediaSpan
from localllm.models.inputs import GivenEmbeds
from localllm.models.vision.tower import Towers

if TYPE_CHECKING:
    from localllm.engine.step import StepPlan

Ints = npt.NDArray[Any]


class PictureEncoder:
    """A tower, and the rows of the pictures that it has encoded. digest -> [rows, (1 + deep) * hidden]"""

    def __init__(self, tower: Towers, hidden_size: int, dtype: torch.dtype) -> None:
        """hidden_size, dtype: of the decoder's stream."""
        self.tower, self.hidden_size, self.dtype = tower, hidden_size, dtype
        self.rows: dict[bytes, Tensor] = {}
        self.row_s = tower.expected_row_s()

    def apply(self, plan: StepPlan) -> None:
        """Drop what the plan drops, then encode what it encodes."""
        for digest in plan.dropped:
            self.rows.pop(digest, None)
        for encode in plan.encodes:
            rows = self.tower.encode(encode.inputs.pixels()).to(self.dtype)
            assert len(rows) == encode.rows, f"the tower made {len(rows)} rows of a picture of {encode.rows}"
            self.rows[encode.digest] = rows

    def clear(self) -> None:
        self.rows.clear()


class GivenRows(NamedTuple):
    """Places of a prompt whose input is given. n: places."""

    places: Ints  # [n] int64 ascending
    values: Tensor | None  # [n, hidden] on the host; None: rows of the picture `digest`
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotGiven:
    """The given parts of one slot's prompt."""

    spans: tuple[GivenRows, ...]
    rotary: Ints | None = None  # [3, prompt] int64: time, row, column; None: the places themselves
    shift: int = 0  # of the places behind the prompt
    key_limits: Ints | None = None  # [prompt] int32: first key that a token does not see; None: the one behind its own

    @staticmethod
    def of_pictures(prompt_len: int, media: Sequence[MediaSpan]) -> SlotGiven:
        spans = []
        for span in media:
            offsets = np.arange(span.rows) if span.places is None else np.array(span.places)
            spans.append(GivenRows(span.start + offsets, None, span.digest))
        rotary, shift = rotary_positions(prompt_len, media) if any(span.grid for span in media) else (None, 0)
        return SlotGiven(tuple(spans), rotary, shift, key_limits(prompt_len, media))

    def rows(self, first: int, end: int, encoded: Mapping[bytes, Tensor]) -> tuple[Ints, list[Tensor]]:
        """Return the given places within [first, end), and their rows."""
        places, values = list[Ints](), list[Tensor]()
        for span in self.spans:
            low, high = np.searchsorted(span.places, (first, end)).tolist()
            if low < high:
                held = span.values
                if held is None:
                    held = encoded[span.digest]
                places.append(span.places[low:high])
                values.append(held[low:high])
        return (np.concatenate(places) if places else np.empty(0, np.int64)), values


def rotary_positions(prompt_len: int, media: Sequence[MediaSpan]) -> tuple[Ints, int]:
    """Return the positions [3, prompt] of a prompt's tokens, and the shift of the places behind it."""
    rotary = np.broadcast_to(np.arange(prompt_len), (3, prompt_len)).copy()
    shift = 0
    for span in media:
        if span.grid is None:
            continue
        rows, columns = span.grid
        at = span.start + shift
        rotary[0, span.start : span.end] = at
        rotary[1, span.start : span.end] = at + np.repeat(np.arange(rows), columns)
        rotary[2, span.start : span.end] = at + np.tile(np.arange(columns), rows)
        shift += max(rows, columns) - (span.end - span.start)
        rotary[:, span.end :] = np.arange(span.end, prompt_len) + shift
    return rotary, shift


def key_limits(prompt_len: int, media: Sequence[MediaSpan]) -> Ints | None:
    """Return [prompt] int32: the first key that each token does not see; None if no picture attends both ways."""
    if not any(span.both_ways for span in media):
        return None
    limits = np.arange(1, prompt_len + 1, dtype=np.int32)
    for span in media:
        if span.both_ways:
            limits[span.start : span.end] = span.end
    return limits


def joined(places: Sequence[Ints], values: Sequence[Tensor], deep_from: int | None) -> GivenEmbeds | None:
    """Return what is given for a step. values: [*, (1 + deep) * hidden] of each part. deep_from: first column of what
    is added behind layers; None: no column is."""
    if not values:
        return None
    at, rows = torch.from_numpy(np.concatenate(places)), torch.cat(list(values))
    deep = rows[:, deep_from:] if deep_from is not None and rows.shape[1] > deep_from else None
    return GivenEmbeds(at, rows[:, :deep_from], deep)
