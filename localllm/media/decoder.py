"""A child process that decodes pictures and draws pages of PDFs for the server: if it crashes or is killed, only its
picture fails.

It is a script of machine/child_main.py and imports Pillow, for pages also pypdfium2, but nothing of localllm or torch.
A message is a JSON object, and behind it the bytes of a file. The answer is a JSON object, and behind it pixels. The
size of a picture comes from the file's header and is checked before any pixel is decoded. `Decoders` in picture.py is
its parent.
Does not know: models, requests, web addresses.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<I")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")
"""Formats that are decoded; Pillow's others, some of them with long lists of faults, are not."""
HEADS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")
ORIENTATION = 0x0112
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
         7: "TRANSVERSE", 8: "ROTATE_90"}  # fmt: skip
TEXT_BYTES = 16 * 2**20
"""Largest text chunk of a PNG that does not make the file unreadable; programs store whole workflows there."""


PAGE_SCALE = 2.0
"""Pixels of a page's point: 144 to the inch."""
PAGE_PIXELS = 4_000_000
"""Most pixels of a page: A4 at 144 to the inch has two million."""


class NotDecoded(Exception):
    """The file is not decoded. `facts` say why."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(facts)
        self.facts = facts


def answer(asked: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the facts of a picture, and its pixels or its thumbnail if they are asked for.

    asked: `do` (look, rgb, thumb or page), `most_pixels`, `wanted` (width and height that suffice), `side` of a
    thumbnail, `number` of a PDF's page from 1.
    """
    from PIL import Image

    try:
        if asked["do"] == "page":
            return {}, _page(data, asked["number"])
        image, facts = _opened(data, asked["most_pixels"])
        if asked["do"] == "look":
            return facts, b""
        if asked["do"] == "thumb":
            side = asked["side"]
            shown = _upright(image, data, (side, side))
            shown.thumbnail((side, side), Image.Resampling.BICUBIC)
            stream = io.BytesIO()
            shown.save(stream, "WEBP", quality=80)
            return facts, stream.getvalue()
        shown = _upright(image, data, asked["wanted"])
        return {**facts, "width": shown.width, "height": shown.height}, shown.tobytes()
    except NotDecoded as error:
        return error.facts, b""
    except MemoryError:
        return {"error": "memory"}, b""
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error, EOFError and others
        return {"error": "damaged", "text": str(error)[:200] or type(error).__name__}, b""


def _page(data: bytes, number: int) -> bytes:
    """Return a page of a PDF as a JPEG file; no bytes for a page of one colour. Raises `NotDecoded`."""
    try:
        import pypdfium2
    except ImportError:
        raise NotDecoded(error="missing") from None
    page = pypdfium2.PdfDocument(data)[number - 1]
    width, height = page.get_size()
    scale = min(PAGE_SCALE, math.sqrt(PAGE_PIXELS / max(1.0, width * height)))
    image = page.render(scale=scale).to_pil().convert("RGB")
    if all(low == high for low, high in image.getextrema()):
        return b""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, subsampling=0)
    return stream.getvalue()


def _opened(data: bytes, most_pixels: int) -> tuple[Any, dict[str, Any]]:
    """Return the picture, not decoded yet, and its facts. Raises `NotDecoded`."""
    from PIL import Image, PngImagePlugin, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the bound below is checked instead
    PngImagePlugin.MAX_TEXT_CHUNK = TEXT_BYTES
    if (size := webp_size(data)) is not None:  # its decoder allocates the canvas when it opens the file
        _require_few_pixels(*size, most_pixels)
    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data.startswith(HEADS) or data[8:12] in (b"WEBP", b"avif"):
            raise NotDecoded(error="damaged", text="Its header cannot be read") from None
        raise NotDecoded(error="unknown") from None
    width, height = image.size
    kind = "JPEG" if image.format == "MPO" else image.format  # several JPEGs in one file, as some phones write them
    _require_few_pixels(width, height, most_pixels * 5 // 2 if kind == "JPEG" else most_pixels)  # JPEGs can be reduced
    if _orientation(image, data) >= 5:
        width, height = height, width
    # Counting a GIF's frames would read all of them.
    frames = 1 if kind == "JPEG" else 1 + image.is_animated if kind == "GIF" else getattr(image, "n_frames", 1)
    return image, {"kind": kind, "width": width, "height": height, "frames": frames}


def _require_few_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise NotDecoded(error="pixels", width=width, height=height)


def _orientation(image: Any, data: bytes) -> int:
    """Return the orientation of EXIF, 1 to 8. A PNG is not decoded for it, though it may be behind the pixels."""
    from PIL import Image

    if image.format == "PNG" and "exif" not in image.info:
        exif = Image.Exif()
        exif.load(b"Exif\0\0" + _png_exif(data))
    else:
        exif = image.getexif()
    found = exif.get(ORIENTATION, 1)
    return found if found in TURNS else 1


def _png_exif(data: bytes) -> bytes:
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + length]
        at += 12 + length
    return b""


def _upright(image: Any, data: bytes, wanted: Any) -> Any:
    """Return the first frame in RGB with 8 bits: turned by EXIF, transparent pixels on white."""
    from PIL import Image

    turn = _orientation(image, data)
    if wanted is not None and image.format in ("JPEG", "MPO"):
        image.draft("RGB", tuple(wanted if turn < 5 else reversed(wanted)))
    image.load()
    if image.mode.startswith("I"):  # 16 bits of grey; converting clips them to white
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
        image.info.pop("transparency", None)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        alpha = image.convert("RGBA")
        image = Image.new("RGB", alpha.size, "white")
        image.paste(alpha, mask=alpha.getchannel("A"))
    elif image.mode != "RGB":
        image = image.convert("RGB")
    return image.transpose(Image.Transpose[TURNS[turn]]) if turn in TURNS else image


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the size in the header of a WebP file; None for another file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def worker() -> Callable[[bytes], bytes]:
    with suppress(OSError):
        os.nice(10)
    return _answer_message


def _answer_message(message: bytes) -> bytes:
    [length] = LENGTH.unpack_from(message)
    asked, data = json.loads(message[LENGTH.size : LENGTH.size + length]), message[LENGTH.size + length :]
    facts, pixels = answer(asked, data)
    facts_bytes = json.dumps(facts).encode()
    return b"".join((LENGTH.pack(len(facts_bytes)), facts_bytes, pixels))
