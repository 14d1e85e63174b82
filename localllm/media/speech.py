"""Find speech in a sound, and cut the sound into windows in which a model recognises it.

`SpeechFinder` is the network of Silero VAD, with its weights of version 6.2.3 (MIT, silero_16k.LICENSE beside it).
`windows` cuts a sound at its pauses: parts without speech are left out, and times count from the begin of the sound.
Does not know: files, models that recognise speech.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

RATE = 16_000
FRAME = 512
"""Samples of one probability: 32 ms."""
CONTEXT = 64
"""Samples before a frame that the network also sees."""
BLOCK_FRAMES = 2048
"""Frames that are computed at once: about a minute."""
STRIDES = (1, 2, 2, 1)
WEIGHTS = Path(__file__).with_name("silero_16k.safetensors")
WEIGHTS_SHA256 = "3e7ad526bc48b2a0d337116c8e05e523986c22a1bbe74774a4f145f65a841b20"


class SpeechFinder:
    """Finds speech. A finder holds weights only, so that several threads can use one."""

    def __init__(self) -> None:
        from safetensors.torch import load_file

        self._weights = load_file(WEIGHTS)

    def probabilities(
        self, samples: npt.NDArray[np.int16], on_block: Callable[[], None] = lambda: None
    ) -> npt.NDArray[np.float32]:
        """Return the probability of speech in each frame of samples [n] at 16 kHz; the last frame is padded.
        on_block: called after each minute."""
        import torch

        count = -(-len(samples) // FRAME)
        found = np.zeros(count, np.float32)
        state = (torch.zeros(1, 1, 128), torch.zeros(1, 1, 128))
        with torch.inference_mode():
            for first in range(0, count, BLOCK_FRAMES):
                last = min(count, first + BLOCK_FRAMES)
                start, stop = first * FRAME - CONTEXT, last * FRAME
                block = np.zeros(stop - start, np.float32)
                part = samples[max(0, start) : stop]
                block[max(0, -start) : max(0, -start) + len(part)] = part / np.float32(32768)
                values, state = self._block(torch.from_numpy(block), state)
                found[first:last] = values.numpy()
                on_block()
        return found

    def _block(self, samples: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the probabilities of the frames of samples [CONTEXT + frames * FRAME], and the LSTM's next state."""
        import torch
        import torch.nn.functional as F

        weights = self._weights
        x = samples.unfold(0, CONTEXT + FRAME, FRAME)[:, None]  # each frame with the samples before it
        x = F.conv1d(F.pad(x, (0, CONTEXT), mode="reflect"), weights["stft.weight"], stride=128)
        x = torch.sqrt(x[:, :129] ** 2 + x[:, 129:] ** 2)
        for i, stride in enumerate(STRIDES):
            weight, bias = weights[f"conv.{i}.weight"], weights[f"conv.{i}.bias"]
            x = F.relu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        cell = [weights[f"lstm.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        x, *after = torch.lstm(x.transpose(1, 2), state, cell, True, 1, 0.0, False, False, False)
        x = F.conv1d(F.relu(x).transpose(1, 2), weights["out.weight"], weights["out.bias"])
        return torch.sigmoid(x).flatten(), (after[0], after[1])


@cache
def speech_finder() -> SpeechFinder:
    """Return the finder of this process."""
    return SpeechFinder()


class Window(NamedTuple):
    """A part of a sound that is recognised by itself, in samples."""

    start: int
    stop: int


class VadOptions(NamedTuple):
    """Options that tell speech from silence, as in OpenAI's `server_vad`."""

    threshold: float = 0.5  # probability from which on a frame is speech
    padding_s: float = 0.2  # kept before and after speech
    silence_s: float = 0.5  # shorter silence does not end a part of speech


def windows(
    probabilities: npt.NDArray[np.float32],
    total: int,
    longest_s: float,
    options: VadOptions = VadOptions(),  # noqa: B008
) -> list[Window]:
    """Return the windows of a sound of `total` samples: ascending, without overlap, at most `longest_s` long, and
    together they hold every frame of speech.

    Neighbouring parts of speech share a window while they fit. Speech that is longer is cut in its last third, where
    the probability of speech is lowest.
    """
    longest = int(longest_s * RATE) // FRAME * FRAME
    found: list[Window] = []
    for part in _speech(probabilities, total, options):
        start, stop = part
        while stop - start > longest:
            low, high = (start + longest * 2 // 3) // FRAME, (start + longest) // FRAME
            cut = (low + int(probabilities[low:high].argmin())) * FRAME
            found.append(Window(start, cut))
            start = cut
        if found and stop - found[-1].start <= longest and found[-1].stop <= start and start == part.start:
            found[-1] = Window(found[-1].start, stop)
        else:
            found.append(Window(start, stop))
    return found


def _speech(probabilities: npt.NDArray[np.float32], total: int, options: VadOptions) -> list[Window]:
    """Return the padded parts of speech, with short silences bridged."""
    is_speech = np.concatenate(([False], probabilities >= options.threshold, [False]))
    edges = np.flatnonzero(is_speech[1:] != is_speech[:-1])
    padding, gap = int(options.padding_s * RATE), int(options.silence_s * RATE)
    parts: list[Window] = []
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start, stop = max(0, first * FRAME - padding), min(total, last * FRAME + padding)
        if parts and start - parts[-1].stop < max(0, gap - 2 * padding):
            parts[-1] = Window(parts[-1].start, stop)
        else:
            parts.append(Window(max(start, parts[-1].stop if parts else 0), stop))
    return parts


def plain_windows(
    samples: npt.NDArray[np.int16], longest_s: float, on_block: Callable[[], None] = lambda: None
) -> list[Window]:
    """Return windows that leave nothing out, cut where the sound is quietest in the last third. on_block: called after
    each."""
    longest, start, found = int(longest_s * RATE) // FRAME * FRAME, 0, list[Window]()
    while len(samples) - start > longest:
        low = start + longest * 2 // 3 // FRAME * FRAME
        frames = samples[low : start + longest].astype(np.float32)
        frames = frames[: len(frames) // FRAME * FRAME].reshape(-1, FRAME)
        cut = low + int((frames**2).mean(axis=1).argmin()) * FRAME + FRAME // 2
        found.append(Window(start, cut))
        start = cut
        on_block()
    return [*found, Window(start, len(samples))] if len(samples) > start else found
