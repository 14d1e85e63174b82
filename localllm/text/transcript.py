"""A transcript: words with their times, segments of words, and subtitles.

Does not know: sound, models, HTTP.
"""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PAUSE_S = 0.8
"""A longer pause ends a segment."""
SENTENCE_S, LONGEST_S = 3.0, 10.0
"""A segment ends with a sentence after the first, and with any word after the second."""
ENDS = (".", "?", "!", "。", "？", "！")
UNSPACED = ("zh", "yue", "ja", "th", "lo", "my", "km")
"""Languages that are written without spaces."""
LINE_CHARS, CUE_LINES, CUE_S = 42, 2, (1.0, 7.0)
"""Characters of a line, lines of a subtitle, and its shortest and longest time."""


FORMATS = {
    "text": "text/plain; charset=utf-8",
    "json": "application/json",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
    "verbose_json": "application/json",
}
"""Formats in which a transcript is written, and their media types."""


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
    logprobs: tuple[float, ...] = ()  # of its tokens


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A sentence or so, with what its model says of it."""

    text: str  # without spaces around it
    start_s: float
    stop_s: float
    token_ids: tuple[int, ...]
    avg_logprob: float
    words: tuple[Word, ...] = ()  # none: the model has no times for words
    temperature: float = 0.0
    no_speech_prob: float = 0.0
    logprobs: tuple[float, ...] = ()  # of the tokens

    @staticmethod
    def of(words: Sequence[Word]) -> TranscriptSegment:
        """Return the segment of some words."""
        logprobs = [math.log(max(word.probability, 1e-10)) for word in words]
        return TranscriptSegment(
            " ".join(word.text for word in words),
            words[0].start_s,
            words[-1].stop_s,
            tuple(token for word in words for token in word.token_ids),
            sum(logprobs) / len(logprobs),
            tuple(words),
            logprobs=tuple(logprob for word in words for logprob in word.logprobs),
        )

    @property
    def spoken(self) -> tuple[Word, ...]:
        """The words; without times of their own each takes the share of the segment's time that its letters have."""
        if self.words:
            return self.words
        parts, at, words = self.text.split(), 0, list[Word]()
        share_s = (self.stop_s - self.start_s) / max(1, sum(map(len, parts)))
        for part in parts:
            bounds = self.start_s + at * share_s, self.start_s + (at + len(part)) * share_s
            words.append(Word(part, *bounds, math.exp(self.avg_logprob), ()))
            at += len(part)
        return tuple(words)


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a whole sound."""

    segments: list[TranscriptSegment]
    seconds: float  # of the sound, pauses included
    warnings: tuple[str, ...] = ()
    language: str = ""  # code; empty: not known
    is_translated: bool = False

    @property
    def text(self) -> str:
        return joined((segment.text for segment in self.segments), self.language)

    @property
    def words(self) -> list[Word]:
        """The words with their times; none from a model without times for words."""
        return [word for segment in self.segments for word in segment.words]

    @property
    def timed_text(self) -> str:
        """The text with a line for each segment, which begins with the time: [1:02:03]."""
        starts = [divmod(int(segment.start_s), 60) for segment in self.segments]
        clocks = [f"{m // 60}:{m % 60:02}:{s:02}" if m >= 60 else f"{m}:{s:02}" for m, s in starts]
        return "\n".join(f"[{at}] {segment.text}" for at, segment in zip(clocks, self.segments, strict=True))


def joined(texts: Iterable[str], language: str) -> str:
    """Return texts as one, with spaces between them if the language has spaces."""
    return ("" if language in UNSPACED else " ").join(texts)


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
            logprobs = tuple(math.log(max(token.probability, 1e-10)) for token in group)
            words.append(Word(text, group[0].start_s, max(token.stop_s for token in group), mean, ids, logprobs))
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
                segments.append(TranscriptSegment.of(current))
                current = []
        current.append(word)
    return [*segments, TranscriptSegment.of(current)] if current else segments


def compression_ratio(text: str) -> float:
    """Return how many times shorter zlib makes a text: much where a text repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


class Cue(NamedTuple):
    start_s: float
    stop_s: float
    text: str


def cues_of(segments: Iterable[TranscriptSegment]) -> list[Cue]:
    """Return subtitles of at most two lines, which do not overlap."""
    cues: list[Cue] = []
    for segment in segments:
        current: list[Word] = []
        for word in segment.spoken:
            if current:
                lines = textwrap.wrap(" ".join(each.text for each in (*current, word)), LINE_CHARS)
                if len(lines) > CUE_LINES or word.stop_s - current[0].start_s > CUE_S[1]:
                    cues.append(_cue(current))
                    current = []
            current.append(word)
        if current:
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
