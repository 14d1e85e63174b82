"""Families of models that hear, by what differs between them: features, rows, and the prompt that transcribes.

    Voxtral         Whisper's encoder over 30 s at a time; four states become a row
    Qwen3-ASR       seconds are read by convolutions, and 8 s attend to each other; 13 rows a second
    GLM-ASR         the same, with rotary positions, and without the rows behind the end of the sound
    Granite Speech  a conformer over the whole sound, whose frames are asked in groups of 15 by three queries
    Gemma 4         a conformer whose states attend to the 13 before them; 25 rows a second, of at most 30 s

Features are logarithms of mel spectrograms, computed here in torch: the same as transformers' extractors have.
Does not know: files of sound, messages, the tower.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from localllm.errors import CorruptModel
from localllm.models.spec.family import Config
from localllm.models.spec.vision import HearingSpec

if TYPE_CHECKING:
    from torch import Tensor

RATE = 16_000
HOP = 160
"""Samples of a frame."""
Int16 = npt.NDArray[np.int16]


class Wish(NamedTuple):
    """The wishes of a request to transcribe. language: a code that the family knows, or None."""

    language: str | None = None
    prompt: str = ""
    translate: bool = False  # into English


class Spoken(NamedTuple):
    """A prompt that transcribes one sound. The chat template renders the messages, or `text` is all of the prompt."""

    messages: tuple[Mapping[str, Any], ...] = ()  # a part {"type": "audio"} is the sound
    behind: str = ""  # the begin of the answer
    text: str = ""


@dataclass(frozen=True, slots=True)
class SoundFamily:
    """One family of towers that read sound."""

    name: str
    architecture: str  # class name in config.json
    model_types: tuple[str, ...]
    mark: str  # the text of one row, and what a chat template writes for a sound
    marks: tuple[str, ...]  # all special texts of the family
    read: Callable[[Config], dict[str, Any]]  # config.json: fields of HearingSpec
    rows: Callable[[HearingSpec, int], int]  # of a sound of so many samples
    features: Callable[[HearingSpec, Int16], dict[str, Tensor]]  # by the keywords of the tower
    spoken: Callable[[Wish], Spoken]
    written: Callable[[str], tuple[str, str]]  # an answer: code of the language or "", and the text
    languages: Mapping[str, str]  # names by code; empty: the model takes no language
    before: str = ""  # text in front of the rows, if the template has not written it
    after: str = ""  # likewise behind them
    translates: bool = False
    prompts: bool = False  # whether a text can come with the sound: names, style
    template: str = ""  # of a checkpoint without a chat template
    others: tuple[str, ...] = ("language_model",)  # attributes of transformers' model that are not the tower
    attention: str = "sdpa"  # of transformers' code
    most_s: float | None = None  # seconds of the longest sound; None: no limit of its own


# ---- features ----------------------------------------------------------------------------------------------------


@cache
def _filters(num_mels: int, num_bins: int, scale: str) -> Tensor:
    """Return mel filters [num_mels, num_bins] in float32."""
    import torch
    from transformers.audio_utils import mel_filter_bank

    norm = "slaney" if scale == "slaney" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "At least one mel filter has all zero values")  # the highest one of Gemma 4
        made = mel_filter_bank(num_bins, num_mels, 0.0, 8000.0, RATE, norm=norm, mel_scale=scale)
    return torch.from_numpy(made.T.astype(np.float32))


def log_mel(samples: Tensor, num_mels: int, num_fft: int = 400, scale: str = "slaney") -> Tensor:
    """Return the logarithms [num_mels, 1 + n / 160] of the mel spectrogram of samples [n] within -1 and 1: of at most
    8 powers of ten, scaled to about 2. scale: slaney as Whisper's, or htk."""
    import torch

    window = torch.hann_window(400)
    spectrum = torch.stft(samples, num_fft, HOP, 400, window=window, return_complex=True)
    if scale == "slaney":
        spectrum = spectrum[:, :-1]
    found = torch.clamp(_filters(num_mels, 1 + num_fft // 2, scale) @ spectrum.abs() ** 2, min=1e-10).log10()
    return (torch.maximum(found, found.max() - 8.0) + 4.0) / 4.0


def _floats(samples: Int16, length: int) -> Tensor:
    """Return samples within -1 and 1, padded with silence to `length`."""
    import torch

    found = torch.zeros(max(length, len(samples)))
    found[: len(samples)] = torch.from_numpy(samples.astype(np.float32)) / 32768
    return found


def _encoder(config: Config, name: str = "audio_config") -> dict[str, Any]:
    """Return the fields that Whisper's encoder and its kin share."""
    encoder = config[name]
    return {
        "num_mels": int(encoder["num_mel_bins"]),
        "width": int(encoder.get("d_model") or encoder["hidden_size"]),
        "mlp_width": int(encoder.get("encoder_ffn_dim") or encoder["intermediate_size"]),
        "layers": int(encoder.get("encoder_layers") or encoder["num_hidden_layers"]),
        "heads": int(encoder.get("encoder_attention_heads") or encoder["num_attention_heads"]),
    }


# ---- Voxtral -----------------------------------------------------------------------------------------------------


def _read_voxtral(config: Config) -> dict[str, Any]:
    encoder = config["audio_config"]
    states = int(encoder.get("max_source_positions", 1500))
    found = _encoder(config)
    rows = states * found["width"] // found["mlp_width"]
    return {**found, "chunk": 2 * states, "piece": 2 * states, "chunk_rows": rows}


def _chunks(spec: HearingSpec, num_samples: int) -> int:
    return max(1, math.ceil(num_samples / (spec.chunk * HOP)))


def _voxtral_features(spec: HearingSpec, samples: Int16) -> dict[str, Tensor]:
    chunks = _chunks(spec, len(samples))
    found = log_mel(_floats(samples, chunks * spec.chunk * HOP), spec.num_mels)
    return {"input_features": found.reshape(spec.num_mels, chunks, spec.chunk).transpose(0, 1).contiguous()}


def _voxtral_spoken(wish: Wish) -> Spoken:
    language = f"lang:{wish.language}" if wish.language else ""
    return Spoken(text=f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]")


def _plain(answer: str) -> tuple[str, str]:
    return "", answer.strip()


_VOXTRAL_LANGUAGES = {
    "ar": "Arabic", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "hi": "Hindi", "it": "Italian",
    "nl": "Dutch", "pt": "Portuguese",
}  # fmt: skip
_VOXTRAL_TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{% elif m.role == 'system' %}[SYSTEM_PROMPT]"
    "{% elif m.role != 'assistant' %}{{ raise_exception('Roles are system, user and assistant.') }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'audio' %}"
    "[BEGIN_AUDIO][AUDIO]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% if m.role == 'user' %}[/INST]"
    "{% elif m.role == 'system' %}[/SYSTEM_PROMPT]{% else %}</s>{% endif %}{% endfor %}"
)
"""As mistral-common encodes instructions from its version 7 on, without tools."""
VOXTRAL = SoundFamily(
    "Voxtral",
    "VoxtralForConditionalGeneration",
    ("voxtral",),
    "[AUDIO]",
    ("[AUDIO]", "[BEGIN_AUDIO]"),
    _read_voxtral,
    lambda spec, num_samples: _chunks(spec, num_samples) * spec.chunk_rows,
    _voxtral_features,
    _voxtral_spoken,
    _plain,
    _VOXTRAL_LANGUAGES,
    before="[BEGIN_AUDIO]",
    template=_VOXTRAL_TEMPLATE,
)

# ---- Qwen3-ASR ---------------------------------------------------------------------------------------------------

_LEAST_SAMPLES = 8000
"""Shorter sounds are padded with silence, as Qwen's own library does."""


def _convolved(frames: int) -> int:
    """Return the length of frames behind three convolutions that halve it."""
    for _ in range(3):
        frames = (frames - 1) // 2 + 1 if frames > 0 else 0
    return frames


def _read_qwen(config: Config) -> dict[str, Any]:
    encoder = config["audio_config"]
    chunk = 2 * int(encoder.get("n_window", 50))
    piece = int(encoder.get("n_window_infer", 800))
    channels = int(encoder.get("downsample_hidden_size", 480))
    return {
        **_encoder({"audio_config": {"num_mel_bins": 128, **encoder}}), "chunk": chunk, "piece": piece,
        "chunk_rows": _convolved(chunk), "context": piece, "channels": channels,
    }  # fmt: skip


def _qwen_rows(spec: HearingSpec, num_samples: int) -> int:
    whole, rest = divmod(max(num_samples, _LEAST_SAMPLES) // HOP, spec.chunk)
    return whole * spec.chunk_rows + _convolved(rest)


def _qwen_features(spec: HearingSpec, samples: Int16) -> dict[str, Tensor]:
    import torch

    found = log_mel(_floats(samples, _LEAST_SAMPLES), spec.num_mels)
    frames = found.shape[1]
    padded = math.ceil(frames / spec.chunk) * spec.chunk
    features = torch.zeros(1, spec.num_mels, padded)
    features[0, :, :frames] = found
    return {"input_features": features, "input_features_mask": (torch.arange(padded) < frames).long()[None]}


def _qwen_spoken(wish: Wish) -> Spoken:
    context = ({"role": "system", "content": wish.prompt},) if wish.prompt else ()
    behind = f"language {_QWEN_LANGUAGES[wish.language]}<asr_text>" if wish.language else ""
    return Spoken((*context, {"role": "user", "content": [{"type": "audio"}]}), behind)


def _qwen_written(answer: str) -> tuple[str, str]:
    """Return language and text of `language German<asr_text>...`."""
    head, mark, text = answer.partition("<asr_text>")
    if not mark:
        return "", answer.strip()
    name = head.strip().removeprefix("language").strip()
    return next((code for code, known in _QWEN_LANGUAGES.items() if known == name), ""), text.strip()


_QWEN_LANGUAGES = {
    "ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish", "nl": "Dutch",
    "en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French", "de": "German", "el": "Greek", "hi": "Hindi",
    "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian",
    "ms": "Malay", "fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
}  # fmt: skip
QWEN3_ASR = SoundFamily(
    "Qwen3-ASR",
    "Qwen3ASRForConditionalGeneration",
    ("qwen3_asr",),
    "<|audio_pad|>",
    ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    _read_qwen,
    _qwen_rows,
    _qwen_features,
    _qwen_spoken,
    _qwen_written,
    _QWEN_LANGUAGES,
    prompts=True,
)

# ---- GLM-ASR -----------------------------------------------------------------------------------------------------


def _read_glm(config: Config) -> dict[str, Any]:
    found = _encoder(config)
    return {**found, "chunk": 3000, "piece": 3000, "chunk_rows": 1500 // (found["mlp_width"] // found["width"])}


def _glm_rows(spec: HearingSpec, num_samples: int) -> int:
    whole, rest = divmod(math.ceil(num_samples / HOP), spec.chunk)
    merged = 1500 // spec.chunk_rows  # states that become a row
    return whole * spec.chunk_rows + ((rest - 1) // 2 + 1) // merged


def _glm_features(spec: HearingSpec, samples: Int16) -> dict[str, Tensor]:
    """Return the features of windows of 30 s, each with its own largest value."""
    import torch

    size = spec.chunk * HOP
    windows = [samples[at : at + size] for at in range(0, max(1, len(samples)), size)]
    features = torch.stack([log_mel(_floats(window, size), spec.num_mels) for window in windows])
    frames = torch.tensor([[math.ceil(len(window) / HOP)] for window in windows])
    return {"input_features": features, "input_features_mask": (torch.arange(spec.chunk) < frames).long()}


def _glm_spoken(wish: Wish) -> Spoken:
    asked = {"type": "text", "text": "Please transcribe this audio into text"}
    return Spoken(({"role": "user", "content": [{"type": "audio"}, asked]},))


GLM_ASR = SoundFamily(
    "GLM-ASR",
    "GlmAsrForConditionalGeneration",
    ("glmasr",),
    "<|pad|>",
    ("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    _read_glm,
    _glm_rows,
    _glm_features,
    _glm_spoken,
    _plain,
    {},
)

# ---- Granite Speech ----------------------------------------------------------------------------------------------


def _read_granite(config: Config) -> dict[str, Any]:
    encoder = config["encoder_config"]
    width, window = int(encoder.get("hidden_dim", 1024)), int(config.get("window_size", 15))
    return {
        "num_mels": int(encoder.get("input_dim", 160)) // 2,
        "width": width,
        "mlp_width": width * int(encoder.get("feedforward_mult", 4)),
        "layers": int(encoder.get("num_layers", 10)),
        "heads": int(encoder.get("num_heads", 8)),
        "chunk": 2 * window,
        "piece": 0,
        "chunk_rows": window // int(config.get("downsample_rate", 5)),
        "context": int(encoder.get("context_size", 200)),
    }


def _granite_rows(spec: HearingSpec, num_samples: int) -> int:
    states = (max(num_samples, 400) // HOP + 1) // 2
    return math.ceil(states / (spec.chunk // 2)) * spec.chunk_rows


def _granite_features(spec: HearingSpec, samples: Int16) -> dict[str, Tensor]:
    found = log_mel(_floats(samples, 400), spec.num_mels, 512, "htk").T
    return {"input_features": found[: len(found) // 2 * 2].reshape(1, -1, 2 * spec.num_mels)}


def _granite_spoken(wish: Wish) -> Spoken:
    asked = "translate the speech to English" if wish.translate else _GRANITE_PROMPT
    asked += f" Keywords: {wish.prompt}" if wish.prompt and not wish.translate else ""
    return Spoken(({"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": asked}]},))


_GRANITE_PROMPT = "can you transcribe the speech into a written format?"
GRANITE = SoundFamily(
    "Granite Speech",
    "GraniteSpeechForConditionalGeneration",
    ("granite_speech",),
    "<|audio|>",
    ("<|audio|>",),
    _read_granite,
    _granite_rows,
    _granite_features,
    _granite_spoken,
    _plain,
    {},
    translates=True,
    prompts=True,
)

# ---- Gemma 4 -----------------------------------------------------------------------------------------------------


def _read_gemma(config: Config) -> dict[str, Any]:
    encoder = config["audio_config"]
    width, channels = int(encoder.get("hidden_size", 1024)), encoder.get("subsampling_conv_channels", (128, 32))
    return {
        "num_mels": int(channels[0]),
        "width": width,
        "mlp_width": 4 * width,
        "layers": int(encoder.get("num_hidden_layers", 12)),
        "heads": int(encoder.get("num_attention_heads", 8)),
        "chunk": 4,
        "piece": 0,
        "chunk_rows": 1,
        "context": int(encoder.get("attention_chunk_size", 12)) + int(encoder.get("attention_context_left", 13)) - 1,
        "channels": int(channels[0]),
    }


def _gemma_frames(num_samples: int) -> int:
    """Return the frames whose samples are all of the sound. The first one has half a frame of silence before it."""
    return (max(num_samples, 400) - 161) // HOP + 1


def _gemma_rows(spec: HearingSpec, num_samples: int) -> int:
    frames = _gemma_frames(num_samples)
    return ((frames - 1) // 2 + 2) // 2


def _gemma_features(spec: HearingSpec, samples: Int16) -> dict[str, Tensor]:
    import torch

    count = _gemma_frames(len(samples))
    padded = torch.cat((torch.zeros(160), _floats(samples, 400))).double()
    frames = padded.unfold(0, 321, HOP)[:count, :-1] * torch.hann_window(320, dtype=torch.float64).float()
    mels = torch.fft.rfft(frames, 512).abs() @ _filters(spec.num_mels, 257, "htk").double().T
    features = (mels + 1e-3).log().float()[None]
    return {"input_features": features, "input_features_mask": torch.ones(1, count, dtype=torch.bool)}


def _gemma_spoken(wish: Wish) -> Spoken:
    name = _QWEN_LANGUAGES.get(wish.language or "")
    where = f"{name} into {name} text" if name else "its original language"
    text = (
        f"Transcribe the following speech segment in {where}.\n\n"
        "Follow these specific instructions for formatting the answer:\n"
        "* Only output the transcription, with no newlines.\n"
        "* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 instead of "
        "three."
    )
    return Spoken(({"role": "user", "content": [{"type": "text", "text": text}, {"type": "audio"}]},))


GEMMA4 = SoundFamily(
    "Gemma 4",
    "Gemma4ForConditionalGeneration",
    ("gemma4",),
    "<|audio|>",
    ("<|audio|>", "<|audio>", "<audio|>"),
    _read_gemma,
    _gemma_rows,
    _gemma_features,
    _gemma_spoken,
    _plain,
    _QWEN_LANGUAGES,
    before="<|audio>",
    after="<audio|>",
    attention="eager",
    most_s=30.0,
)

FAMILIES = (VOXTRAL, QWEN3_ASR, GRANITE, GLM_ASR, GEMMA4)
_OF_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def sound_family_of(spec: HearingSpec) -> SoundFamily:
    return _OF_TYPE[spec.model_type]


def hears(config: Config) -> bool:
    """Return whether there is a family for a config.json, and the model has the part that reads sound."""
    is_known = config.get("model_type") in _OF_TYPE
    return is_known and (config.get("model_type") not in GEMMA4.model_types or config.get("audio_config") is not None)


def read_hearing(config: Config, path: Path) -> HearingSpec:
    """Return the part that reads sound of the model in folder `path` with this config.json. Raises `CorruptModel` for a
    config that contradicts itself."""
    kind = str(config["model_type"])
    names = ("audio_token_id", "audio_token_index")
    token = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise CorruptModel(f"config.json has audio_token_id = {token!r}.", "It must be a token id.")
    try:
        fields = _OF_TYPE[kind].read(config)
        wrong = {name: value for name, value in fields.items() if value < (name in ("num_mels", "width", "chunk"))}
        if wrong or fields["piece"] % fields["chunk"]:
            raise ValueError(wrong or fields)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptModel("config.json's part that reads sound cannot be read.", f"{type(error).__name__}: {error}.") \
            from error  # fmt: skip
    adapter = str(path) if config.get("has_lora_adapter") and (path / "adapter_config.json").is_file() else ""
    return HearingSpec(kind, token, adapter=adapter, **fields)


class SoundLayout(NamedTuple):
    """The tokens and the text of a sound of one length."""

    prompt: str
    rows: int


@dataclass(frozen=True, slots=True)
class ProcessedSound:
    """One sound as tensors. It is the `inputs` of an engine's `MediaSpan` (engine/media.py)."""

    tensors: Mapping[str, Any]  # by the keywords of the tower; on the host
    rows: int
    digest: bytes  # 16: of the samples and of the family
    grid: None = None  # positions are those of text
    both_ways: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())

    def pixels(self) -> Mapping[str, Any]:
        """Return what the tower reads, as `MediaInputs` names it."""
        return self.tensors


class SoundProcessor:
    """Prepares sounds for one model. Thread-safe."""

    def __init__(self, spec: HearingSpec, most_rows: int) -> None:
        """most_rows: of one sound, on this server."""
        self.spec, self.most_rows, self.family = spec, most_rows, sound_family_of(spec)
        self._key = blake2b(repr(spec).encode(), digest_size=32).digest()

    @property
    def most_s(self) -> float:
        """Seconds of the longest sound, in whole chunks."""
        return self.most_rows // self.spec.chunk_rows * self.spec.chunk * HOP / RATE

    def layout(self, num_samples: int) -> SoundLayout:
        """Return the rows of a sound of this length, and the text that stands for it."""
        rows = self.family.rows(self.spec, num_samples)
        return SoundLayout(self.family.mark * rows, rows)

    def process(self, samples: Int16) -> ProcessedSound:
        """Compute the features of samples at 16 kHz."""
        digest = blake2b(samples.tobytes(), key=self._key, digest_size=16).digest()
        tensors = self.family.features(self.spec, samples)
        return ProcessedSound(tensors, self.family.rows(self.spec, len(samples)), digest)


def require_extractor(path: Path, spec: HearingSpec) -> None:
    """Raise `CorruptModel` if the checkpoint's extractor has other features than the family's."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if not (path / name).is_file():
            continue
        found = json.loads((path / name).read_text())
        found = found.get("feature_extractor") or found.get("audio_processor") or found
        expected = {"sampling_rate": RATE, "hop_length": HOP, "feature_size": spec.num_mels, "n_mels": spec.num_mels}
        for field, value in expected.items():
            if found.get(field, value) != value:
                raise CorruptModel(f"{name} has {field} = {found[field]!r}.", f"The sound of this family has {value}.")
