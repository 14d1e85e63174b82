"""Small pictures as files, for tests."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def picture(
    kind: str = "PNG", size: tuple[int, int] = (8, 6), colour: Any = "red", mode: str = "RGB", **save: Any
) -> bytes:
    """Return a file of one colour."""
    image = Image.new(mode, size, colour)
    return saved(image, kind, **save)


def saved(image: Image.Image, kind: str = "PNG", **save: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **save)
    return stream.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
