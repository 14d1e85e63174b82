"""Tiny random models that transcribe, as folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from localllm.models.encoders.speech_rows import SpeechRows
from tests.tiny import VOCAB_SIZE, save_tiny_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 64, "subsampling_conv_channels": 16}  # fmt: skip


def save_parakeet(path: Path, kind: str, seed: int = 0, *, sizes: dict[str, Any] = SIZES) -> Path:
    """Save a tiny random Parakeet: ctc or tdt. Some of its answers on noise have tokens, and some blanks. sizes: of its
    encoder."""
    from transformers import AutoConfig, ParakeetForCTC, ParakeetForTDT

    path.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(path)
    vocab_size = 1 + max(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"].values())
    config: Any = AutoConfig.for_model(f"parakeet_{kind}")
    for name, value in sizes.items():
        setattr(config.encoder_config, name, value)
    config.vocab_size, blank = vocab_size + 1, vocab_size
    config.pad_token_id = blank
    if kind != "ctc":
        config.blank_token_id, config.decoder_hidden_size = blank, 24
    torch.manual_seed(seed)
    model = {"ctc": ParakeetForCTC, "tdt": ParakeetForTDT}[kind](config).eval()
    _spread(model, kind)
    if kind != "ctc":
        model.generation_config.decoder_start_token_id = blank
    model.save_pretrained(path)
    features = {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": config.encoder_config.num_mel_bins,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(features))
    return path


@torch.no_grad()
def _spread(model: Any, kind: str) -> None:
    """Centre the outputs of the head over the frames of noise, so that frames differ in their likeliest token."""
    states = model.encoder(torch.randn(1, 600, model.config.encoder_config.num_mel_bins)).last_hidden_state[0]
    if kind == "ctc":
        head, weight = model.ctc_head, model.ctc_head.weight[..., 0]
    else:
        head, weight = model.joint.head, model.joint.head.weight
        states = model.joint.activation(model.encoder_projector(states))
    head.weight.mul_(60)
    head.bias.copy_(-(weight @ states.mean(dim=0)))
    blank = model.config.pad_token_id
    best = (states @ weight.T + head.bias)[:, :blank].amax(-1)
    head.bias[blank] += float(best.quantile(0.5 if kind == "ctc" else 0.8))
    if kind == "tdt":
        head.bias[model.config.vocab_size] -= 1000  # a token always takes a frame


LANGUAGES = ("en", "de", "fr", "zh")


def save_whisper(path: Path, seed: int = 0, *, english: bool = False, decoder_layers: int = 2) -> Path:
    """Save a tiny random Whisper. Its answers on noise have texts between timestamps, and end."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    save_tiny_tokenizer(path, ["<|im_start|>", "<|im_end|>", "<|unused|>"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    marks = ["endoftext", "startoftranscript", *([] if english else LANGUAGES), "translate", "transcribe",
             "startoflm", "startofprev", "nospeech", "notimestamps"]  # fmt: skip
    marks += [f"{step / 50:.2f}" for step in range(1501)]
    tokenizer.add_special_tokens([AddedToken(f"<|{mark}|>", special=True) for mark in marks])
    tokenizer.save(str(path / "tokenizer.json"))
    ids = {mark: tokenizer.token_to_id(f"<|{mark}|>") for mark in marks}
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=32, encoder_layers=2, decoder_layers=decoder_layers,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_target_positions=64, pad_token_id=ids["endoftext"], bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"], decoder_start_token_id=ids["startoftranscript"], suppress_tokens=None,
        begin_suppress_tokens=None, init_std=0.25,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        weight = model.model.decoder.embed_tokens.weight
        weight.normal_(0, 1)
        weight[ids["notimestamps"] + 1 :] *= 0.8
        model.model.decoder.embed_positions.weight.normal_(0, 3)
    special = [ids[mark] for mark in marks[1 : marks.index("notimestamps")]]
    options: dict[str, Any] = {
        "no_timestamps_token_id": ids["notimestamps"], "is_multilingual": not english,
        "prev_sot_token_id": ids["startofprev"], "max_initial_timestamp_index": 50, "return_timestamps": False,
        "suppress_tokens": [5, *special], "begin_suppress_tokens": [9, ids["endoftext"]],
    }  # fmt: skip
    if not english:
        options["lang_to_id"] = {f"<|{language}|>": ids[language] for language in LANGUAGES}
        options["task_to_id"] = {task: ids[task] for task in ("translate", "transcribe")}
    for name, value in {**options, "max_length": 64, "_from_model_config": False}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config.num_mel_bins}
    (path / "preprocessor_config.json").write_text(json.dumps(features))
    return path


def save_moonshine(path: Path, seed: int = 0, *, streaming: bool = False) -> Path:
    """Save a tiny random Moonshine. Heads of 20 numbers, of which 18 or 16 rotate; its answers on noise end."""
    from transformers import AutoConfig, AutoModelForSpeechSeq2Seq

    save_tiny_tokenizer(path, ["<unk>", "<s>", "</s>"])
    sizes: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 72, "vocab_size": VOCAB_SIZE}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "pad_token_id": 2}
    if streaming:
        encoder = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                   "num_key_value_heads": 2, "sliding_windows": [[16, 4], [16, 0]]}  # fmt: skip
        sizes |= {"encoder_config": encoder, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    else:
        sizes |= {f"{part}_num_{what}": 2 for part in ("encoder", "decoder") for what in ("hidden_layers",
                  "attention_heads")}  # fmt: skip
    kind = "moonshine_streaming" if streaming else "moonshine"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSpeechSeq2Seq.from_config(AutoConfig.for_model(kind, **sizes, **ids)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.25))
    model.save_pretrained(path)
    features = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "sampling_rate": 16_000}
    (path / "preprocessor_config.json").write_text(json.dumps({**features, "return_attention_mask": streaming}))
    return path


def written(model: Any, windows: Sequence[Any], writings: Sequence[Any], beams: int = 1, places: int = 0) -> list[Any]:
    """Return the result of each window, written side by side. places: most windows at once; 0: as many as there are."""
    rows, waiting, found = SpeechRows(model, places or len(windows)), list(range(len(windows))), dict[int, Any]()
    while waiting or rows.keys:
        while waiting and rows.fits(beams):
            key = waiting.pop(0)
            rows.join(key, windows[key], writings[key], beams)
        found |= dict(rows.step())
    if errors := [each for each in found.values() if isinstance(each, Exception)]:
        raise errors[0]
    return [found[key] for key in range(len(windows))]
