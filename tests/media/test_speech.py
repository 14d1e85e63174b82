"""Speech is found as the published network finds it, and windows hold all speech, whatever the probabilities are."""

from __future__ import annotations

import hashlib
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from localllm.media.sound import Samples, decode
from localllm.media.speech import (
    CONTEXT,
    FRAME,
    RATE,
    STRIDES,
    WEIGHTS,
    WEIGHTS_SHA256,
    SpeechFinder,
    VadOptions,
    plain_windows,
    speech_finder,
    windows,
)
from localllm.serving.transcription import windows_of
from tests.draws import draws
from tests.media.sounds import wav


def speech_like(seconds: float, seed: int = 0) -> np.ndarray:
    """Return int16 samples of vowels: harmonics of a gliding pitch through two formants, at four syllables a second."""
    draw, time_s = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(120 + 25 * np.sin(2 * np.pi * 0.7 * time_s)) / RATE
    gain = np.clip(np.sin(2 * np.pi * 4 * time_s), 0, None)
    sound = sum(np.sin(n * phase) / (1 + ((n * 120 - 600) / 250) ** 2) for n in range(1, 25))
    return np.rint((sound * gain * 0.2 + draw.standard_normal(len(time_s)) * 0.002) * 32767 / 4).astype(np.int16)


def frame_by_frame(samples: np.ndarray) -> np.ndarray:
    """Return the probabilities, one frame after another with an LSTM cell, as the publishers' network computes them."""
    weights, before = speech_finder()._weights, torch.zeros(CONTEXT)
    cell = torch.nn.LSTMCell(128, 128)
    cell.load_state_dict({name: weights[f"lstm.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
    state, found = (torch.zeros(1, 128), torch.zeros(1, 128)), []
    for at in range(0, len(samples), FRAME):
        frame = torch.from_numpy(samples[at : at + FRAME].astype(np.float32) / 32768)
        frame = F.pad(frame, (0, FRAME - len(frame)))
        x = F.pad(torch.cat((before, frame))[None, None], (0, 64), mode="reflect")
        before, spectrum = frame[-CONTEXT:], F.conv1d(x, weights["stft.weight"], stride=128)
        x = (spectrum[:, :129].square() + spectrum[:, 129:].square()).sqrt()
        for i, stride in enumerate(STRIDES):
            x = F.conv1d(x, weights[f"conv.{i}.weight"], weights[f"conv.{i}.bias"], stride=stride, padding=1).relu()
        state = cell(x[:, :, 0], state)
        out = F.conv1d(state[0].relu()[:, :, None], weights["out.weight"], weights["out.bias"])
        found.append(out.sigmoid().item())
    return np.array(found, np.float32)


def test_the_weights_are_the_published_ones() -> None:
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == WEIGHTS_SHA256
    assert "MIT License" in WEIGHTS.with_suffix(".LICENSE").read_text()


def test_blocks_give_what_single_frames_give(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = speech_like(3.01)
    with torch.inference_mode():
        expected = frame_by_frame(samples)
    for frames in (1, 7, 2048):
        monkeypatch.setattr("localllm.media.speech.BLOCK_FRAMES", frames)
        assert np.abs(SpeechFinder().probabilities(samples) - expected).max() < 1e-4


@pytest.mark.skipif("SILERO_JIT" not in os.environ, reason="needs the wheel's silero_vad.jit in SILERO_JIT")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.load has no other reader for the file
def test_probabilities_are_the_torchscript_s() -> None:
    net = torch.jit.load(Path(os.environ["SILERO_JIT"])).eval()
    samples = speech_like(20)
    with torch.inference_mode():
        net.reset_states()
        padded = F.pad(torch.from_numpy(samples.astype(np.float32) / 32768), (0, -len(samples) % FRAME))
        expected = [net(padded[at : at + FRAME], RATE).item() for at in range(0, len(padded), FRAME)]
    assert np.abs(speech_finder().probabilities(samples) - np.array(expected)).max() < 1e-4


def test_silence_and_noise_are_not_speech() -> None:
    noise = np.random.default_rng(0).standard_normal(RATE * 2) * 300
    for samples in (np.zeros(RATE * 2, np.int16), noise.astype(np.int16)):
        assert windows(speech_finder().probabilities(samples), len(samples), 30) == []


CURVES = arrays.arrays(np.float32, st.integers(0, 400), elements=st.floats(0, 1, width=32))


@draws(200)
@given(CURVES, st.floats(1, 30), st.integers(0, FRAME - 1), st.floats(0.1, 0.9))
def test_windows_hold_all_speech_and_are_short_and_ascending(
    curve: np.ndarray, longest_s: float, missing: int, threshold: float
) -> None:
    total = max(0, len(curve) * FRAME - missing)
    found = windows(curve, total, longest_s, VadOptions(threshold=threshold))
    assert all(0 < each.stop - each.start <= longest_s * RATE for each in found)
    assert all(before.stop <= after.start for before, after in pairwise(found))
    assert not found or (found[0].start >= 0 and found[-1].stop <= total)
    covered = np.zeros(total, bool)
    for each in found:
        covered[each.start : each.stop] = True
    for i in np.flatnonzero(curve >= threshold):
        assert covered[i * FRAME : min(total, (i + 1) * FRAME)].all()
    for i in np.flatnonzero(~covered[::FRAME]):
        assert curve[i] < threshold


def test_a_pause_is_where_a_long_sound_is_cut() -> None:
    curve = np.full(2000, 0.9, np.float32)
    curve[800] = 0.6  # a breath at 25.6 s
    first, *_ = windows(curve, 2000 * FRAME, 30)
    assert first.stop == 800 * FRAME
    curve[500:600] = 0
    first, second, *_ = windows(curve, 2000 * FRAME, 30)
    assert (first.stop, second.start) == (500 * FRAME + 3200, 600 * FRAME - 3200)


def test_short_parts_share_a_window() -> None:
    curve = np.zeros(900, np.float32)
    curve[10:100] = curve[200:300] = curve[800:890] = 1
    assert len(windows(curve, 900 * FRAME, 30)) == 1
    assert len(windows(curve, 900 * FRAME, 20)) == 2


@draws(50)
@given(st.integers(0, 40 * RATE), st.floats(1, 12))
def test_plain_windows_leave_nothing_out(total: int, longest_s: float) -> None:
    found = plain_windows(np.zeros(total, np.int16), longest_s)
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])][: len(found)]
    assert (found[-1].stop if found else 0) == total
    assert all(0 < each.stop - each.start <= longest_s * RATE for each in found)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("vad", [VadOptions(), None])
def test_windows_of_a_long_sound_keep_little_of_it_in_memory(
    vad: VadOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes, most = 20, list[int]()

    def resident() -> int:
        """Return the bytes of files that this process has in its memory."""
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return sum(1024 * int(words[1]) for words in lines if words[0] in ("RssFile:", "RssShmem:"))

    def block(self: SpeechFinder, samples: torch.Tensor, state: Any) -> Any:
        most.append(resident())
        return torch.ones((len(samples) - CONTEXT) // FRAME), state

    monkeypatch.setattr(SpeechFinder, "_block", block)
    with tempfile.TemporaryFile() as file:
        file.write(wav(np.random.default_rng(0).standard_normal(16_000 * 60 * minutes) / 8))
        samples = decode(file)
    before = resident()
    found = windows_of(samples, vad)
    assert max([resident(), *most]) - before < samples.values.nbytes / 4
    assert found[-1].stop == len(samples.values)
    assert samples.values[:: 16_000 * 60].any()  # it is read again


@pytest.mark.parametrize("kind", ["silence", "noise", "hum", "music"])
def test_a_minute_without_speech_has_no_windows(kind: str) -> None:
    draw, time_s = np.random.default_rng(0), np.arange(60 * RATE) / RATE
    if kind == "silence":
        sound = np.zeros(60 * RATE)
    elif kind == "noise":
        sound = draw.standard_normal(60 * RATE) * 0.1
    elif kind == "hum":
        sound = sum(np.sin(2 * np.pi * 50 * n * time_s) / n for n in range(1, 8)) * 0.1
    else:  # chords of plucked strings, two a second
        chord = np.array([[220, 277.2, 329.6], [196, 246.9, 293.7], [174.6, 220, 261.6]])[(time_s * 2).astype(int) % 3]
        sound = np.sin(2 * np.pi * chord * time_s[:, None]).sum(axis=1) * np.exp(-3 * (time_s % 0.5)) * 0.15
    samples = np.rint(np.clip(sound, -1, 1) * 32767).astype(np.int16)
    assert windows_of(Samples(samples), VadOptions()) == []
