"""Pictures become upright RGB, and every broken, huge or hostile file is refused by name without harm to the server."""

from __future__ import annotations

import io
import os
import random
import signal
import struct
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from localllm.errors import LocalLLMError, MediaTooLarge, UnreadableMedia
from localllm.media import decoder
from localllm.media import picture as module
from localllm.media.picture import Facts, look, rgb, thumbnail
from tests.media.pictures import picture, saved

WHERE = "messages[0].content[1]"
KINDS = decoder.FORMATS
ROWS = [[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [(0, 0, 0), (255, 255, 255), (9, 9, 9)]]


def three_by_two() -> Image.Image:
    image = Image.new("RGB", (3, 2))
    image.putdata([pixel for row in ROWS for pixel in row])
    return image


def pixels(image: Image.Image) -> list[list[tuple[int, ...]]]:
    flat = list(zip(*[iter(image.tobytes())] * 3, strict=True))
    return [flat[y * image.width : (y + 1) * image.width] for y in range(image.height)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_read(kind: str) -> None:
    data = picture(kind, (40, 30), "red")
    assert look(data, WHERE) == Facts(kind, 40, 30, 1, len(data))
    image = rgb(data)
    assert (image.mode, image.size) == ("RGB", (40, 30))
    red, green, blue = image.getpixel((20, 15))
    assert red > 240
    assert green < 20
    assert blue < 20


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "late", "WEBP"])
def test_a_picture_is_turned_by_exif_first(kind: str, orientation: int) -> None:
    image, exif = three_by_two(), Image.Exif()
    exif[decoder.ORIENTATION] = orientation
    if kind == "late":  # a PNG may say it behind its pixels
        plain = saved(image)
        chunk = b"eXIf" + exif.tobytes()[6:]
        late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        data = plain[:-12] + late + plain[-12:]
    else:
        data = saved(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    expected = {
        1: ROWS, 2: [row[::-1] for row in ROWS], 3: [row[::-1] for row in ROWS[::-1]], 4: ROWS[::-1],
        5: [list(column) for column in zip(*ROWS, strict=True)],
        6: [list(column) for column in zip(*ROWS[::-1], strict=True)],
        7: [list(column) for column in zip(*[row[::-1] for row in ROWS[::-1]], strict=True)],
        8: [list(column) for column in zip(*[row[::-1] for row in ROWS], strict=True)],
    }[orientation]  # fmt: skip
    shown = rgb(data)
    assert pixels(shown) == expected
    facts = look(data, WHERE)
    assert (facts.width, facts.height) == shown.size


def test_what_is_transparent_is_white() -> None:
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    cases = [
        picture(mode="RGBA", colour=(255, 0, 0, 0)),
        picture(mode="LA", colour=(0, 0)),
        picture(mode="RGB", colour=(1, 2, 3), transparency=(1, 2, 3)),
        picture(mode="L", colour=7, transparency=7),
        saved(palette, transparency=0),
        picture("WEBP", mode="RGBA", colour=(255, 0, 0, 0), lossless=True),
    ]
    assert [rgb(data).getpixel((0, 0)) for data in cases] == [(255, 255, 255)] * len(cases)
    half = rgb(picture(mode="RGBA", colour=(255, 0, 0, 127))).getpixel((0, 0))
    assert half == (255, 128, 128)


def test_every_mode_keeps_its_brightness() -> None:
    grey = rgb(picture(mode="I;16", colour=128 * 257)).getpixel((0, 0))
    assert grey == (128, 128, 128)
    assert rgb(picture("JPEG", mode="L", colour=128)).getpixel((0, 0)) == (128, 128, 128)
    assert rgb(picture(mode="1", colour=1)).getpixel((0, 0)) == (255, 255, 255)
    cyan = rgb(picture("JPEG", mode="CMYK", colour=(255, 0, 0, 0))).getpixel((0, 0))  # as Adobe stores it: inverted
    assert cyan == (0, 255, 255)


@pytest.mark.parametrize(("kind", "frames"), [("GIF", 2), ("WEBP", 3), ("PNG", 3)])
def test_an_animation_is_its_first_frame(kind: str, frames: int) -> None:
    colours = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime", "blue")]
    data = saved(colours[0], kind, save_all=True, append_images=colours[1:], duration=40, **(
        {"lossless": True} if kind == "WEBP" else {}))  # fmt: skip
    assert look(data, WHERE).frames == frames
    assert rgb(data).getpixel((4, 4)) == (255, 0, 0)


def test_a_jpeg_is_halved_while_it_is_decoded_as_often_as_it_stays_large_enough() -> None:
    exif = Image.Exif()
    exif[decoder.ORIENTATION] = 6
    data = picture("JPEG", (800, 400), exif=exif)
    assert rgb(data).size == (400, 800)
    assert rgb(data, (100, 190)).size == (100, 200)
    assert rgb(data, (101, 190)).size == (200, 400)


def test_a_thumbnail_has_no_metadata() -> None:
    exif = Image.Exif()
    exif[0x010E] = "my home address"
    shown = thumbnail(picture("JPEG", (400, 200), exif=exif), 96)
    assert Image.open(io.BytesIO(shown)).size == (96, 48)
    assert b"home" not in shown


# Refusals -----------------------------------------------------------------------------------------------------------


def png_of(width: int, height: int) -> bytes:
    """Return a PNG whose header names this size, with a few bytes of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def webp_of(width: int, height: int) -> bytes:
    data = bytearray(picture("WEBP", (64, 64), mode="RGBA", colour=(1, 2, 3, 4)))
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def gif_of(width: int, height: int) -> bytes:
    data = bytearray(picture("GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


REFUSED: list[tuple[Callable[[], bytes], type[LocalLLMError], str]] = [
    (lambda: png_of(30_000, 30_000), MediaTooLarge,
     f"{WHERE} has 30000 x 30000 pixels. At most 100 million are decoded."),
    (lambda: webp_of(16_000, 16_000), MediaTooLarge, "has 16000 x 16000 pixels"),
    (lambda: gif_of(65_000, 65_000), MediaTooLarge, "has 65000 x 65000 pixels"),
    (lambda: png_of(12_000, 20), UnreadableMedia,
     f"{WHERE} is 12000 x 20 pixels. Sides may differ 200 times at most."),
    (lambda: bytes(21 * 2**20), MediaTooLarge, f"{WHERE} has 21.0 MiB; at most 20.0 MiB are read."),
    (lambda: b"", UnreadableMedia, "this is empty"),
    (lambda: b"hello", UnreadableMedia, "this is something else"),
    (lambda: picture("TIFF"), UnreadableMedia,
     f"{WHERE} is not a picture that is read here. JPEG, PNG, WebP, GIF, BMP and AVIF are; this looks like TIFF."),
    (lambda: b"  <svg xmlns='http://www.w3.org/2000/svg'/>", UnreadableMedia, "looks like SVG"),
    (lambda: b"%PDF-1.7 ...", UnreadableMedia, "looks like PDF"),
    (lambda: b"\0\0\0\x18ftypheic" + bytes(20), UnreadableMedia, "looks like HEIC"),
    (lambda: b"\0\0\0\x18ftypmp42" + bytes(20), UnreadableMedia, "looks like a video"),
    (lambda: picture("ICO", (16, 16)), UnreadableMedia, "looks like an icon"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_file_is_refused_by_name_before_a_pixel_is_decoded(case: int) -> None:
    make, error, text = REFUSED[case]
    with pytest.raises(error, match=r".") as caught:
        look(make(), WHERE)
    assert text in str(caught.value)


def test_a_damaged_file_says_so() -> None:
    whole = saved(Image.effect_noise((200, 200), 50), "JPEG")
    for data in (whole[: len(whole) // 2], png_of(500, 500)):
        look(data, WHERE)
        with pytest.raises(UnreadableMedia, match=r"damaged.*truncated|damaged.*image file"):
            rgb(data, where=WHERE)


def test_more_pixels_are_read_if_the_operator_allows_them() -> None:
    data = picture(size=(50, 50))
    with pytest.raises(MediaTooLarge, match="At most 2,000 are decoded") as caught:
        look(data, WHERE, 2000)
    assert "--max-image-pixels" in caught.value.hint
    assert look(data, WHERE, 2500).width == 50
    jpeg = picture("JPEG", (60, 60))  # it can be reduced while it is decoded
    assert look(jpeg, WHERE, 2000).width == 60
    with pytest.raises(MediaTooLarge):
        look(jpeg, WHERE, 1400)


# Hostile files ------------------------------------------------------------------------------------------------------


def test_a_decoder_that_crashes_or_hangs_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.Decoders()
    monkeypatch.setattr(module, "_decoders", lambda: own)
    data = picture()
    look(data, WHERE)
    [child] = [each for each in list(own._free.queue) if each is not None]
    os.kill(child.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "WALL_S", 0.3)
    with pytest.raises(UnreadableMedia, match="takes more than"):
        look(data, WHERE)
    monkeypatch.undo()
    monkeypatch.setattr(module, "_decoders", lambda: own)
    assert look(data, WHERE).width == 8  # another process
    monkeypatch.setattr(module, "CPU_S", 0.01)
    with pytest.raises(UnreadableMedia, match=r"takes more than 0\.01 s"):
        rgb(saved(Image.effect_noise((2500, 2500), 90)))


def test_a_decoder_has_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.Decoders()
    monkeypatch.setattr(module, "_decoders", lambda: own)
    monkeypatch.setattr(module, "MEMORY_BYTES", 2**28)
    with pytest.raises(MediaTooLarge, match="needs more than"):
        rgb(picture(size=(8000, 4000), mode="LA", colour=(0, 0), compress_level=1))
    assert rgb(picture()).size == (8, 6)


def corpus() -> list[bytes]:
    noise = Image.effect_noise((17, 13), 60)
    found = [saved(noise.convert(mode), kind) for kind in KINDS for mode in ("L", "RGB")]
    found += [saved(noise.convert("RGBA"), kind) for kind in ("PNG", "WEBP", "AVIF", "GIF")]
    found += [saved(noise.convert("CMYK"), "JPEG"), saved(noise.convert("P"), "PNG"), saved(noise.convert("1"), "BMP")]
    frames = [noise, noise.transpose(Image.Transpose.ROTATE_180)]
    return [*found, *(saved(noise, kind, save_all=True, append_images=frames) for kind in ("GIF", "PNG", "WEBP"))]


def mutated(draw: random.Random, files: list[bytes]) -> bytes:
    data = bytearray(draw.choice(files))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice([40, 10**6]))) if data else 0
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                data[at : at + 4] = draw.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
            case 2:
                del data[at:]
            case 3:
                other = draw.choice(files)
                data[at:at] = other[draw.randrange(len(other)) :]
            case 4:
                del data[at : at + draw.randrange(1, 30)]
    return bytes(data)


def fuzz(count: int, seed: int) -> int:
    """Return how many of `count` mutated files are still read."""
    draw, files, num_read, refused = random.Random(seed), corpus(), 0, list[str]()
    for _ in range(count):
        try:
            facts = look(data := mutated(draw, files), WHERE, 1_000_000)
            image = rgb(data, where=WHERE)
            assert (image.mode, image.size) == ("RGB", (facts.width, facts.height))
            num_read += 1
        except (UnreadableMedia, MediaTooLarge) as error:
            refused.append(error.what)
    assert all(what.startswith(WHERE) for what in refused)
    return num_read


def test_mutated_files_are_read_or_refused() -> None:
    assert 20 < fuzz(300, seed=1) < 280


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("piece", range(20))
def test_a_hundred_thousand_mutated_files_are_read_or_refused(piece: int) -> None:
    assert fuzz(5_000, seed=2 + piece) > 50
