"""Small pictures as files, and an image processor without a model, for tests."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from localllm.errors import InvalidParameter
from localllm.media.picture import rgb
from localllm.media.source import Fetcher
from localllm.models.spec.vision import AUTO, Detail, ImageLimits, VisionSpec
from localllm.models.vision.processor import Processed
from localllm.serving.answers.pictures import Sight
from localllm.text.messages import MediaMarks


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


SEEING = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}{{- '<|endoftext|>' }}{%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A chat template that renders pictures, in results of tools, too."""
MARK = "<|endoftext|>"
MARKS = MediaMarks(MARK, "", (MARK, "[IMG]"))
SPEC = VisionSpec("fake", 0, (MARK, "[IMG]"), ImageLimits(1, 16, px_per_token=100))


class Layout(NamedTuple):
    prompt: str
    rows: int
    shown: tuple[int, int]


class FakeProcessor:
    """An image processor for tests: a token for each 10 x 10 pixels, at most 16, framed by [IMG] and [/IMG]."""

    limits = SPEC.limits

    def __init__(self, placeholder_id: int = 0, mark: str = MARK) -> None:
        self.spec, self.mark = replace(SPEC, placeholder_id=placeholder_id), mark
        self.processed: list[tuple[tuple[int, int] | None, Detail]] = []

    def layout(self, width: int, height: int, detail: Detail = AUTO) -> Layout:
        if unknown := [name for name, _ in detail.options if name != "crop"]:
            raise InvalidParameter(f"mm_processor_kwargs has {unknown[0]}.", param="mm_processor_kwargs")
        most = 4 if detail.level == "low" else SPEC.limits.max_tokens
        most = min(most, (detail.max_pixels or 10**9) // 100)
        side = math.sqrt(min(1, most * 100 / (width * height)))
        shown = max(10, int(width * side) // 10 * 10), max(10, int(height * side) // 10 * 10)
        rows = shown[0] * shown[1] // 100
        return Layout(f"({self.mark * rows})", rows, shown)

    def process(self, data: bytes, detail: Detail = AUTO, size: tuple[int, int] | None = None) -> Processed:
        self.processed.append((size, detail))
        return self.process_image(rgb(data), detail)

    def process_image(self, image: Image.Image, detail: Detail = AUTO) -> Processed:
        layout, pixels = self.layout(*image.size, detail), image.tobytes()
        digest = blake2b(pixels + repr(detail).encode(), digest_size=16).digest()
        tensors = {"pixel_values": np.frombuffer(pixels, dtype=np.uint8)}
        return Processed(tensors, layout.prompt, layout.rows, None, False, image.size, layout.shown, digest)


def sight(placeholder_id: int = 0, domains: tuple[str, ...] = (), mark: str = MARK, **more: Any) -> Sight:
    processor: Any = FakeProcessor(placeholder_id, mark)
    return Sight(processor, Fetcher(domains), **{"most_pictures": 4, "most_pixels": 100_000_000, **more})
