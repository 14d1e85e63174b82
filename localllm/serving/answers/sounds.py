"""Sounds of a request, as `pictures.py` has its pictures, and both together: what a model reads beside text.

A part names its sound by base64, a data URL, a web address, or samples. `look` decodes it on a thread, since the length
of a header is a claim; the number of tokens is remembered by the file's content, so that the next turns of a chat
decode nothing. Features are computed when an answer is generated. The latest ones are kept.
Does not know: any dialect, how sound becomes rows (models/vision), HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.engine.adapter import Adapter
from localllm.engine.media import MediaSpan, spans_of
from localllm.errors import InvalidParameter, MediaTooLarge, UnreadableMedia
from localllm.media.source import Fetcher, of_base64, of_data_url
from localllm.serving.answers.pictures import (
    IN_FLIGHT_BYTES,
    PicturePart,
    PromptIds,
    Seen,
    Sight,
    fetching,
    on_threads,
    run_behind_steps,
)
from localllm.text.messages import MediaMarks, Message
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.media.sound import Samples, SoundLimits
    from localllm.models.vision.sound import ProcessedSound, SoundLayout, SoundProcessor

SOUND_PARTS = ("input_audio", "audio_url", "audio")
"""Types of parts that are sound, in the words of clients."""
KEPT_BYTES = 128 * 2**20
"""Features that are kept for later requests."""
KEPT_LENGTHS = 10_000
_decoding = ThreadPoolExecutor(2, thread_name_prefix="localllm-sounds", initializer=run_behind_steps)


@dataclass(frozen=True, slots=True)
class SoundPart:
    """A sound of a message."""

    where: str  # its path in the request
    url: str = field(default="", repr=False)  # data:, http: or https:
    base64: str = field(default="", repr=False)  # a file, in place of a URL
    data: bytes = field(default=b"", repr=False)  # the same, decoded
    samples: Samples | None = None  # in place of a file

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the sound has to be downloaded."""
        return bool(self.url) and self.url[:5].lower() != "data:"


@dataclass(frozen=True, slots=True)
class Listened:
    """A sound whose length is known."""

    part: SoundPart
    data: bytes
    key: bytes  # of its content
    seconds: float
    layout: SoundLayout
    samples: Samples | None  # None: decoded again when they are needed


@dataclass(frozen=True, slots=True, eq=False)
class Hearing:
    """The part of a served model that reads sound."""

    processor: SoundProcessor
    fetcher: Fetcher
    limits: SoundLimits  # of files, and of what the model reads at once
    most_sounds: int  # of a request
    adapter: Adapter | None = None  # that prompts with sound use; None: there is none
    _kept: OrderedDict[bytes, ProcessedSound] = field(default_factory=OrderedDict)
    _lengths: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # samples, by content
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _in_flight: list[int] = field(default_factory=list)  # bytes of the features of running requests

    def part(self, given: Mapping[str, Any], where: str) -> Message:
        """Return the part of a message for a dialect's part in OpenAI's form. Raises `InvalidParameter`."""
        from localllm.media.sound import Samples

        kind = str(given.get("type") or "audio")
        inner = given.get(kind, given.get("url", given.get("data")))
        if isinstance(inner, Mapping):
            inner = inner.get("data") or inner.get("url")
        found: SoundPart | None = None
        if isinstance(inner, str) and inner:
            is_url = inner[:5].lower() in ("data:", "http:", "https") or kind == "audio_url"
            found = SoundPart(where, inner) if is_url else SoundPart(where, base64=inner)
        elif isinstance(inner, bytes) and inner:
            found = SoundPart(where, data=inner)
        elif isinstance(inner, tuple) and len(inner) == 2:  # samples and their rate, from Python
            found = SoundPart(where, samples=Samples.of(inner[0], int(inner[1])))
        elif hasattr(inner, "shape"):
            found = SoundPart(where, samples=Samples.of(inner, 16_000))
        if found is None:
            why = "Expected base64 in input_audio.data, or a URL in audio_url."
            raise InvalidParameter(f"{where} has no sound.", why, param=where)
        return {"type": "audio", "media": found}

    async def look(self, parts: Sequence[SoundPart]) -> list[Listened]:
        """Return the sounds with their lengths and tokens, in order. Raises the errors of media/."""
        self._require_few(parts)
        given = []
        for part in parts:
            data = part.data
            if part.is_elsewhere:
                [data] = await on_threads(fetching, partial(self.fetcher.fetch, where=part.where), [part.url])
            given.append((part, data))
        return await on_threads(_decoding, self.listen, given)

    def _require_few(self, parts: Sequence[SoundPart]) -> None:
        if len(parts) > self.most_sounds:
            what = f"The request has {len(parts)} sounds; at most {self.most_sounds} are taken."
            hint = f"--limit-mm-per-prompt audio={len(parts)}, or join some of them into one file."
            raise InvalidParameter(what, hint=hint, param=parts[self.most_sounds].where)

    def listen(self, given: tuple[SoundPart, bytes]) -> Listened:
        """Do `look` for one sound whose bytes are here. Blocks."""
        part, data = given
        samples = part.samples
        if samples is None and not data:
            most = self.limits.num_bytes
            data = of_base64(part.base64, part.where, most) if part.base64 else of_data_url(part.url, part.where, most)
        key = blake2b(data if samples is None else samples.values.tobytes(), digest_size=16).digest()
        with self._lock:
            length = self._lengths.get(key)
        if length is None:
            samples = self._decoded(data, part.where) if samples is None else samples
            length = len(samples.values)
            with self._lock:
                self._lengths[key] = length
                if len(self._lengths) > KEPT_LENGTHS:
                    self._lengths.popitem(last=False)
        if not length:
            raise UnreadableMedia(f"{part.where} is empty.", "It has no samples.")
        if length > self.limits.most_s * 16_000:
            what = f"{part.where} holds more than {self.limits.most_s:g} s of sound."
            raise MediaTooLarge(what, f"It has {length / 16_000:.1f} s.", self.limits.advice)
        return Listened(part, data, key, length / 16_000, self.processor.layout(length), samples)

    def _decoded(self, data: bytes, where: str) -> Samples:
        from localllm.media.sound import decode

        if len(data) > self.limits.num_bytes:
            why = f"It has {format_bytes(len(data))}; at most {format_bytes(self.limits.num_bytes)} are read."
            raise MediaTooLarge(f"{where} is too large.", why, "Send it as FLAC or MP3, or in parts.")
        with tempfile.TemporaryFile() as file:
            file.write(data)
            return decode(file, where, self.limits)

    def expanded(self, prompt: str, sounds: Sequence[Listened]) -> str:
        """Return the prompt with the rows of each sound in place of its mark. Raises `InvalidParameter`."""
        family = self.processor.family
        between = prompt.split(family.mark)
        if len(between) != len(sounds) + 1:
            raise InvalidParameter(
                f"The prompt has {len(between) - 1} marks of sounds; the request has {len(sounds)} sounds.",
                f"The model's chat template writes {family.mark} where a sound is.",
                "Send sounds in the user's messages.",
                param="messages",
            )
        found = between[0]
        for sound, text in zip(sounds, between[1:], strict=True):
            found += ("" if found.endswith(family.before) else family.before) + sound.layout.prompt
            found += ("" if text.startswith(family.after) else family.after) + text
        return found

    def spans_of(
        self, prompt: Sequence[int], sounds: Sequence[Listened], salt: str | None = None
    ) -> tuple[MediaSpan, ...]:
        """Return the places of the prompt's sounds, with their features. Blocks."""
        made = [self.process(sound) for sound in sounds]
        return spans_of(prompt, self.processor.spec.placeholder_id, made, salt, "sound")

    async def spans(self, prompt: PromptIds, salt: str | None) -> tuple[MediaSpan, ...]:
        """Do the same beside the event loop. Waits while other requests hold too many bytes. Call `release` with the
        prompt when the request has ended."""
        num_bytes = self._bytes_of(prompt)
        while self._in_flight and sum(self._in_flight) + num_bytes > IN_FLIGHT_BYTES:
            await asyncio.sleep(0.02)
        self._in_flight.append(num_bytes)
        try:
            [found] = await on_threads(_decoding, lambda given: self.spans_of(given, given.sounds, salt), [prompt])
            return found
        except BaseException:
            self.release(prompt)
            raise

    def release(self, prompt: PromptIds) -> None:
        """Let waiting requests use the memory of a request that has ended."""
        self._in_flight.remove(self._bytes_of(prompt))

    def _bytes_of(self, prompt: PromptIds) -> int:
        return int(sum(sound.seconds for sound in prompt.sounds) * 400 * self.processor.spec.num_mels)

    def process(self, sound: Listened) -> ProcessedSound:
        """Return a sound as tensors. Blocks."""
        with self._lock:
            if (found := self._kept.get(sound.key)) is not None:
                self._kept.move_to_end(sound.key)
                return found
        samples = self._decoded(sound.data, sound.part.where) if sound.samples is None else sound.samples
        made = self.processor.process(samples.values)
        with self._lock:
            self._kept[sound.key] = made
            while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return made


class Senses(NamedTuple):
    """The parts of a served model that read pictures and sound."""

    sight: Sight | None = None
    hearing: Hearing | None = None

    @property
    def marks(self) -> MediaMarks:
        """The special texts of the model's families."""
        image, audio, everything = "", "", list[str]()
        if self.sight is not None:
            image = self.sight.processor.mark
            everything += self.sight.processor.spec.marks
        if self.hearing is not None:
            audio = self.hearing.processor.family.mark
            everything += self.hearing.processor.family.marks
        return MediaMarks(image, audio, tuple(dict.fromkeys(everything)))

    async def look(self, parts: Sequence[PicturePart | SoundPart]) -> list[Seen | Listened]:
        """Return pictures with their sizes, then sounds with their lengths. Raises the errors of media/."""
        pictures = [part for part in parts if isinstance(part, PicturePart)]
        sounds = [part for part in parts if isinstance(part, SoundPart)]
        found: list[Seen | Listened] = []
        if pictures and self.sight is not None:
            found += await self.sight.look(pictures)
        if sounds and self.hearing is not None:
            found += await self.hearing.look(sounds)
        return found

    def prompt(
        self, text: str, media: Sequence[Seen | Listened], encode: Callable[[str], Sequence[int]], name: str
    ) -> PromptIds:
        """Return the token ids of a prompt with the rows of its media, and warnings. name: of the model."""
        pictures = [each for each in media if isinstance(each, Seen)]
        sounds = [each for each in media if isinstance(each, Listened)]
        warnings = list[str]()
        if self.sight is not None and pictures:
            text, warnings = self.sight.expanded(text, pictures), self.sight.warnings(pictures, name)
        if self.hearing is not None and sounds:
            text = self.hearing.expanded(text, sounds)
        return PromptIds(encode(text), pictures, warnings, sounds)

    def adapter_for(self, prompt: Sequence[int], asked: Adapter | None) -> Adapter | None:
        """Return the adapter of a request: what it asks for, or the model's own for prompts with sound. Raises
        `InvalidParameter` if it asks for another one."""
        own = None if self.hearing is None or not getattr(prompt, "sounds", ()) else self.hearing.adapter
        if own is not None and asked is not None and asked is not own:
            what, why = f"{asked.name} cannot answer about sound.", f"Sound is read with the adapter {own.name} alone."
            raise InvalidParameter(what, why, "Ask the model itself.", param="model")
        return own or asked

    async def spans(self, prompt: PromptIds, salt: str | None) -> tuple[MediaSpan, ...]:
        """Return the places of the prompt's media, decoded. Call `release` when the request has ended."""
        spans = await self.hearing.spans(prompt, salt) if self.hearing is not None and prompt.sounds else ()
        if self.sight is not None and prompt.pictures:
            try:
                spans = (*spans, *await self.sight.spans(prompt, salt))
            except BaseException:
                if self.hearing is not None and prompt.sounds:
                    self.hearing.release(prompt)
                raise
        return tuple(sorted(spans, key=lambda span: span.start))

    def release(self, prompt: PromptIds) -> None:
        """Let waiting requests use the memory of a request that has ended."""
        if self.sight is not None and prompt.pictures:
            self.sight.release(prompt)
        if self.hearing is not None and prompt.sounds:
            self.hearing.release(prompt)

    def read(
        self, text: str, parts: Sequence[PicturePart | SoundPart], encode: Callable[[str], Sequence[int]], name: str
    ) -> tuple[PromptIds, tuple[MediaSpan, ...]]:
        """Return a prompt with its media, decoded, for callers without an event loop. Blocks. Raises like `look`."""

        async def reading() -> tuple[PromptIds, tuple[MediaSpan, ...]]:
            prompt = self.prompt(text, await self.look(parts), encode, name)
            spans = await self.spans(prompt, None)
            self.release(prompt)
            return prompt, spans

        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
            return thread.submit(asyncio.run, reading()).result()
