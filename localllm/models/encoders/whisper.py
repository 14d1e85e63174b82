"""Whisper: an encoder of 30 s of sound, and a decoder that writes text with timestamps (Radford et al. 2022).

The encoder is transformers' module. The decoder is localllm's own and writes windows side by side (speech_rows.py).
Rules of the paper decide what may be written next (`restrict`), and whether a window is written again with more chance
(`Attempt.is_accepted`).

    <|startofprev|> text before <|startoftranscript|><|en|><|transcribe|><|0.00|> a text<|1.24|><|1.24|> more<|2.00|>

Does not know: files, windows, words, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.encoders.source import HeldAs, SourceEncoder, load_encoder
from localllm.models.encoders.speech_rows import Read, WrittenText, draw_text, search_text
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend.config_class import load_config

RATE, WINDOW_S, HOP, FFT = 16_000, 30, 160, 400
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures of the attempts at a window, until one is accepted."""
FORGOTTEN = 0.5
"""A text that was written above this temperature is not read before the next window."""
FIRST_TIME_S = 1.0
"""Latest time of the first timestamp, unless generation_config.json has another one."""


class Thresholds(NamedTuple):
    """Bounds that decide whether a window is written again, or left empty."""

    least_logprob: float = -1.0  # mean log probability of an accepted text
    most_ratio: float = 2.4  # compression ratio of an accepted text
    silence: float = 0.6  # probability of no speech from which on a window is empty, if its text is not likely


class Decoding(NamedTuple):
    """The way in which a window is written."""

    language: str | None = None  # code, such as en; None: the model finds it
    translate: bool = False  # into English
    prompt: tuple[int, ...] = ()  # tokens of a text before the window: its names, its style
    temperatures: tuple[float, ...] = TEMPERATURES
    seed: int = 0
    words: bool = False  # with the times of tokens
    beams: int = 1  # partial texts of a search at temperature 0
    most_tokens: int | None = None  # of a window; None: as many as the decoder has positions
    thresholds: Thresholds = Thresholds()
    reads_previous: bool = False  # the text of the windows before, as a prompt

    def after(self, text: SpokenText) -> Decoding:
        """Return how the next window is written."""
        if not self.reads_previous or text.temperature > FORGOTTEN:
            return self
        ids = tuple(token for segment in text.segments for token in segment.token_ids)
        return self._replace(prompt=(*self.prompt, *ids))


class AlignedToken(NamedTuple):
    start_s: float  # within its window
    stop_s: float
    probability: float


class SpokenSegment(NamedTuple):
    token_ids: tuple[int, ...]  # of text, without timestamps
    start_s: float  # within its window
    stop_s: float
    logprobs: tuple[float, ...] = ()  # of each token
    tokens: tuple[AlignedToken, ...] = ()  # with times within the segment; none: they were not asked for


class SpokenText(NamedTuple):
    """The text of a window; no segments: no speech."""

    language: str
    segments: tuple[SpokenSegment, ...]
    temperature: float
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that are not text, of generation_config.json."""

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]  # by code; empty: a model of English alone
    tasks: Mapping[str, int]
    before: int | None  # before the text before a window
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    latest_first: int  # steps of the latest first timestamp
    most_prompt: int  # tokens of the text before a window that are read, the last ones; 0: none
    alignment_heads: tuple[
        tuple[int, int], ...
    ] = ()  # (layer, head) that attend to the sound of a token; none: unknown

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @staticmethod
    def of(config: Mapping[str, Any], positions: int, path: Path) -> SpecialTokens:
        """Read generation_config.json. positions: tokens of the decoder's context. Raises `UnsupportedModel` if
        Whisper's fields are missing."""
        needed = ("decoder_start_token_id", "eos_token_id", "no_timestamps_token_id")
        if missing := [name for name in needed if not isinstance(config.get(name), int)]:
            why = f"It lacks {', '.join(missing)}, as the first Whisper checkpoints on the hub did."
            raise UnsupportedModel(
                f"{path / 'generation_config.json'} is not complete.", why, "Download a newer revision of the model."
            )
        languages = {name.strip("<|>"): number for name, number in (config.get("lang_to_id") or {}).items()}
        return SpecialTokens(
            config["decoder_start_token_id"], config["eos_token_id"], config["no_timestamps_token_id"],
            languages if config.get("is_multilingual", bool(languages)) else {}, config.get("task_to_id") or {},
            config.get("prev_sot_token_id"),
            tuple(token for token in config.get("suppress_tokens") or () if token >= 0),  # -1 once meant none
            tuple(config.get("begin_suppress_tokens") or ()),
            int(config.get("max_initial_timestamp_index") or FIRST_TIME_S / 0.02),
            positions // 2 - 1 if config.get("prev_sot_token_id") is not None else 0,
            tuple((layer, head) for layer, head in config.get("alignment_heads") or ()),
        )  # fmt: skip

    def prompt(self, asked: Decoding, language: str) -> list[int]:
        """Return the tokens before a window's text."""
        before = [self.before, *asked.prompt[-self.most_prompt :]] if asked.prompt and self.before is not None else []
        task = [self.tasks["translate" if asked.translate else "transcribe"]] if self.languages else []
        return [*before, self.start, *([self.languages[language]] if self.languages else []), *task]


def restrict(logits: Tensor, texts: Sequence[Sequence[int]], special: SpecialTokens) -> Tensor:
    """Return logits [B, V] fp32 in which a token that may not follow is -inf. texts: the tokens of each row so far.

    Timestamps come in pairs, except before the end, and never go back. The first token is a timestamp. If timestamps
    together are likelier than each text token, a timestamp follows.
    """
    first, no = special.first_time, float("-inf")
    logits = logits.clone()
    logits[:, [*special.suppressed, special.no_timestamps]] = no
    for row, text in zip(logits, texts, strict=True):
        if not text:
            row[list(special.suppressed_first)] = no
            row[:first] = no
            row[first + special.latest_first + 1 :] = no
            continue
        is_time, was_time = text[-1] >= first, len(text) < 2 or text[-2] >= first
        newest = max(text)
        if is_time and was_time:
            row[first:] = no
        elif is_time:
            row[: special.end] = no
        if newest >= first:
            row[first : newest if is_time and not was_time else newest + 1] = no
        if row[first:].logsumexp(dim=-1) > row[:first].amax():
            row[:first] = no
    return logits


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a window."""

    text: WrittenText  # with timestamps
    no_speech_prob: float
    temperature: float
    thresholds: Thresholds = field(default_factory=Thresholds)

    def text_ids(self, special: SpecialTokens) -> list[int]:
        return [token for token in self.text.token_ids if token < special.end]

    @property
    def is_silent(self) -> bool:
        bounds = self.thresholds
        return self.no_speech_prob > bounds.silence and self.text.avg_logprob < bounds.least_logprob

    def is_accepted(self, ratio: float) -> bool:
        """Return whether no further attempt is made. ratio: the compression ratio of the text."""
        if self.is_silent:
            return True
        bounds = self.thresholds
        return not self.text.is_cut and self.text.avg_logprob >= bounds.least_logprob and ratio <= bounds.most_ratio


def segments_of(text: WrittenText, special: SpecialTokens, step_s: float, end_s: float) -> list[SpokenSegment]:
    """Return the texts between timestamps. end_s: of the window, where an open segment ends."""
    found, part, start_s = list[SpokenSegment](), list[tuple[int, float]](), 0.0
    for token, logprob in (*zip(text.token_ids, text.logprobs, strict=True), (None, 0.0)):
        if token is not None and token < special.first_time:
            part.append((token, logprob))
            continue
        time_s = max(start_s, end_s) if token is None else min((token - special.first_time) * step_s, end_s)
        if part:
            ids, logprobs = zip(*part, strict=True)
            found.append(SpokenSegment(ids, start_s, time_s, logprobs))
        part, start_s = [], time_s
    return found


def align(costs: npt.NDArray[np.float64]) -> list[int]:
    """Return for each row of costs [rows, columns] the column where it starts on the cheapest path from the first cell
    to the last, which never goes back (dynamic time warping)."""
    rows, columns = costs.shape
    steps = np.zeros((rows + 1, columns + 1), np.uint8)  # how a cell is reached: 0 from both, 1 from above, 2 from left
    steps[0], steps[:, 0] = 2, 1
    # Cells of an antidiagonal depend on the two before it alone. They are kept by row.
    older, old = np.full(rows + 1, np.inf, np.float32), np.full(rows + 1, np.inf, np.float32)
    older[0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, above, left = older[i - 1], old[i - 1], old[i]
        steps[i, j] = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        new = np.full(rows + 1, np.inf, np.float32)
        new[i] = costs[i - 1, j - 1] + np.choose(steps[i, j], (both, above, left))
        older, old = old, new
    starts, i, j = [0] * rows, rows, columns
    while i > 0:
        if j > 0:
            starts[i - 1] = j - 1
        step = int(steps[i, j])
        i, j = i - (step != 2), j - (step != 1)
    return starts


class WhisperModel:
    """Whisper on one device."""

    kind = "whisper"

    def __init__(
        self, encoder: SourceEncoder, decoder: DecoderModel, special: SpecialTokens, device: torch.device
    ) -> None:
        from transformers.audio_utils import mel_filter_bank

        self.encoder, self.decoder, self.special, self.device = encoder, decoder, special, device
        config = self.config = encoder.module.config
        self.step_s: float = WINDOW_S / config.max_source_positions
        self.source_len, self.text_len = config.max_source_positions, config.max_target_positions
        heads = range(config.decoder_attention_heads)
        filters = mel_filter_bank(1 + FFT // 2, config.num_mel_bins, 0.0, RATE / 2, RATE, "slaney", "slaney")
        layers = range(config.decoder_layers // 2, config.decoder_layers)
        all_upper = ((layer, head) for layer in layers for head in heads)
        self._aligned: dict[int, list[int]] = {}
        for layer, head in special.alignment_heads or all_upper:
            self._aligned.setdefault(layer, []).append(head)
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T.astype(np.float32))).to(device)  # [mels, bins]

    @property
    def translates(self) -> bool:
        """Return whether the model was trained to translate: neither distilled models nor models of English were."""
        config = self.config
        return bool(self.special.languages) and config.decoder_layers == config.encoder_layers

    @torch.inference_mode()
    def features(self, windows: Sequence[npt.NDArray[np.int16]]) -> Tensor:
        """Return log-mel features [B, mels, 3000] fp32 of samples at 16 kHz."""
        x = torch.zeros(len(windows), RATE * WINDOW_S)
        for row, each in zip(x, windows, strict=True):
            row[: len(each)] = torch.from_numpy(each[: x.shape[1]].astype(np.float32) / 32768)
        spectrum = torch.stft(
            x.to(self.device), FFT, HOP, window=torch.hann_window(FFT, device=self.device), return_complex=True
        )
        mels = (self._filters @ spectrum[..., :-1].abs().square()).clamp(min=1e-10).log10()
        return (torch.maximum(mels, mels.amax(dim=(1, 2), keepdim=True) - 8.0) + 4.0) / 4.0

    def encode(self, samples: npt.NDArray[np.int16]) -> Tensor:
        """Return the states [S, hidden] of a window."""
        return self.states(self.features([samples]))[0]

    @torch.inference_mode()
    def states(self, features: Tensor) -> Tensor:
        """Return the encoder's states [B, S, hidden] of features [B, mels, 3000]."""
        encoder = self.encoder.module.get_encoder()
        states: Tensor = encoder(features.to(self.encoder.module.dtype)).last_hidden_state
        return states.to(self.decoder.dtype)

    def write(
        self, samples: npt.NDArray[np.int16], asked: Decoding, ratio_of: Callable[[Sequence[int]], float]
    ) -> Generator[Read, Tensor, SpokenText]:
        """Write a window: find its language, make attempts until one is accepted, and find the times of its tokens."""
        language, end_s = asked.language or (yield from self._language()), min(WINDOW_S, len(samples) / RATE)
        prompt = self.special.prompt(asked, language)
        for turn, temperature in enumerate(asked.temperatures):
            found = yield from self.attempt(prompt, temperature, asked.seed * 64 + turn, asked)
            if found.is_accepted(ratio_of(found.text_ids(self.special))):
                break
        segments = [] if found.is_silent else segments_of(found.text, self.special, self.step_s, end_s)
        if asked.words and segments:
            prompt = self.special.prompt(asked._replace(prompt=()), language)
            segments = yield from self._with_times(segments, prompt, end_s)
        return SpokenText(language, tuple(segments), temperature, found.text.avg_logprob, found.no_speech_prob)

    def _language(self) -> Generator[Read, Tensor, str]:
        """Return the likeliest language of a window."""
        if not self.special.languages:
            return "en"
        logits = (yield Read([[self.special.start]], 0))[0, 0]
        return list(self.special.languages)[int(logits[list(self.special.languages.values())].argmax())]

    def attempt(
        self,
        prompt: list[int],
        temperature: float,
        seed: int,
        asked: Decoding = Decoding(),  # noqa: B008
    ) -> Generator[Read, Tensor, Attempt]:
        """Write a window once. prompt: the tokens before its text."""
        logits = (yield Read([prompt], 0, (prompt.index(self.special.start), -1)))[0]
        silence = float(logits[0].softmax(dim=-1)[self.special.no_speech])
        most = min(self.text_len - len(prompt), asked.most_tokens or self.text_len)
        rule, first, ends = partial(restrict, special=self.special), len(prompt), (self.special.end,)
        if asked.beams > 1 and not temperature:
            text = yield from search_text(logits[1], first, ends, most, rule, asked.beams)
        else:
            text = yield from draw_text(logits[1], first, ends, most, rule, temperature, seed)
        if asked.most_tokens is not None and len(text.token_ids) == asked.most_tokens:
            text = text._replace(is_cut=False)  # as asked
        return Attempt(text, silence, temperature, asked.thresholds)

    def _with_times(
        self, segments: Sequence[SpokenSegment], prompt: list[int], end_s: float
    ) -> Generator[Read, Tensor, list[SpokenSegment]]:
        """Return the segments of a window with times of their tokens, by the attention of the alignment heads to the
        sound while the text is read once more, without timestamps. end_s: of the window."""
        ids = [token for segment in segments for token in segment.token_ids]
        tokens = [*prompt, self.special.no_timestamps, *ids]
        frames = min(max(1, round(end_s / self.step_s)), self.source_len)
        weights = list[Tensor]()

        def watch(layer: int, queries: Tensor, keys: Tensor) -> None:
            if heads := self._aligned.get(layer):
                kept = keys[heads, :frames]
                weights.append((queries[:, heads].transpose(0, 1) @ kept.mT / kept.shape[-1] ** 0.5).float())

        logits = (yield Read([tokens], 0, range(len(prompt), len(tokens) - 1), watch=watch))[0]
        # A row attends to what it predicts. The first rows have read the prompt alone, the last one predicts the end.
        likely = torch.cat(weights).softmax(dim=-1)  # [heads, rows, frames]
        spread = likely.std(dim=1, keepdim=True, unbiased=False).clamp(min=1e-9)
        likely = _median((likely - likely.mean(dim=1, keepdim=True)) / spread, self.config.median_filter_width)
        starts = align(-likely.mean(dim=0)[len(prompt) :].cpu().double().numpy())
        chances = logits[:, : self.special.end].softmax(dim=-1)
        found = chances.gather(1, torch.tensor(ids, device=self.device)[:, None])[:, 0].tolist()
        times, at, timed = [start * self.step_s for start in starts], 0, list[SpokenSegment]()
        for segment in segments:
            stop, low, high = at + len(segment.token_ids), segment.start_s, segment.stop_s
            inside = [min(max(each, low), high) for each in times[at : stop + 1]]
            spoken = tuple(map(AlignedToken, inside, inside[1:], found[at:stop]))
            timed.append(segment._replace(tokens=spoken))
            at = stop
        return timed


def _median(x: Tensor, width: int) -> Tensor:
    """Return the median of `width` values around each one along the last dimension; ends are mirrored."""
    if x.shape[-1] <= width // 2:
        return x
    padded: Tensor = F.pad(x, (width // 2, width // 2), mode="reflect")
    return padded.unfold(-1, width, 1).sort().values[..., width // 2]


def load_whisper(path: Path, device: torch.device, dtype: torch.dtype, held: HeldAs = HeldAs()) -> WhisperModel:  # noqa: B008
    """Load the model of folder `path`. Raises `CorruptModel`, `UnsupportedModel`."""
    config = load_config(path, trust_remote_code=False)
    file = path / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    special = SpecialTokens.of(generation, config.max_target_positions, path)
    if special.first_time >= config.vocab_size or any(each >= config.vocab_size for each in special.languages.values()):
        raise CorruptModel(f"{file} names tokens beyond the vocabulary.", f"It has {config.vocab_size} tokens.")
    file = path / "preprocessor_config.json"
    mels = (read_json_object(file) if file.is_file() else {}).get("feature_size", config.num_mel_bins)
    if mels != config.num_mel_bins:
        raise CorruptModel(f"{file} has {mels} features.", f"The encoder reads {config.num_mel_bins}.")
    decoder = load_model(path, read_spec(path), device, dtype, **held._asdict())
    assert isinstance(decoder, DecoderModel), "the decoder is localllm's own"
    return WhisperModel(load_encoder(path, device, dtype, held.of_sound(device)), decoder, special, device)
