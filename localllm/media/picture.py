"""Pictures from bytes to pixels: what a file is, and its first frame upright, in RGB; pages of PDFs as pictures.

Files are decoded in child processes (decoder.py), at most two at a time, so a file that crashes or hangs a decoder
fails alone. Size and shape come from the file's header and are checked before any pixel is decoded.
Does not know: models, where the bytes come from.
"""

from __future__ import annotations

import json
import logging
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any

from localllm.errors import EngineError, MediaTooLarge, UnreadableMedia, UnsupportedOption
from localllm.machine.child import ChildProcess
from localllm.machine.install_kind import how_to_install
from localllm.media import decoder
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

MOST_BYTES = 20 * 2**20
"""Largest file."""
MOST_PIXELS = 100_000_000
"""Most pixels that are decoded, unless --max-image-pixels says otherwise."""
MOST_RATIO = 200
"""Most times that one side may be longer than the other."""
AT_ONCE = 2
MEMORY_BYTES, CPU_S, WALL_S = 3 * 2**30, 20.0, 60.0
"""Address space of a decoder, and CPU time and wall-clock time for one picture. A picture of 100 million pixels with
transparency takes 1.1 GiB."""

READ = "JPEG, PNG, WebP, GIF, BMP and AVIF"
_OTHERS = (
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"%PDF", "PDF"), (b"<svg", "SVG"), (b"<?xml", "SVG"), (b"<!DOC", "HTML"),
    (b"<html", "HTML"), (b"8BPS", "Photoshop"), (b"\0\0\1\0", "an icon"), (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xffO\xffQ", "JPEG 2000"), (b"SIMPLE", "FITS"), (b"\x1aE\xdf\xa3", "a video"), (b"%!PS", "PostScript"),
)  # fmt: skip
_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"mp42": "a video", b"isom": "a video"}


@dataclass(frozen=True, slots=True)
class Facts:
    """The format and the size of a picture's file."""

    kind: str  # a name of `decoder.FORMATS`
    width: int  # in pixels, upright: turned by EXIF
    height: int
    frames: int  # of which the first is read; 2 for any GIF with more than one
    num_bytes: int


def look(data: bytes, where: str, most_pixels: int = MOST_PIXELS) -> Facts:
    """Return the facts of a picture, from its header. `where`: its path in the request, for errors.

    Raises `UnreadableMedia` and `MediaTooLarge`.
    """
    if len(data) > MOST_BYTES:
        raise too_many_bytes(len(data), where)
    facts, _ = _ask({"do": "look", "most_pixels": most_pixels}, data, where)
    found = Facts(facts["kind"], facts["width"], facts["height"], facts["frames"], len(data))
    if max(found.width, found.height) > MOST_RATIO * min(found.width, found.height):
        raise UnreadableMedia(
            f"{where} is {found.width} x {found.height} pixels.", f"Sides may differ {MOST_RATIO} times at most."
        )
    return found


def rgb(data: bytes, wanted: tuple[int, int] | None = None, where: str = "The picture") -> Image:
    """Return the first frame of a picture that `look` has accepted: upright, in RGB, transparent pixels on white.

    wanted: width and height that suffice. A JPEG is halved while it is decoded, as often as both sides stay at or above
    them. Raises `UnreadableMedia` and `MediaTooLarge`.
    """
    from PIL import Image

    facts, pixels = _ask({"do": "rgb", "most_pixels": 2**62, "wanted": wanted}, data, where)
    return Image.frombytes("RGB", (facts["width"], facts["height"]), pixels)


def thumbnail(data: bytes, side: int) -> bytes:
    """Return a WebP file without metadata, at most `side` pixels wide and high. Raises like `rgb`."""
    return _ask({"do": "thumb", "most_pixels": 2**62, "side": side}, data, "The picture")[1]


def page_picture(data: bytes, number: int, where: str) -> bytes:
    """Return a page of a PDF as a JPEG file; no bytes for a page of one colour. number: from 1.

    Raises `UnreadableMedia`, `MediaTooLarge`, and `UnsupportedOption` without pypdfium2, which is part of an extra.
    """
    return _ask({"do": "page", "number": number, "most_pixels": 0}, data, where)[1]


def too_many_bytes(num_bytes: int, where: str, most_bytes: int | None = None) -> MediaTooLarge:
    """Return the error of a file that is too large. most_bytes: of a sound; None: it is a picture."""
    what = f"{where} has {format_bytes(num_bytes)}; at most {format_bytes(most_bytes or MOST_BYTES)} are read."
    hint = "Scale the picture down, or save it as JPEG." if most_bytes is None else "Cut it, or send it as MP3."
    return MediaTooLarge(what, hint=hint)


def _ask(asked: dict[str, Any], data: bytes, where: str) -> tuple[dict[str, Any], bytes]:
    facts, rest = _decoders().ask(asked, data, where)
    if (error := facts.get("error")) is None:
        return facts, rest
    if error == "pixels":
        most = asked["most_pixels"]
        raise MediaTooLarge(
            f"{where} has {facts['width']} x {facts['height']} pixels.",
            f"At most {f'{most / 1e6:g} million' if most >= 1e6 else format_count(most)} are decoded.",
            "Scale it, or start with a larger --max-image-pixels.",
        )
    if error == "missing":
        raise UnsupportedOption(
            f"{where} has no text, and the package that draws pages is not installed.",
            hint=f"Install it with: {how_to_install('localllm[pdf]')}",
        )
    if error == "memory":
        raise MediaTooLarge(
            f"{where} needs more than {format_bytes(MEMORY_BYTES)} to be decoded.", hint="Scale it down."
        )
    if error == "unknown":
        raise UnreadableMedia(
            f"{where} is not a picture that is read here.", f"{READ} are; this {_looks_like(data)}.", "Save it as PNG."
        )
    text: str = facts["text"]
    raise UnreadableMedia(f"{where} is damaged.", f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _looks_like(data: bytes) -> str:
    if not data:
        return "is empty"
    start = data[:16].lstrip()
    brand = _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else None
    found = brand or next((name for head, name in _OTHERS if start.startswith(head) or data.startswith(head)), None)
    return "is something else" if found is None else f"looks like {found}"


class Decoders:
    """Child processes that decode, each started when it is first needed. `ask` is thread-safe and waits for a free
    one."""

    def __init__(self) -> None:
        self._free: LifoQueue[ChildProcess | None] = LifoQueue()
        for _ in range(AT_ONCE):
            self._free.put(None)

    def ask(self, asked: dict[str, Any], data: bytes, where: str) -> tuple[dict[str, Any], bytes]:
        """Return the decoder's answer. Raises `UnreadableMedia` if the file ends the decoder."""
        child = self._free.get()
        try:
            if child is None or child.has_ended:
                child = ChildProcess(Path(decoder.__file__), {"MALLOC_ARENA_MAX": "2"})
            head = json.dumps(asked).encode()
            message = b"".join((decoder.LENGTH.pack(len(head)), head, data))
            answer = child.ask(message, WALL_S, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
        except (OSError, EOFError) as error:
            if child is None:
                why = f"The process that decodes pictures does not start: {error}."
                raise EngineError("Pictures cannot be decoded.", why) from error
            status, child = child.end(), None
            is_late = isinstance(error, TimeoutError) or status == -getattr(signal, "SIGPROF", 0)
            log.warning("decoder ended status=%s bytes=%d", status, len(data))
            why = f"Decoding it takes more than {CPU_S:g} s." if is_late else "The decoder crashes on it."
            raise UnreadableMedia(f"{where} is damaged.", why) from None
        finally:
            self._free.put(child)
        [size] = decoder.LENGTH.unpack_from(answer)
        start = decoder.LENGTH.size + size
        return json.loads(answer[decoder.LENGTH.size : start]), answer[start:]


@cache
def _decoders() -> Decoders:
    return Decoders()
