"""Pictures of a request, from parts of messages to what an engine reads: sizes first, and pixels only to generate.

A part names its picture by a data URL, by a web address or by its bytes. `look` finds its size and its tokens, which
suffice to count a prompt; `process` decodes it. Both run on threads of their own, at most two pictures at a time. The
latest pictures stay prepared, so that the next turn of a chat decodes none of them again.
Does not know: any dialect, how a picture becomes tensors (models/vision), HTTP.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from localllm.engine.media import MediaSpan, spans_of
from localllm.errors import ContextTooLong, InvalidParameter
from localllm.media.picture import Facts, look
from localllm.media.source import Fetcher, of_data_url
from localllm.models.spec.vision import AUTO, Detail, Level
from localllm.text.messages import Message
from localllm.units import format_count

if TYPE_CHECKING:
    from PIL.Image import Image

    from localllm.models.vision.families import Layout
    from localllm.models.vision.processor import PictureProcessor, Processed

T = TypeVar("T")
PICTURE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are pictures, in the words of clients."""
KEPT_BYTES = 256 * 2**20
"""Prepared pictures that are kept for later requests."""
IN_FLIGHT_BYTES = 2**30
"""Prepared pictures of running requests, beyond which further requests wait."""
BYTES_PER_PIXEL = 12
"""Bytes of a prepared pixel: three numbers of 32 bits."""
SCALED = 0.95
"""Share of a picture's pixels below which it is reported as scaled."""


def run_behind_steps() -> None:
    """Lower the priority of this thread below the engine's. On other systems than Linux the call would be the whole
    process's."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_decoding = ThreadPoolExecutor(2, thread_name_prefix="localllm-pictures", initializer=run_behind_steps)
fetching = ThreadPoolExecutor(8, thread_name_prefix="localllm-fetch")


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture of a message."""

    where: str  # its path in the request
    url: str = field(default="", repr=False)  # data:, http: or https:
    data: bytes = field(default=b"", repr=False)  # a file, in place of a URL
    image: Image | None = None  # decoded, in place of both
    detail: Detail = AUTO

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the picture has to be downloaded."""
        return bool(self.url) and self.url[:5].lower() != "data:"


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture whose size is known."""

    part: PicturePart
    data: bytes
    width: int
    height: int
    frames: int
    layout: Layout


class PromptIds(list[int]):
    """The token ids of a prompt, and the pictures and sounds whose placeholders are among them."""

    def __init__(
        self, token_ids: Sequence[int], pictures: Sequence[Seen] = (), warnings: Sequence[str] = (),
        sounds: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """sounds: each a `Listened` (sounds.py)."""
        super().__init__(token_ids)
        self.pictures, self.warnings, self.sounds = tuple(pictures), list(warnings), tuple(sounds)

    @property
    def has_media(self) -> bool:
        return bool(self.pictures or self.sounds)

    @property
    def num_image_tokens(self) -> int:
        return sum(picture.layout.rows for picture in self.pictures)

    @property
    def num_audio_tokens(self) -> int:
        return sum(sound.layout.rows for sound in self.sounds)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """The part of a served model that reads pictures."""

    processor: PictureProcessor
    fetcher: Fetcher
    most_pictures: int
    most_pixels: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of the processor, where a request brings none
    _kept: OrderedDict[bytes, Processed] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _in_flight: list[int] = field(default_factory=list)  # bytes of the running requests

    def part(self, given: Mapping[str, Any], where: str, options: Mapping[str, Any] | None = None) -> Message:
        """Return the part of a message for a dialect's part in OpenAI's form. Raises `InvalidParameter`.

        options: mm_processor_kwargs of the request.
        """
        inner = given.get("image_url", given.get("url", given.get("image")))
        facts = {**given, **inner} if isinstance(inner, Mapping) else {**given, "url": inner}
        url, detail = facts.get("url"), self.detail(facts, where, options)
        if hasattr(url, "getpixel"):  # a picture of Pillow, from Python
            return {"type": "image", "media": PicturePart(where, image=url, detail=detail)}
        if not isinstance(url, str) or not url:
            raise InvalidParameter(f"{where} has no picture.", "Expected a URL in image_url.", param=where)
        return {"type": "image", "media": PicturePart(where, url, detail=detail)}

    def detail(self, facts: Mapping[str, Any], where: str, options: Mapping[str, Any] | None = None) -> Detail:
        """Return how finely a picture is to be read. Raises `InvalidParameter`."""
        level: Any = facts.get("detail") or "auto"
        pixels = dict[str, int | None]()
        if level not in get_args(Level):
            why = f"Got {str(level)[:50]!r}. Known: {', '.join(get_args(Level))}."
            raise InvalidParameter(f"{where} has an unknown detail.", why, param=where)
        for name in ("min_pixels", "max_pixels"):
            value = facts.get(name)
            if value is not None and (type(value) is not int or value < 1):
                why = f"Got {str(value)[:50]!r}."
                raise InvalidParameter(f"{name} of {where} must be a whole number above 0.", why, param=where)
            pixels[name] = value
        chosen = {**self.options, **(options or {})}
        return Detail(level, pixels["min_pixels"], pixels["max_pixels"], tuple(sorted(chosen.items())))

    async def look(self, parts: Sequence[PicturePart]) -> list[Seen]:
        """Return the pictures with their sizes and tokens, in order. Raises the errors of media/ and of the family."""
        self._require_few(parts)
        return await on_threads(_decoding, self.seen, [(part, await self._data(part)) for part in parts])

    def seen(self, given: tuple[PicturePart, bytes]) -> Seen:
        """Do `look` for one picture whose bytes are here. Blocks."""
        part, data = given
        data = data or (of_data_url(part.url, part.where) if part.url else b"")
        if part.image is not None:
            facts = Facts("", part.image.width, part.image.height, 1, 0)
        else:
            facts = look(data, part.where, self.most_pixels)
        layout = self.processor.layout(facts.width, facts.height, part.detail)
        return Seen(part, data, facts.width, facts.height, facts.frames, layout)

    def _require_few(self, parts: Sequence[PicturePart]) -> None:
        if len(parts) > self.most_pictures:
            raise InvalidParameter(
                f"The request has {len(parts)} pictures; at most {self.most_pictures} are taken.",
                hint=f"--limit-mm-per-prompt image={len(parts)}",
                param=parts[self.most_pictures].where,
            )

    async def _data(self, part: PicturePart) -> bytes:
        """Return the bytes of a picture that is not in the request; empty if its URL holds it."""
        if not part.is_elsewhere:
            return part.data
        [data] = await on_threads(fetching, lambda url: self.fetcher.fetch(url, part.where), [part.url])
        return data

    def expanded(self, prompt: str, pictures: Sequence[Seen]) -> str:
        """Return the prompt with the family's text in place of each picture's mark. Raises `InvalidParameter`."""
        between = prompt.split(self.processor.mark)
        if len(between) != len(pictures) + 1:
            raise InvalidParameter(
                f"The prompt has {len(between) - 1} marks of pictures; the request has {len(pictures)} pictures.",
                f"The model's chat template writes {self.processor.mark} where a picture is.",
                "Send pictures in the user's messages.",
                param="messages",
            )
        pairs = zip([picture.layout.prompt for picture in pictures], between[1:], strict=True)
        return between[0] + "".join([text for pair in pairs for text in pair])

    def warnings(self, pictures: Sequence[Seen], name: str) -> list[str]:
        """Return what becomes of the pictures that a client may not expect. name: of the model."""
        found, limits = list[str](), self.processor.limits
        for number, seen in enumerate(pictures, 1):
            (width, height), rows = seen.layout.shown, seen.layout.rows
            if width * height < SCALED * seen.width * seen.height:
                tokens = f"{rows} tokens" if limits.is_fixed else f"{rows} of at most {limits.max_tokens} tokens"
                found.append(
                    f"image {number} scaled from {seen.width} x {seen.height} to {width} x {height} ({tokens})"
                )
            if seen.frames > 1:
                found.append(f"the first frame of image {number} is read, which is an animation")
        if limits.is_fixed and any(seen.part.detail.level in ("low", "high") for seen in pictures):
            found.append(f"field 'detail' has no effect: {name} always takes {limits.max_tokens} tokens")
        return found

    async def spans(self, prompt: PromptIds, salt: str | None) -> tuple[MediaSpan, ...]:
        """Decode the prompt's pictures and return their places. Waits while other requests hold too many bytes.

        Call `release` with the prompt when the request has ended.
        """
        num_bytes = sum(_bytes_of(picture) for picture in prompt.pictures)
        while self._in_flight and sum(self._in_flight) + num_bytes > IN_FLIGHT_BYTES:
            await asyncio.sleep(0.02)
        self._in_flight.append(num_bytes)
        try:
            pictures = await on_threads(_decoding, self.process, prompt.pictures)
            return spans_of(prompt, self.processor.spec.placeholder_id, pictures, salt)
        except BaseException:
            self.release(prompt)
            raise

    def release(self, prompt: PromptIds) -> None:
        """Let waiting requests use the memory of a request that has ended."""
        self._in_flight.remove(sum(_bytes_of(picture) for picture in prompt.pictures))

    def process(self, seen: Seen) -> Processed:
        """Return a picture as tensors. Blocks. Raises `UnreadableMedia` and `MediaTooLarge`."""
        if seen.part.image is not None:
            return self.processor.process_image(seen.part.image.convert("RGB"), seen.part.detail)
        key = blake2b(seen.data + repr(seen.part.detail).encode(), digest_size=16).digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        made = self.processor.process(seen.data, seen.part.detail, (seen.width, seen.height))
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return made


def _bytes_of(seen: Seen) -> int:
    width, height = seen.layout.shown
    return width * height * BYTES_PER_PIXEL


async def on_threads(pool: ThreadPoolExecutor, work: Callable[[Any], T], given: Sequence[Any]) -> list[T]:
    """Return the results in order. If one raises, the work that has not begun is cancelled."""
    loop = asyncio.get_running_loop()
    futures = [loop.run_in_executor(pool, work, each) for each in given]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


def require_room(prompt: PromptIds, context_tokens: int) -> None:
    """Raise `ContextTooLong` with the tokens of pictures, sounds and text if a prompt with media is too long."""
    if not prompt.has_media or len(prompt) < context_tokens:
        return
    pictures, sounds = prompt.num_image_tokens, prompt.num_audio_tokens
    text = len(prompt) - pictures - sounds
    parts = [f"{format_count(pictures)} in {len(prompt.pictures)} pictures"] if prompt.pictures else []
    parts += [f"{format_count(sounds)} in {len(prompt.sounds)} sounds"] if prompt.sounds else []
    hint = "Send detail: low, fewer pictures, or start with a smaller --image-max-tokens."
    raise ContextTooLong(
        f"This model's context holds {format_count(context_tokens)} tokens here.",
        f"The request needs {format_count(len(prompt) + 1)}: {', '.join(parts)}, {format_count(text)} of text and 1 "
        "for the output.",
        hint if prompt.pictures else "Send less sound, or start with a larger --max-model-len.",
        param="messages",
    )
