"""Sound files to samples: what a file is by its first bytes, and its sound at 16 kHz in one channel.

WAV is decoded on the caller's thread. Other formats are decoded in a child process for each file (sound_decoder.py), at
most two at a time, within limits of memory and CPU time. The samples are in a file without a name, which the system
deletes with this process.
Does not know: models, requests, speech.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import mmap
import os
import signal
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localllm.errors import EngineError, MediaTooLarge, UnknownSound, UnreadableMedia
from localllm.machine.child import ChildProcess
from localllm.media import sound_decoder
from localllm.media.sound_decoder import RATE
from localllm.units import format_bytes

log = logging.getLogger(__name__)

AT_ONCE = 2
MEMORY_BYTES = 2**30
"""Address space of a decoder."""
SPARE_S = 30.0
"""Wall-clock time of a decoder beyond its CPU time, on a busy machine."""
MISSED_S, MISSED_SHARE = 0.5, 0.05
"""A file is damaged if it holds less sound than its header claims, by more than both. An MP3 guesses its length."""

PACKAGES = {"WAV": "", "FLAC": "soundfile", "OGG": "soundfile", "MP3": "soundfile", "AIFF": "soundfile",
            "M4A": "av", "WebM": "av", "AAC": "av"}  # fmt: skip
"""The package that decodes each format; "": none is needed."""
EXTRAS = {"soundfile": "localllm[audio]", "av": "localllm[av]"}
_OTHERS = (
    (b"%PDF", "a PDF"), (b"\xff\xd8\xff", "a JPEG"), (b"\x89PNG", "a PNG"), (b"GIF8", "a GIF"),
    (b"PK\3\4", "a ZIP file"), (b"0&\xb2u", "WMA"), (b"#!AMR", "AMR"), (b"caff", "CAF"),
    (b"<", "HTML or XML"), (b"{", "JSON"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SoundLimits:
    """The largest file that is decoded. Rates are in Hz."""

    num_bytes: int = 200 * 2**20
    most_s: float = 4 * 3600.0
    cpu_s: float = 120.0
    most_channels: int = 16
    least_rate: int = 4000
    most_rate: int = 384_000
    advice: str = "Start with a larger --max-audio-seconds, or cut the file."  # on sound that is too long
    damaged_advice: str = "Save it again; allow_damaged=true takes what there is."


class Samples:
    """Sound of one channel at 16 kHz. values: int16 [n], mapped from a file without a name unless given directly."""

    def __init__(
        self, values: npt.NDArray[np.int16], kind: str = "", missing_s: float = 0.0, mapped: mmap.mmap | None = None
    ) -> None:
        """missing_s: sound that a damaged file claims and does not have. mapped: what `values` are in."""
        self.values, self.kind, self.missing_s, self._mapped = values, kind, missing_s, mapped

    def drop_pages(self) -> None:
        """Give the memory of what was read back to the system, which reads it again from the file when it is needed."""
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def seconds(self) -> float:
        return len(self.values) / RATE

    @staticmethod
    def of(values: npt.ArrayLike, rate: int) -> Samples:
        """Return samples of floats within -1 and 1, [n] or [n, channels], at another rate. Raises `UnreadableMedia`."""
        given = np.asarray(values, dtype=np.float32)
        given = given[:, None] if given.ndim == 1 else given
        limits = SoundLimits()
        if given.ndim != 2 or not given.shape[1]:
            raise UnreadableMedia("The samples have the wrong shape.", f"Expected [n] or [n, channels]: {given.shape}.")
        if not limits.least_rate <= rate <= limits.most_rate:
            raise _refused({"error": "rate", "rate": rate}, "The sound", "", limits)
        resample = sound_decoder.Resampler(rate)
        mixed = np.concatenate((resample(given.mean(axis=1)), resample.end()))
        return Samples(np.rint(np.clip(mixed * 32768.0, -32768, 32767)).astype(np.int16))


def kind_of(head: bytes) -> str:
    """Return the format of a file by its first 16 bytes; "" if none is known."""
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "WAV"
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "AIFF"
    if head[4:8] == b"ftyp":
        return "M4A"
    starts = {b"fLaC": "FLAC", b"OggS": "OGG", b"\x1aE\xdf\xa3": "WebM"}
    starts |= {b"ID3%c" % version: "MP3" for version in (2, 3, 4)}
    if found := next((kind for start, kind in starts.items() if head.startswith(start)), ""):
        return found
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "AAC" if head[1] & 0x16 == 0x10 else "MP3" if head[1] & 0x06 else ""
    return ""


def decode(
    file: BinaryIO, where: str = "file", limits: SoundLimits | None = None, *, allow_damaged: bool = False
) -> Samples:
    """Return the samples of a file, which has a descriptor and is read from its start. Blocks: call it on a thread.

    where: the file's name in errors. allow_damaged: take what was decoded before the damage. Raises `UnknownSound`,
    `UnreadableMedia` and `MediaTooLarge`.
    """
    limits = limits or SoundLimits()
    file.seek(0)  # also writes what is buffered
    descriptor = file.fileno()
    num_bytes, head = os.fstat(descriptor).st_size, os.pread(descriptor, 16, 0)
    if num_bytes > limits.num_bytes:
        why = f"It has {format_bytes(num_bytes)}; at most {format_bytes(limits.num_bytes)} are read."
        raise MediaTooLarge(f"{where} is too large.", why, "Send it as FLAC or MP3, or in parts.")
    kind = kind_of(head)
    if not kind:
        looks = next((name for start, name in _OTHERS if head.startswith(start)), "" if head else "an empty file")
        why = f"It begins like {looks}." if looks else "Its first bytes are of no known format."
        raise UnknownSound(f"{where} is not sound that is read here.", why, f"Send {_readable()}.")
    with tempfile.TemporaryFile() as out:
        asked: dict[str, Any] = {
            "kind": kind, "most_s": limits.most_s, "most_channels": limits.most_channels,
            "least_rate": limits.least_rate, "most_rate": limits.most_rate,
        }  # fmt: skip
        facts: dict[str, Any] = {"error": "format"}
        if kind == "WAV":
            with open(os.dup(descriptor), "rb") as source:
                facts = sound_decoder.decode(kind, source, out, asked)
        if facts.get("error") == "format" and (kind != "WAV" or _has("soundfile")):
            facts = _decode_in_child(descriptor, out, asked, limits, where)
        os.lseek(descriptor, 0, os.SEEK_SET)
        num_samples = facts.get("samples", 0)
        missing_s = max(0.0, (facts.get("claimed_s") or 0.0) - num_samples / RATE)
        is_cut = missing_s > max(MISSED_S, MISSED_SHARE * (facts.get("claimed_s") or 0.0))
        if "error" not in facts and is_cut:
            facts |= {"error": "damaged", "text": "the file ends there"}
        if "error" in facts and not (facts["error"] == "damaged" and allow_damaged and num_samples):
            raise _refused(facts, where, kind, limits)
        size = 2 * num_samples
        mapped = mmap.mmap(out.fileno(), size) if size else None
    values = np.frombuffer(b"" if mapped is None else mapped, "<i2")
    return Samples(values, kind, missing_s if is_cut else 0.0, mapped)


@cache
def _turns() -> BoundedSemaphore:
    return BoundedSemaphore(AT_ONCE)


def _decode_in_child(
    descriptor: int, out: BinaryIO, asked: dict[str, Any], limits: SoundLimits, where: str
) -> dict[str, Any]:
    package = PACKAGES[asked["kind"]] or "soundfile"
    if not _has(package):
        raise UnknownSound(
            f"{where} is {asked['kind']}.",
            f"This installation reads {_readable()}.",
            f"pip install '{EXTRAS[package]}', or send {_readable()}.",
        )
    environment = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with _turns():
        os.lseek(descriptor, 0, os.SEEK_SET)
        descriptors = (descriptor, out.fileno())
        try:
            child = ChildProcess(Path(sound_decoder.__file__), environment, descriptors)
        except OSError as error:
            why = f"The process that decodes sound does not start: {error}."
            raise EngineError("Sound cannot be decoded.", why) from error
        kind = "" if asked["kind"] == "WAV" else asked["kind"]  # of a codec that is not read here
        message = json.dumps({**asked, "kind": kind, "file": descriptors[0], "samples": descriptors[1]}).encode()
        is_late = False
        try:
            answer = child.ask(message, limits.cpu_s + SPARE_S, memory_bytes=MEMORY_BYTES, cpu_s=limits.cpu_s)
            facts: dict[str, Any] = json.loads(answer)
            return facts
        except (OSError, EOFError) as error:
            is_late = isinstance(error, TimeoutError)
        finally:
            status = child.end()
    log.warning("sound decoder ended status=%s kind=%s", status, asked["kind"])
    if is_late or status == -getattr(signal, "SIGPROF", 0):
        return {"error": "slow"}
    return {"error": "damaged", "text": "the decoder crashes on it"}


def _refused(facts: dict[str, Any], where: str, kind: str, limits: SoundLimits) -> UnreadableMedia | MediaTooLarge:
    match facts["error"]:
        case "long":
            hours = f"{limits.most_s / 3600:g} hours" if limits.most_s >= 3600 else f"{limits.most_s:g} s"
            return MediaTooLarge(
                f"{where} holds more than {hours} of sound.", "Decoding stopped there.",
                limits.advice,
            )  # fmt: skip
        case "slow":
            why = f"Decoding it takes more than {limits.cpu_s:g} s of CPU time."
            return MediaTooLarge(f"{where} takes too long to decode.", why, "Cut it, or convert it to WAV.")
        case "memory":
            return MediaTooLarge(f"{where} needs more than {format_bytes(MEMORY_BYTES)} to be decoded.")
        case "rate":
            why = f"From {limits.least_rate} to {limits.most_rate} are read."
            return UnreadableMedia(f"{where} has a rate of {facts['rate']} Hz.", why)
        case "channels":
            why = f"From 1 to {limits.most_channels} are read."
            return UnreadableMedia(f"{where} has {facts['channels']} channels.", why)
        case "format":
            codec = f"{kind} of codec {facts['codec']}" if "codec" in facts else f"{kind} without sound"
            return UnknownSound(f"{where} is {codec}.", "Its codec is not read here.", f"Send {_readable()}.")
    text, claimed_s = facts["text"].rstrip("."), facts.get("claimed_s")
    of = f" of {claimed_s:.1f}" if claimed_s and claimed_s < 1e6 else ""
    why = f"Decoding ended after {facts.get('samples', 0) / RATE:.1f}{of} s: {text}."
    return UnreadableMedia(f"{where} is damaged.", why, limits.damaged_advice)


def _has(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def _readable() -> str:
    """Return the formats that this installation reads, in words."""
    kinds = [kind for kind, package in PACKAGES.items() if _has(package)]
    return " or ".join((", ".join(kinds[:-1]), kinds[-1])) if len(kinds) > 1 else kinds[0]
