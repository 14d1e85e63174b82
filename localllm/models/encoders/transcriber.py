"""Models that transcribe by an encoder: Parakeet with CTC, or with a transducer that also names durations (TDT).

The encoder and the small networks behind it are transformers' modules; features and greedy decoding are written here.
The features are log-mel energies, normalised over the window. CTC names a token or blank for each frame. The transducer
goes through the frames: at each it names the next token, or blank, and the frames to advance.

    ParakeetForCTC      tokens of frames, equal neighbours merged       Graves et al. 2006
    ParakeetForTDT      a prediction network and a joint network        Xu et al. 2023, arXiv:2304.06795

Does not know: files, windows, words, queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel, UnsupportedOption
from localllm.files.json_file import read_json_object
from localllm.kernels.cpu.native.library import native
from localllm.models.encoders import moonshine
from localllm.models.encoders.moonshine import MoonshineModel, load_moonshine
from localllm.models.encoders.recipe import MOONSHINES, TRANSCRIBERS, WHISPER, TranscriberSizes
from localllm.models.encoders.source import HeldAs, encoder_bytes
from localllm.models.encoders.whisper import WhisperModel, load_whisper
from localllm.models.loader import resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.layouts import use_device_layouts
from localllm.models.transformers_backend.module import read_module
from localllm.models.weights.parameters import held_bytes

RATE = 16_000
LEAST_SAMPLES = RATE // 2
"""Shorter windows are padded with silence: the features of a few frames cannot be normalised."""
LOG_FLOOR, STD_FLOOR = 2.0**-24, 1e-5
LONGEST_S = 60.0
"""Seconds of a window. The encoder reads longer sound, but its memory grows with the square of the length."""
_DEFAULTS = {"hop_length": 160, "n_fft": 512, "win_length": 400, "preemphasis": 0.97, "sampling_rate": RATE}


class SpokenToken(NamedTuple):
    token_id: int
    start_s: float  # within its window
    stop_s: float
    probability: float


class Transcriber:
    """A model that transcribes windows of sound. One call is one padded batch."""

    def __init__(self, module: Any, architecture: str, recipe: dict[str, Any], device: torch.device) -> None:
        """recipe: of the features, as preprocessor_config.json has it."""
        from transformers.audio_utils import mel_filter_bank

        self.module, self.kind, self.device, self._recipe = module, TRANSCRIBERS[architecture], device, recipe
        self.frame_s: float = recipe["hop_length"] * module.config.encoder_config.subsampling_factor / RATE
        filters = mel_filter_bank(
            recipe["n_fft"] // 2 + 1, recipe["feature_size"], 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney",
            dtype=np.float32,
        )  # fmt: skip
        self._filters = torch.from_numpy(np.ascontiguousarray(filters.T)).to(device)  # [mels, bins]
        self._window = torch.hann_window(recipe["win_length"], periodic=False, device=device)

    @torch.inference_mode()
    def features(self, windows: Sequence[npt.NDArray[np.int16]]) -> tuple[Tensor, Tensor]:
        """Return log-mel features [B, T, mels] fp32 of samples at 16 kHz, and which frames are inside, [B, T] bool."""
        recipe = self._recipe
        lengths = torch.tensor([max(len(each), LEAST_SAMPLES) for each in windows])
        x = torch.zeros(len(windows), int(lengths.max()))
        for row, each in zip(x, windows, strict=True):
            row[: len(each)] = torch.from_numpy(each.astype(np.float32) / 32768)
        x, lengths = x.to(self.device), lengths.to(self.device)
        if recipe["preemphasis"]:
            x = torch.cat((x[:, :1], x[:, 1:] - recipe["preemphasis"] * x[:, :-1]), dim=1)
            x = x.masked_fill(torch.arange(x.shape[1], device=self.device) >= lengths[:, None], 0.0)
        spectrum = torch.stft(
            x, recipe["n_fft"], recipe["hop_length"], recipe["win_length"], self._window, pad_mode="constant",
            return_complex=True,
        )  # fmt: skip
        mels = torch.log(self._filters @ spectrum.abs().square() + LOG_FLOOR).transpose(1, 2)
        counts = lengths // recipe["hop_length"]
        mask = torch.arange(mels.shape[1], device=self.device) < counts[:, None]
        inside, count = mask[..., None], counts[:, None, None]
        mean = (mels * inside).sum(dim=1, keepdim=True) / count
        variance = ((mels - mean).square() * inside).sum(dim=1, keepdim=True) / (count - 1)
        return (mels - mean) / (variance.sqrt() + STD_FLOOR) * inside, mask

    @torch.inference_mode()
    def transcribe(self, windows: Sequence[npt.NDArray[np.int16]]) -> list[list[SpokenToken]]:
        """Return the tokens of each window of int16 samples, in order."""
        features, mask = self.features(windows)
        states = self.module.encoder(features.to(self.module.dtype), attention_mask=mask).last_hidden_state
        counts = self.module._get_subsampling_output_length(mask.sum(-1)).tolist()
        if self.kind == "ctc":
            logits = self.module.ctc_head(states)
            return [self._merged(row[:count]) for row, count in zip(logits, counts, strict=True)]
        states = self.module.encoder_projector(states)
        return [self._transduced(row[:count]) for row, count in zip(states, counts, strict=True)]

    def _merged(self, logits: Tensor) -> list[SpokenToken]:
        """Return the tokens of CTC's logits [T, vocab]: equal neighbours are one token, blanks are dropped."""
        best, ids = logits.float().softmax(-1).max(-1)
        probabilities, at, found = best.tolist(), 0, list[SpokenToken]()
        for token, run in groupby(ids.tolist()):
            stop = at + len(list(run))
            if token != self.module.config.pad_token_id:
                found.append(
                    SpokenToken(token, at * self.frame_s, stop * self.frame_s, max(probabilities[at:stop]))
                )  # fmt: skip
            at = stop
        return found

    def _transduced(self, states: Tensor) -> list[SpokenToken]:
        """Return a transducer's tokens over the frames of states [T, H]."""
        config, decoder, joint = self.module.config, self.module.decoder, self.module.joint
        blank, most = config.blank_token_id, self.module.max_symbols_per_step
        token, memory, at, found = blank, None, 0, list[SpokenToken]()
        predicted = None
        for _ in range(most * len(states)):
            if at >= len(states):
                break
            if predicted is None:  # after every token, and before the first one
                ids = torch.tensor([[token]], device=self.device)
                output, memory = decoder.lstm(decoder.embedding(ids), memory)
                predicted = decoder.decoder_projector(output)[0, 0]
            logits = joint(predicted, states[at]).float()
            best = logits[: config.vocab_size].softmax(-1).max(-1)
            token, is_blank = int(best.indices), int(best.indices) == blank
            advance = config.durations[int(logits[config.vocab_size :].argmax())]
            advance = max(advance, 1) if is_blank else advance
            if not is_blank:
                stop = min(len(states), at + max(1, advance))
                found.append(SpokenToken(token, at * self.frame_s, stop * self.frame_s, float(best.values)))
                predicted = None
            at += advance
        return found


def load_transcriber(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    held: HeldAs = HeldAs(),  # noqa: B008
) -> Transcriber | WhisperModel | MoonshineModel:
    """Load the model of folder `path`. Raises `CorruptModel`, `UnsupportedModel`."""
    import transformers

    config = load_config(path, trust_remote_code=False)
    architecture = str((config.architectures or [""])[0])
    if architecture == WHISPER:
        return load_whisper(path, device, dtype, held)
    if architecture in MOONSHINES:
        return load_moonshine(path, device, dtype, held)
    recipe = _recipe(path, config)
    module = read_module(
        getattr(transformers, architecture), path, config, dtype, attention="eager", trust_remote_code=False
    )
    with torch.inference_mode():
        module = module.to(device)
        use_device_layouts(module.encoder, quantize=held.of_sound(device))
        use_device_layouts(module, unchanged=[module.encoder])
    return Transcriber(module, architecture, recipe, device)


def transcriber_sizes(path: Path, held: HeldAs = HeldAs()) -> TranscriberSizes:  # noqa: B008
    """Return the sizes of the model in folder `path`, from shapes and headers alone. Raises `UnsupportedOption`."""
    import transformers

    config = load_config(path, trust_remote_code=False)
    architecture, sizes = str(config.architectures[0]), config.to_dict()

    def weights_bytes(device: str, dtype: str) -> int:
        kind, where = getattr(torch, dtype), torch.device(device)
        quantize = held.of_sound(where)
        if architecture == WHISPER or architecture in MOONSHINES:
            own = resident_bytes(path, read_spec(path), where, kind, **held._asdict())
            return own + encoder_bytes(path, kind, quantize)
        with torch.device("meta"):
            module = getattr(transformers, architecture)(config).to(kind)
            if held.quantization is not None and quantize is None:
                raise UnsupportedOption(
                    f"--quantization {held.quantization} does not apply to {architecture} on {where.type}.",
                    "Supported: int8, on a CPU with fast products of 8-bit integers.",
                    "Leave the flag out.", param="quantization",
                )  # fmt: skip
            if quantize is not None:
                use_device_layouts(module.encoder, quantize=quantize)
            return held_bytes(module)

    halves = held.half_weights and native() is not None
    if architecture == WHISPER:
        # While a window is encoded: a layer's stream, its sum and the wide part before and after the activation.
        width, source_len, text_len = config.d_model, config.max_source_positions, config.max_target_positions
        return TranscriberSizes(
            weights_bytes,
            15 * source_len * width,
            2 * config.decoder_layers * width,
            source_len,
            text_len,
            halves,
            sizes,
        )
    if architecture in MOONSHINES:
        source_len, text_len = moonshine.lengths_of(config)
        encoded = moonshine.encoded_numbers(config)
        per_position = 2 * config.num_hidden_layers * config.hidden_size
        return TranscriberSizes(weights_bytes, encoded, per_position, source_len, text_len, halves, sizes)
    return TranscriberSizes(weights_bytes, config=sizes)


def _recipe(path: Path, config: Any) -> dict[str, Any]:
    """Return how features are made. Raises `UnsupportedModel` for another rate, `CorruptModel` for other sizes."""
    file = path / "preprocessor_config.json"
    given = read_json_object(file) if file.is_file() else {}
    mels = config.encoder_config.num_mel_bins
    recipe: dict[str, Any] = {"feature_size": mels, **_DEFAULTS}
    recipe |= {name: given[name] for name in recipe if name in given}
    if recipe["sampling_rate"] != RATE:
        raise UnsupportedModel(f"{path.name} reads {recipe['sampling_rate']} samples a second.", f"Supported: {RATE}.")
    if recipe["feature_size"] != mels:
        raise CorruptModel(f"{file} has {recipe['feature_size']} features.", f"The encoder reads {mels}.")
    return recipe
