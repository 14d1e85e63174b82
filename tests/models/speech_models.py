"""Tiny random models that transcribe, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import save_tiny_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 64, "subsampling_conv_channels": 16}  # fmt: skip


def save_parakeet(path: Path, kind: str, seed: int = 0) -> Path:
    """Save a tiny random Parakeet: ctc or tdt. Some of its answers on noise have tokens, and some blanks."""
    from transformers import AutoConfig, ParakeetForCTC, ParakeetForTDT

    path.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(path)
    vocab_size = 1 + max(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"].values())
    config: Any = AutoConfig.for_model(f"parakeet_{kind}")
    for name, value in SIZES.items():
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
