"""Sounds, and files of them, for tests. Sounds are float arrays, [n] or [n, channels]."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000
Sound = npt.NDArray[np.float64]


def tone(seconds: float, rate: int = RATE, hz: float = 440.0, level: float = 0.5) -> Sound:
    return level * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)


def wav(sound: npt.ArrayLike, rate: int = RATE, bits: int = 16, *, is_float: bool = False, **header: Any) -> bytes:
    """Return a WAV file. header: fields that are written in place of the true ones: channels, size, tag."""
    values = np.asarray(sound, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if is_float:
        data = values.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.rint(values * 127 + 128).astype(np.uint8).tobytes()
    else:
        wide = np.rint(values * (2 ** (bits - 1) - 1)).astype("<i4")
        data = wide.reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()
    channels, tag = header.get("channels", values.shape[1]), header.get("tag", 3 if is_float else 1)
    stride = values.shape[1] * bits // 8
    fields = struct.pack("<HHIIHH", tag, channels, rate, 0, stride, bits)
    size = header.get("size", len(data))
    chunks = b"fmt " + struct.pack("<I", 16) + fields + b"LIST\x03\0\0\0abc\0" + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVE" + chunks + data


def written(sound: npt.ArrayLike, rate: int = RATE, kind: str = "FLAC", subtype: str | None = None) -> bytes:
    """Return a file that libsndfile writes. Needs soundfile."""
    import soundfile

    stream = io.BytesIO()
    soundfile.write(stream, np.asarray(sound), rate, format=kind, subtype=subtype)
    return stream.getvalue()


def muxed(sound: Sound, rate: int, kind: str, codec: str) -> bytes:
    """Return a file of one channel that FFmpeg writes. Needs av."""
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format=kind) as container:
        out: Any = container.add_stream(codec, rate=rate)
        out.layout = "mono"
        resampler = av.AudioResampler(format=out.codec_context.format, layout="mono", rate=rate, frame_size=1024)
        frame = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(out.encode(part))
        container.mux(out.encode(None))
    return stream.getvalue()


def sounds(*seconds: float) -> list[np.ndarray]:
    """Return int16 noise whose loudness changes, so that a random model names more than one token."""
    draw = np.random.default_rng(3)
    noise = [draw.standard_normal(int(16_000 * each)) for each in seconds]
    return [(each * np.abs(np.sin(np.arange(len(each)) / 3000)) * 3000).astype(np.int16) for each in noise]
