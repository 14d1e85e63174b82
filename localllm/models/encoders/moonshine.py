"""Moonshine: an encoder of raw samples, and a decoder with rotary positions (Jeffries et al. 2024, arXiv:2410.15608).

The encoder is transformers' module, and takes as long as the sound is. The second series, Moonshine Streaming, cuts the
sound into frames of 5 ms, and its layers see a few of them around each; its states get a learned position and a
projection before the decoder reads them. Text has neither timestamps nor a language: each checkpoint has its own.
Does not know: files, windows, words, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.encoders.source import HeldAs, SourceEncoder, load_encoder
from localllm.models.encoders.speech_rows import LOOP_TIMES, Read, draw_text, looped_tokens, search_text
from localllm.models.encoders.whisper import Decoding, SpokenSegment, SpokenText
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec

RATE = 16_000
LEAST_SAMPLES = RATE // 10
"""Shorter windows are padded with silence: three convolutions need 895 samples."""
MOST_TOKENS_PER_S = 13.0
"""Tokens of a second of sound at most. The publishers end English texts at 6.5 a second, and twice that in languages
of more tokens for a word: what is longer is invented."""
LONGEST_S = 30.0


class MoonshineModel:
    """Moonshine on one device."""

    kind = "moonshine"

    def __init__(
        self, encoder: SourceEncoder, decoder: DecoderModel, device: torch.device, *, normalizes: bool
    ) -> None:
        """normalizes: windows are brought to mean 0 and variance 1 before they are read."""
        self.encoder, self.decoder, self.device = encoder, decoder, device
        config = encoder.module.config
        sound = getattr(config, "encoder_config", None)  # of the second series
        self._frame = 0 if sound is None else round(sound.sample_rate * sound.frame_ms / 1000)
        self._normalizes = normalizes
        self.source_len, self.text_len = lengths_of(config)
        source = decoder.spec.source
        assert source is not None, "it is an encoder-decoder"
        self._prompt, self._ends = list(source.start_ids), decoder.spec.eos_token_ids

    @torch.inference_mode()
    def encode(self, samples: npt.NDArray[np.int16]) -> Tensor:
        """Return the states [S, hidden] of a window. Alone: its first norm is over all of the sound."""
        module, step = self.encoder.module, self._frame or 1
        x = np.zeros(-(-max(len(samples), LEAST_SAMPLES) // step) * step, np.float32)
        x[: len(samples)] = samples / np.float32(32768)
        if self._normalizes:
            x[: len(samples)] = (x[: len(samples)] - samples.mean() / 32768) / np.sqrt((samples / 32768).var() + 1e-7)
        values = torch.from_numpy(x)[None].to(self.device, module.dtype)
        if not self._frame:
            states: Tensor = module.get_encoder()(values).last_hidden_state[0]
            return states.to(self.decoder.dtype)
        inside = (torch.arange(len(x), device=self.device) < max(len(samples), LEAST_SAMPLES))[None]
        states = module.get_encoder()(values, attention_mask=inside).last_hidden_state[0]
        positions = module.decoder.pos_emb.weight[: len(states)]
        return module.decoder.proj(states + positions).to(self.decoder.dtype)  # type: ignore[no-any-return]

    def write(
        self, samples: npt.NDArray[np.int16], asked: Decoding, ratio_of: Callable[[Sequence[int]], float]
    ) -> Generator[Read, Tensor, SpokenText]:
        """Write a window as one segment. A text that begins to repeat itself is cut after its first time."""
        seconds, temperature = len(samples) / RATE, asked.temperatures[0]
        most = min(self.text_len - len(self._prompt), max(1, int(max(seconds, 1.0) * MOST_TOKENS_PER_S)))
        most = min(most, asked.most_tokens or most)
        logits = (yield Read([self._prompt], 0))[0, -1]
        first, ends = len(self._prompt), self._ends
        if asked.beams > 1 and not temperature:
            found = yield from search_text(logits, first, ends, most, _anything, asked.beams)
        else:
            found = yield from draw_text(logits, first, ends, most, _anything, temperature, asked.seed)
        kept = len(found.token_ids) - looped_tokens(found.token_ids) * LOOP_TIMES
        segment = SpokenSegment(found.token_ids[:kept], 0.0, seconds, found.logprobs[:kept])
        segments = (segment,) if kept else ()
        return SpokenText("", segments, temperature, found.avg_logprob, 0.0)


def _anything(logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return logits in which every token may follow."""
    return logits


def lengths_of(config: Any) -> tuple[int, int]:
    """Return the states of a window of 30 s, and the most tokens of its text, start included."""
    return states_of(config, round(LONGEST_S * RATE)), min(
        config.max_position_embeddings, 1 + round(LONGEST_S * MOST_TOKENS_PER_S)
    )


def states_of(config: Any, samples: int) -> int:
    """Return the states that the encoder makes of samples."""
    if (sound := getattr(config, "encoder_config", None)) is not None:
        frames: int = -(-samples // round(sound.sample_rate * sound.frame_ms / 1000))
        return ((frames - 1) // 2 + 1 - 1) // 2 + 1
    for kernel, stride in ((127, 64), (7, 3), (3, 2)):
        samples = (samples - kernel) // stride + 1
    return samples


def encoded_numbers(config: Any) -> int:
    """Return the numbers that are held at once while a window of 30 s is encoded."""
    states, width = states_of(config, round(LONGEST_S * RATE)), int(config.hidden_size)
    if (sound := getattr(config, "encoder_config", None)) is None:
        # The output of the first convolution, before and after its norm.
        return round(3 * (LONGEST_S * RATE / 64) * width)
    # A mask of bytes for each layer and the numbers that one is made of, then a layer's stream and its wide part.
    masks: int = (sound.num_hidden_layers + 9) * states**2 // 4
    numbers: int = masks + 14 * states * sound.hidden_size
    return numbers


def load_moonshine(path: Path, device: torch.device, dtype: torch.dtype, held: HeldAs = HeldAs()) -> MoonshineModel:  # noqa: B008
    """Load the model of folder `path`. Raises `CorruptModel`, `UnsupportedModel`."""
    file = path / "preprocessor_config.json"
    given = read_json_object(file) if file.is_file() else {"do_normalize": False}
    if (rate := given.get("sampling_rate", RATE)) != RATE:
        raise UnsupportedModel(f"{path.name} reads {rate} samples a second.", f"Supported: {RATE}.")
    spec: ModelSpec = read_spec(path)
    if not spec.eos_token_ids:
        raise CorruptModel(f"{path.name} does not say which token ends a text.", "Its files have no eos_token_id.")
    decoder = load_model(path, spec, device, dtype, **held._asdict())
    assert isinstance(decoder, DecoderModel), "the decoder is localllm's own"
    normalizes = bool(given.get("do_normalize", True))
    encoder = load_encoder(path, device, dtype, held.of_sound(device))
    return MoonshineModel(encoder, decoder, device, normalizes=normalizes)
