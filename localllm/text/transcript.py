"""A transcript: words with their times, segments of words, and subtitles.

Does not know: sound, models, HTTP.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PAUSE_S = 0.8
"""A longer pause ends a segment."""
SENTENCE_S, LONGEST_S = 3.0, 10.0
"""A segment ends with a sentence after the first, and with any word after the second."""
ENDS = (".", "?", "!", "。", "？", "！")
LINE_CHARS, CUE_LINES, CUE_S = 42, 2, (1.0, 7.0)
"""Characters of a line, lines of a subtitle, and its shortest and longest time."""


class TimedToken(NamedTuple):
    token_id: int
    start_s: float
    stop_s: float
    probability: float


@dataclass(frozen=True, slots=True)
class Word:
    text: str  # without spaces around it
    start_s: float
    stop_s: float
    probability: float  # mean of its tokens
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def start_s(self) -> float:
        return self.words[0].start_s

    @property
    def stop_s(self) -> float:
        return self.words[-1].stop_s


@dataclass(frozen=True, slots=True)
class Transcript:
    """The words of a whole sound."""

    words: list[Word]
    segments: list[TranscriptSegment]
    seconds: float  # of the sound, pauses included
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def words_of(
    tokens: Sequence[TimedToken], decode: Callable[[Sequence[int]], str], begins_word: Callable[[int], bool]
) -> list[Word]:
    """Return the words of the tokens of one window. decode: text of token ids. begins_word: whether a token has a space
    before it."""
    groups: list[list[TimedToken]] = []
    for token in tokens:
        if groups and not begins_word(token.token_id):
            groups[-1].append(token)
        else:
            groups.append([token])
    words: list[Word] = []
    for group in groups:
        ids = tuple(token.token_id for token in group)
        if text := decode(ids).strip():
            mean = sum(token.probability for token in group) / len(group)
            words.append(Word(text, group[0].start_s, max(token.stop_s for token in group), mean, ids))
    return words


def segments_of(words: Iterable[Word]) -> list[TranscriptSegment]:
    """Return segments, which end at pauses, at the ends of sentences, and before they are too long."""
    segments: list[TranscriptSegment] = []
    current: list[Word] = []
    for word in words:
        if current:
            lasts_s = word.stop_s - current[0].start_s
            is_sentence = current[-1].text.endswith(ENDS) and current[-1].stop_s - current[0].start_s >= SENTENCE_S
            if is_sentence or word.start_s - current[-1].stop_s > PAUSE_S or lasts_s > LONGEST_S:
                segments.append(TranscriptSegment(tuple(current)))
                current = []
        current.append(word)
    return [*segments, TranscriptSegment(tuple(current))] if current else segments


class Cue(NamedTuple):
    start_s: float
    stop_s: float
    text: str


def cues_of(segments: Iterable[TranscriptSegment]) -> list[Cue]:
    """Return subtitles of at most two lines, which do not overlap."""
    cues: list[Cue] = []
    for segment in segments:
        current: list[Word] = []
        for word in segment.words:
            if current:
                lines = textwrap.wrap(" ".join(each.text for each in (*current, word)), LINE_CHARS)
                if len(lines) > CUE_LINES or word.stop_s - current[0].start_s > CUE_S[1]:
                    cues.append(_cue(current))
                    current = []
            current.append(word)
        cues.append(_cue(current))
    bounds = [*(cue.start_s for cue in cues[1:]), float("inf")]
    return [
        Cue(cue.start_s, min(max(cue.stop_s, cue.start_s + CUE_S[0]), bound), cue.text)
        for cue, bound in zip(cues, bounds, strict=True)
    ]


def _cue(words: Sequence[Word]) -> Cue:
    lines = textwrap.wrap(" ".join(word.text for word in words), LINE_CHARS)
    return Cue(words[0].start_s, words[-1].stop_s, "\n".join(lines))


def srt(segments: Iterable[TranscriptSegment]) -> str:
    """Return the subtitles as SubRip."""
    cues = enumerate(cues_of(segments), 1)
    return "\n".join(f"{i}\n{_time(c.start_s, ',')} --> {_time(c.stop_s, ',')}\n{_safe(c.text)}\n" for i, c in cues)


def vtt(segments: Iterable[TranscriptSegment]) -> str:
    """Return the subtitles as WebVTT."""
    cues = (
        f"{_time(c.start_s, '.')} --> {_time(c.stop_s, '.')}\n"
        f"{_safe(c.text.replace('&', '&amp;').replace('<', '&lt;'))}\n"
        for c in cues_of(segments)
    )
    return "\n".join(("WEBVTT\n", *cues))


def _safe(text: str) -> str:
    return text.replace("-->", "->")


def _time(seconds: float, comma: str) -> str:
    total_ms = round(seconds * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{comma}{ms % 1000:03}"
