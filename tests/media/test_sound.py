"""Sound files become samples at 16 kHz, and every broken, long or hostile file is refused by name without harm."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from localllm.errors import LocalLLMError, MediaTooLarge, UnknownSound, UnreadableMedia
from localllm.machine.child import ChildProcess
from localllm.media import sound as module
from localllm.media import sound_decoder
from localllm.media.sound import Samples, SoundLimits, decode, kind_of
from localllm.media.sound_decoder import RATE, Resampler
from tests.media.sounds import muxed, tone, wav, written

needs_soundfile = pytest.mark.skipif(not module._has("soundfile"), reason="needs soundfile")
needs_av = pytest.mark.skipif(not module._has("av"), reason="needs av")


def decoded(data: bytes, limits: SoundLimits | None = None, *, allow_damaged: bool = False) -> Samples:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        return decode(file, "file", limits, allow_damaged=allow_damaged)


def error_db(samples: Samples, expected: np.ndarray) -> float:
    """Return the error in dB below the sound, without a tenth of a second at both ends."""
    count = min(len(samples.values), len(expected))
    inner = slice(RATE // 10, count - RATE // 10)
    difference = samples.values[inner] / 32768 - expected[inner]
    return float(10 * np.log10(np.mean(difference**2) / np.mean(expected[inner] ** 2)))


def loudest_hz(samples: Samples) -> float:
    return float(np.abs(np.fft.rfft(samples.values[:RATE], RATE)).argmax())


WAVS = [(rate, channels, bits, is_float)
        for rate in (8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 44_056)
        for channels, bits, is_float in ((1, 16, False), (2, 24, False), (8, 32, True))]  # fmt: skip


@pytest.mark.parametrize(("rate", "channels", "bits", "is_float"), WAVS)
def test_wav_of_every_rate_depth_and_channel_count_is_the_same_sound(
    rate: int, channels: int, bits: int, is_float: bool
) -> None:
    sounds = [tone(0.7, rate, hz, 0.8) for hz in (440, 1000, 2900)[:channels]]
    sounds += [np.zeros_like(sounds[0])] * (channels - len(sounds))
    found = decoded(wav(np.stack(sounds, axis=1), rate, bits, is_float=is_float))
    expected = sum(tone(0.7, RATE, hz, 0.8) for hz in (440, 1000, 2900)[:channels]) / channels
    assert abs(len(found.values) - 0.7 * RATE) <= 1
    assert error_db(found, np.asarray(expected)) < (-50 if rate == 44_056 else -60)  # an odd ratio is rounded


@pytest.mark.parametrize(("bits", "is_float", "most_db"), [(8, False, -38), (32, False, -80), (64, True, -80)])
def test_wav_of_other_depths_is_read(bits: int, is_float: bool, most_db: float) -> None:
    assert error_db(decoded(wav(tone(0.5), bits=bits, is_float=is_float)), tone(0.5)) < most_db


def test_16_khz_of_16_bits_is_unchanged() -> None:
    values = np.random.default_rng(0).integers(-32768, 32767, 5000)
    assert np.array_equal(decoded(wav(values / 32767)).values, values)


def test_loud_floats_are_clipped_and_nan_is_silence() -> None:
    found = decoded(wav([1.7, -1.7, float("nan"), float("inf"), 0.5], bits=32, is_float=True)).values
    assert found.tolist() == [32767, -32768, 0, 32767, 16384]


@pytest.mark.parametrize("rate", [8000, 44_100, 48_000, 192_000])
def test_blocks_of_any_length_resample_to_the_same(rate: int) -> None:
    sound, draw = np.random.default_rng(rate).standard_normal(30_000).astype(np.float32), random.Random(rate)
    once = Resampler(rate)
    whole, blocks, at = np.concatenate((once(sound), once.end())), [], 0
    again = Resampler(rate)
    while at < len(sound):
        step = draw.choice((1, 7, 500, 5000))
        blocks.append(again(sound[at : at + step]))
        at += step
    assert np.allclose(np.concatenate((*blocks, again.end())), whole, atol=1e-5)


def test_what_16_khz_cannot_hold_is_filtered_out() -> None:
    found = decoded(wav(tone(0.5, 48_000, 9_000), 48_000)).values / 32768
    assert np.abs(found[1000:-1000]).max() < 0.5 * 10 ** (-60 / 20)


@needs_soundfile
@pytest.mark.parametrize(
    ("kind", "subtype", "rate"),
    [("FLAC", "PCM_16", 44_100), ("OGG", "VORBIS", 44_100), ("OGG", "OPUS", 48_000),
     ("MP3", "MPEG_LAYER_III", 16_000), ("AIFF", "PCM_24", 22_050), ("WAV", "IMA_ADPCM", 16_000)],
)  # fmt: skip
def test_formats_of_libsndfile_are_read(kind: str, subtype: str, rate: int) -> None:
    found = decoded(written(np.stack([tone(1, rate)] * 2, axis=1), rate, kind, subtype))
    assert (found.kind, round(found.seconds, 1)) == (kind, 1.0)
    assert abs(loudest_hz(found) - 440) < 5
    assert 0.45 < np.abs(found.values[4000:12_000]).max() / 32768 < 0.55
    if kind in ("FLAC", "AIFF"):  # other encoders change the sound, or delay it
        assert error_db(found, tone(1)) < -60


@needs_av
@pytest.mark.parametrize(
    ("kind", "codec", "rate"), [("mp4", "aac", 16_000), ("webm", "libopus", 48_000), ("adts", "aac", 44_100)]
)
def test_formats_of_ffmpeg_are_read(kind: str, codec: str, rate: int) -> None:
    found = decoded(muxed(tone(1, rate), rate, kind, codec))
    assert abs(found.seconds - 1) < 0.1
    assert abs(loudest_hz(found) - 440) < 5
    assert 0.4 < np.abs(found.values[4000:12_000]).max() / 32768 < 0.6
    assert found.kind == {"mp4": "M4A", "webm": "WebM", "adts": "AAC"}[kind]


def test_the_first_bytes_decide() -> None:
    heads = {b"RIFF\0\0\0\0WAVEfmt ": "WAV", b"RIFF\0\0\0\0AVI fmt ": "", b"\xff\xfb\x90\0": "MP3", b"\xff\xf1P": "AAC",
             b"\xff\xd8\xff\xe0": "", b"\0\0\0\x20ftypM4A ": "M4A", b"fLaC": "FLAC", b"": "", b"\xff": ""}  # fmt: skip
    assert {head: kind_of(head) for head in heads} == heads


# Refusals -------------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[bytes, type[LocalLLMError], str]] = [
    (b"", UnknownSound, "file is not sound that is read here. It begins like an empty file."),
    (b"%PDF-1.7 ..........", UnknownSound, "It begins like a PDF."),
    (b"plain words and words", UnknownSound, "Its first bytes are of no known format."),
    (wav(tone(0.1), rate=3999), UnreadableMedia, "file has a rate of 3999 Hz. From 4000 to 384000 are read."),
    (wav(tone(0.1), rate=4_000_000_000), UnreadableMedia, "a rate of 4000000000 Hz"),
    (wav(np.zeros((9, 17))), UnreadableMedia, "file has 17 channels. From 1 to 16 are read."),
    (wav(tone(0.1), channels=0xFFFF), UnreadableMedia, "65535 channels of 16 bits do not take 2 bytes"),
    (wav(tone(0.1))[:30], UnreadableMedia, "file is damaged. Decoding ended after 0.0 s: "),
    (wav(tone(0.1))[:50], UnreadableMedia, "It has no samples"),
    (wav(tone(3))[:50_000], UnreadableMedia, "is damaged. Decoding ended after 1.6 of 3.0 s: the file ends there."),
    (wav(tone(11)), MediaTooLarge, "file holds more than 10 s of sound."),
    (wav(tone(50)), MediaTooLarge, "file is too large. It has 1.5 MiB; at most 1.0 MiB are read."),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_file_is_refused_by_name(case: int) -> None:
    data, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        decoded(data, SoundLimits(num_bytes=2**20, most_s=10))
    assert type(caught.value) is error
    assert text in str(caught.value)


def test_a_damaged_file_is_read_as_far_as_it_goes_on_request() -> None:
    found = decoded(wav(tone(3))[: 44 + 12 + 32_000], allow_damaged=True)
    assert (found.seconds, round(found.missing_s, 2)) == (1.0, 2.0)


def test_a_wav_that_was_written_to_a_pipe_is_read_to_its_end() -> None:
    for size in (0, 0x7FFFF000, 0xFFFFFFFF):
        found = decoded(wav(tone(0.5), size=size))
        assert (found.seconds, found.missing_s) == (0.5, 0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has", lambda package: not package)
    cases = {b"fLaC" + bytes(20): "localllm[audio]", b"\0\0\0\x20ftypM4A ": "localllm[av]"}
    for data, extra in cases.items():
        with pytest.raises(UnknownSound, match="This installation reads WAV") as caught:
            decoded(data)
        assert extra in caught.value.hint


# Hostile files --------------------------------------------------------------------------------------------------------


def flac_of_length(frames: int) -> bytes:
    """Return a FLAC of 2 s whose header claims another number of frames."""
    data = bytearray(written(tone(2)))
    at = data.find(b"fLaC") + 8
    data[at + 13] = data[at + 13] & 0xF0 | frames >> 32
    data[at + 14 : at + 18] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(data)


@needs_soundfile
def test_a_forged_length_takes_no_memory() -> None:
    assert decoded(flac_of_length(0)).seconds == 2  # as programs that write to a pipe leave it
    found = decoded(flac_of_length(2**36 - 1), allow_damaged=True)
    assert found.seconds == 2


@needs_soundfile
def test_hours_of_silence_end_at_the_limit() -> None:
    data = written(np.zeros(RATE * 300, np.int16))
    assert len(data) < 100_000
    began_s = time.monotonic()
    with pytest.raises(MediaTooLarge, match="more than 60 s of sound"):
        decoded(data, SoundLimits(most_s=60))
    assert time.monotonic() - began_s < 20


@needs_soundfile
def test_a_decoder_that_crashes_or_hangs_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data, started = written(tone(1)), list[int]()
    real = module.ChildProcess

    def stopped(*args: object) -> module.ChildProcess:
        child = real(*args)  # type: ignore[arg-type]
        started.append(child.process.pid)
        os.kill(child.process.pid, ends.pop())
        return child

    monkeypatch.setattr(module, "ChildProcess", stopped)
    monkeypatch.setattr(module, "SPARE_S", 0.1)
    ends = [signal.SIGKILL]
    with pytest.raises(UnreadableMedia, match="the decoder crashes on it"):
        decoded(data)
    ends = [signal.SIGSTOP]
    with pytest.raises(MediaTooLarge, match="takes more than"):
        decoded(data, SoundLimits(cpu_s=0.2))
    monkeypatch.undo()
    assert decoded(data).seconds == 1
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def corpus() -> list[bytes]:
    sound = np.random.default_rng(0).standard_normal((4000, 2)) * 0.1
    found = [wav(sound), wav(sound[:, 0], 44_100, 24), wav(sound, bits=32, is_float=True)]
    if module._has("soundfile"):  # to write them
        found += [written(sound, RATE, kind) for kind in ("FLAC", "OGG", "MP3", "AIFF")]
        found += [written(sound, 48_000, "OGG", "OPUS")]
    if module._has("av"):
        found += [muxed(sound[:, 0], RATE, "mp4", "aac"), muxed(sound[:, 0], 48_000, "webm", "libopus")]
    return found


def mutated(draw: random.Random, files: list[bytes]) -> bytes:
    data = bytearray(draw.choice(files))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(data), draw.choice([60, 10**6]))) if data else 0
        match draw.randrange(4):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                data[at : at + 4] = draw.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
            case 2:
                del data[at:]
            case 3:
                other = draw.choice(files)
                data[at:at] = other[draw.randrange(len(other)) :]
    return bytes(data)


def fuzz(count: int, seed: int, files: list[bytes]) -> tuple[int, int]:
    """Return how many of `count` mutated files are read and refused."""
    draw, num_read, refused = random.Random(seed), 0, list[str]()
    for _ in range(count):
        try:
            found = decoded(mutated(draw, files), SoundLimits(most_s=60, cpu_s=20))
            assert found.seconds <= 60
            num_read += 1
        except (UnreadableMedia, MediaTooLarge) as error:
            refused.append(error.what)
    assert all(what.startswith("file ") for what in refused)
    return num_read, len(refused)


def test_mutated_wav_files_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has", lambda package: not package)  # no child for a codec that is not read here
    num_read, num_refused = fuzz(200, 1, corpus())
    assert num_read > 30
    assert num_refused > 30


@needs_soundfile
@pytest.mark.parametrize("head", [b"fLaC", b"OggS", b"FORM\0\0\0\0AIFF"])
def test_a_damaged_header_is_refused_with_the_librarys_reason(head: bytes) -> None:
    """libsndfile closes the descriptor of such a file itself, which once ended the process."""
    with pytest.raises(UnreadableMedia) as caught:
        decoded(head + b"\0" * 100)
    assert re.search(r"unimplemented format|[Cc]hannel count is zero", caught.value.why), caught.value.why
    assert "crash" not in caught.value.why


class KeptDecoder:
    """A decoder process that is kept from file to file, in place of one for each file. A crash ends it alone."""

    def __init__(self) -> None:
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._child: ChildProcess | None = None
        self._plain = module._decode_in_child
        self.num_files = self.num_children = 0

    def decode(
        self, descriptor: int, out: BinaryIO, asked: dict[str, Any], limits: SoundLimits, where: str
    ) -> dict[str, Any]:
        if not module._has(module.PACKAGES[asked["kind"]] or "soundfile"):
            return self._plain(descriptor, out, asked, limits, where)
        source, samples = (file.fileno() for file in self._files)
        for each in (source, samples):
            os.ftruncate(each, 0)
            os.lseek(each, 0, os.SEEK_SET)
        os.pwrite(source, os.pread(descriptor, os.fstat(descriptor).st_size, 0), 0)
        if self._child is None:
            self._child = ChildProcess(Path(sound_decoder.__file__), {"OMP_NUM_THREADS": "1"}, (source, samples))
            self.num_children += 1
        self.num_files += 1
        message = json.dumps({**asked, "file": source, "samples": samples}).encode()
        try:
            facts: dict[str, Any] = json.loads(
                self._child.ask(message, limits.cpu_s + 30, memory_bytes=module.MEMORY_BYTES, cpu_s=limits.cpu_s)
            )
        except (OSError, EOFError):
            self._child.end()
            self._child = None
            return {"error": "damaged", "text": "the decoder crashes on it"}
        os.pwrite(out.fileno(), os.pread(samples, 2 * facts["samples"], 0), 0)
        return facts

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
        for file in self._files:
            file.close()


@pytest.fixture
def kept_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptDecoder]:
    kept = KeptDecoder()
    monkeypatch.setattr(module, "_decode_in_child", kept.decode)
    yield kept
    kept.close()


@needs_soundfile
def test_a_kept_decoder_gives_the_samples_of_one_for_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [each for each in corpus() if kind_of(each[:16]) != "WAV"]
    alone = [decoded(each).values.copy() for each in files]
    kept = KeptDecoder()
    monkeypatch.setattr(module, "_decode_in_child", kept.decode)
    for _ in range(2):
        assert all(np.array_equal(decoded(each).values, own) for each, own in zip(files, alone, strict=True))
    assert (kept.num_files, kept.num_children) == (2 * len(files), 1)
    kept.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(10))  # each in seconds: most files are decoded by one process
def test_ten_thousand_mutated_files_are_read_or_refused(piece: int, kept_decoder: KeptDecoder) -> None:
    # a child has its parent's pages until it runs its own program, and other tests of this process had children, too
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = max(whole, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    num_read, num_refused = fuzz(1000, 2 + piece, corpus())
    assert num_read > 100
    assert num_refused > 100
    assert kept_decoder.num_children <= 1 + kept_decoder.num_files // 20
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(2**20, others + 2**16)  # KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < max(2**20, whole) + 2**18


# Traces ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@needs_soundfile
def test_samples_have_no_name_on_the_disk_at_any_time(temporary: Path) -> None:
    data, seen, done = written(tone(30)), set[str](), threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.update(os.listdir(temporary))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = decoded(data)
    finally:
        done.set()
        watcher.join()
    assert (found.seconds, seen) == (30, set())


def test_given_samples_are_resampled() -> None:
    found = Samples.of(np.stack([tone(1, 44_100)] * 2, axis=1), 44_100)
    assert error_db(found, tone(1)) < -60
    refused: list[Callable[[], Samples]] = [
        lambda: Samples.of(tone(1), 100),
        lambda: Samples.of(np.zeros((2, 2, 2)), RATE),
    ]
    for make in refused:
        with pytest.raises(UnreadableMedia):
            make()
