"""Decode a sound file to samples as models hear them: 16 kHz, one channel, 16 bits.

WAV is decoded here in numpy, in the server itself. Other formats are decoded by native libraries (libsndfile through
soundfile, FFmpeg through av) in a child process, as a script of machine/child_main.py: if they crash, only the file
fails. Therefore this file imports nothing of localllm. Headers are not believed: a file is decoded in blocks, and the
limits are checked on what was decoded.
Does not know: models, requests, where the file comes from. `decode` in sound.py is the parent.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

RATE = 16_000
"""Samples a second that models read."""
BLOCK_FRAMES = 65_536
STREAMED_BYTES = 0x7FFF_F000
"""A WAV that claims at least this size was written to a pipe, and its size is not known."""
CROSSINGS, BETA, PASSED = 32, 9.0, 0.95
"""The low-pass filter of the resampler: zero crossings on each side, Kaiser's beta, share of the band that passes."""
MOST_DENOMINATOR = 2000
"""Ratios of odd rates are rounded to this denominator, which shifts times by less than 4 ms in 4 hours."""
FFMPEG_FORMATS = {"M4A": "mp4", "WebM": "matroska", "AAC": "aac"}
FLOATS = npt.NDArray[np.float32]


class SoundNotDecoded(Exception):
    """The file is not decoded. `facts` say why: `error`, one of format, long, rate, channels, memory, damaged."""

    def __init__(self, error: str, **facts: Any) -> None:
        super().__init__(error)
        self.facts = {"error": error, **facts}


def worker() -> Callable[[bytes], bytes]:
    with suppress(OSError):
        os.nice(10)
    return lambda message: json.dumps(_decode_descriptors(json.loads(message))).encode()


def _decode_descriptors(asked: dict[str, Any]) -> dict[str, Any]:
    """Decode from one descriptor to another. Both stay open, so that a process can decode several files."""
    with os.fdopen(os.dup(asked["file"]), "rb") as file, os.fdopen(os.dup(asked["samples"]), "r+b") as out:
        with suppress(ImportError):  # not on Windows
            import resource

            most_bytes = int(2 * RATE * (asked["most_s"] + 60))
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        return decode(asked["kind"], file, out, asked)


def decode(kind: str, file: BinaryIO, out: BinaryIO, asked: dict[str, Any]) -> dict[str, Any]:
    """Decode a file of a known kind into little-endian int16 samples, and return facts about it: `samples`, `rate`,
    `channels`, `claimed_s` of the header (None: unknown), and `error` with its facts if it is not read to its end.

    asked: `most_s`, `most_channels`, `least_rate`, `most_rate`.
    """
    sink = SampleSink(out, asked)
    try:
        _blocks(kind, file, sink)
        sink.finish()
    except SoundNotDecoded as error:
        return {**sink.facts(), **error.facts}
    except MemoryError:
        return {**sink.facts(), "error": "memory"}
    except Exception as error:  # soundfile and av raise RuntimeError, ValueError, OSError and classes of their own
        with suppress(SoundNotDecoded):
            sink.finish()
        # The text of libsndfile alone has no number before it.
        text = getattr(error, "error_string", "") or str(error) or type(error).__name__
        return {**sink.facts(), "error": "damaged", "text": text[:200]}
    return sink.facts()


class SampleSink:
    """Mixes blocks down to one channel, resamples them, and writes them, within the limits."""

    def __init__(self, out: BinaryIO, asked: dict[str, Any]) -> None:
        self._out, self._asked = out, asked
        self._resample: Resampler | None = None
        self.rate = self.channels = self.num_samples = 0
        self.claimed_s: float | None = None

    def open(self, rate: int, channels: int, claimed_frames: int | None) -> None:
        """Check the facts of a header. Raises `SoundNotDecoded`."""
        asked = self._asked
        self.rate, self.channels = rate, channels
        if not asked["least_rate"] <= rate <= asked["most_rate"]:
            raise SoundNotDecoded("rate")
        if not 1 <= channels <= asked["most_channels"]:
            raise SoundNotDecoded("channels")
        self.claimed_s = None if claimed_frames is None else claimed_frames / rate
        self._resample = Resampler(rate)

    def write(self, block: FLOATS) -> None:
        """Take frames [n, channels] within -1 and 1. Raises `SoundNotDecoded` beyond the longest sound."""
        assert self._resample is not None
        self._store(self._resample(block.mean(axis=1) if block.shape[1] > 1 else block[:, 0]))

    def finish(self) -> None:
        if self._resample is not None:
            self._store(self._resample.end())
        self._out.flush()

    def _store(self, values: FLOATS) -> None:
        room = int(self._asked["most_s"] * RATE) - self.num_samples
        if len(values) > room:
            raise SoundNotDecoded("long")
        scaled = np.nan_to_num(values * 32768.0, nan=0.0, posinf=32767.0, neginf=-32768.0)
        self._out.write(np.rint(np.clip(scaled, -32768, 32767)).astype("<i2").tobytes())
        self.num_samples += len(values)

    def facts(self) -> dict[str, Any]:
        return {
            "samples": self.num_samples, "rate": self.rate, "channels": self.channels, "claimed_s": self.claimed_s,
        }  # fmt: skip


def _blocks(kind: str, file: BinaryIO, sink: SampleSink) -> None:
    if kind == "WAV":
        for block in wav_blocks(file, sink.open):
            sink.write(block)
    elif kind in FFMPEG_FORMATS:
        _decode_by_ffmpeg(kind, file, sink)
    else:
        _decode_by_libsndfile(file, sink)


def _decode_by_libsndfile(file: BinaryIO, sink: SampleSink) -> None:
    import soundfile

    class ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
        """A file that is not seeked after each block, which fails where a header has a wrong length or none."""

        def seekable(self) -> bool:
            return False

    own = os.dup(file.fileno())  # libsndfile closes the descriptor of a file that it cannot open, whatever it is told
    try:
        opened = ForwardFile(own, closefd=True)
    except Exception:
        with suppress(OSError):
            os.close(own)
        raise
    with opened as source:
        is_known = 0 < source.frames < 2**35  # FLAC that was written to a pipe has no length
        sink.open(source.samplerate, source.channels, source.frames if is_known else None)
        buffer: Any = np.empty((BLOCK_FRAMES, source.channels), np.float32)
        while count := source.buffer_read_into(memoryview(buffer), dtype="float32"):
            sink.write(buffer[:count])


def _decode_by_ffmpeg(kind: str, file: BinaryIO, sink: SampleSink) -> None:
    import av

    # The format is named, so that no playlist or text file is read that names other files or addresses.
    opened: Any = av.open(file, format=FFMPEG_FORMATS[kind], options={"protocol_whitelist": "pipe"})
    with opened as container:
        if not container.streams.audio:
            raise SoundNotDecoded("format")
        stream, resample = container.streams.audio[0], None
        claimed = None if container.duration is None or kind == "AAC" else container.duration / av.time_base
        for frame in container.decode(stream):
            if resample is None:
                rate, channels = frame.sample_rate, frame.layout.nb_channels
                sink.open(rate, channels, None if claimed is None else int(claimed * rate))
                resample = av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
            for part in resample.resample(frame):
                planes: Any = part.to_ndarray()  # [channels, n]
                sink.write(planes.T)


# WAV ------------------------------------------------------------------------------------------------------------------


def wav_blocks(file: BinaryIO, opened: Callable[[int, int, int | None], None]) -> Iterator[FLOATS]:
    """Yield the frames [n, channels] of a WAV file, in blocks. opened: is called with rate, channels and the claimed
    number of frames, or None, before the first block.

    Raises `SoundNotDecoded`: format for a codec other than integers and floats.
    """
    file.seek(12)
    layout: tuple[int, ...] = ()
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", head)
        if name == b"fmt ":
            body = file.read(min(size, 64))
            if len(body) < 16:
                raise SoundNotDecoded("damaged", text="Its format is cut off")
            tag, channels, rate, _, stride, bits = struct.unpack_from("<HHIIHH", body)
            if tag == 0xFFFE and len(body) >= 26:
                [tag] = struct.unpack_from("<H", body, 24)
            layout = (tag, channels, rate, stride, bits)
            file.seek(size - len(body) + size % 2, os.SEEK_CUR)
        elif name == b"data":
            break
        else:
            file.seek(size + size % 2, os.SEEK_CUR)
    else:
        raise SoundNotDecoded("damaged", text="It has no samples")
    if not layout:
        raise SoundNotDecoded("damaged", text="Its samples come before their format")
    tag, channels, rate, stride, bits = layout
    width = bits // 8
    if (tag, bits) not in ((1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)):
        raise SoundNotDecoded("format", codec=tag)
    if channels and stride != channels * width:
        raise SoundNotDecoded("damaged", text=f"{channels} channels of {bits} bits do not take {stride} bytes")
    is_known = 0 < size < STREAMED_BYTES
    opened(rate, channels, size // stride if is_known else None)
    left = size if is_known else 2**62
    while data := file.read(min(left, BLOCK_FRAMES * stride)):
        left -= len(data)
        yield _as_floats(data[: len(data) // stride * stride], tag, width).reshape(-1, channels)


def _as_floats(data: bytes, tag: int, width: int) -> FLOATS:
    if tag == 3:
        floats: FLOATS = np.frombuffer(data, f"<f{width}").astype(np.float32)
        return floats
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = wide.tobytes(), 4
    return np.frombuffer(data, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))


# Resampling -----------------------------------------------------------------------------------------------------------


class Resampler:
    """Resamples one channel to `RATE`, block by block, by a windowed sinc.

    `up` outputs belong to `down` inputs. They are one product of a window of inputs and a matrix whose columns are the
    filter, shifted to the time of each output.
    """

    def __init__(self, rate: int) -> None:
        ratio = Fraction(RATE, rate).limit_denominator(MOST_DENOMINATOR)
        band = min(1.0, RATE / rate) * PASSED
        self._half = math.ceil(CROSSINGS / band)
        factor = max(1, math.ceil(4 * self._half / ratio.denominator))  # windows overlap by a fraction of their length
        self._up, self._down = ratio.numerator * factor, ratio.denominator * factor
        self._is_same = rate == RATE
        offsets = np.arange(self._down + 2 * self._half)[:, None] - self._half
        times = offsets - np.arange(self._up)[None] * (self._down / self._up)
        inside = np.clip(1 - (times / self._half) ** 2, 0, None)
        kernel = np.sinc(times * band) * np.i0(BETA * np.sqrt(inside)) * (inside > 0)
        self._kernel = (kernel / kernel.sum(axis=0)).astype(np.float32)  # [down + 2 * half, up]
        self._held = np.zeros(self._half, np.float32)  # inputs from `half` before the next window on
        self._num_inputs = self._num_outputs = 0

    def __call__(self, block: FLOATS) -> FLOATS:
        """Return the outputs whose inputs are complete."""
        if self._is_same:
            return block
        self._num_inputs += len(block)
        held = np.concatenate((self._held, block))
        count = max(0, (len(held) - 2 * self._half) // self._down)
        self._held = held[count * self._down :]
        if not count:
            return held[:0]
        windows = np.lib.stride_tricks.sliding_window_view(held, len(self._kernel))[:: self._down][:count]
        outputs: FLOATS = (windows @ self._kernel).reshape(-1)
        self._num_outputs += len(outputs)
        return outputs

    def end(self) -> FLOATS:
        """Return the outputs up to the time of the last input."""
        if self._is_same:
            return np.zeros(0, np.float32)
        total = math.ceil(self._num_inputs * self._up / self._down)
        wanted = total - self._num_outputs
        return self(np.zeros(self._half + self._down, np.float32))[:wanted]
