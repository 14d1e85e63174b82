"""Tiny checkpoints of models that hear, and what transformers computes from sound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig

from localllm.engine.media import MediaSpan, spans_of
from localllm.models.vision.sound import ProcessedSound, SoundProcessor
from tests.models.vision_models import TEXT
from tests.tiny import SPECIAL_TOKENS, save_tiny_tokenizer

PAD = 10
"""The placeholder's id in every tiny model."""
_CONFORMER = {
    "input_dim": 32, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 2, "output_dim": 8,
    "context_size": 20, "max_pos_emb": 32, "conv_kernel_size": 5,
}  # fmt: skip
_QFORMER = {
    "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
}  # fmt: skip
HEARING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"model_type": "llama"},
        {"audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "num_mel_bins": 16, "max_source_positions": 100}},
    ),
    "qwen3_asr": (
        "Qwen3ASRForConditionalGeneration",
        {"model_type": "qwen3", "head_dim": 16},
        {"audio_config": {"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 2,
                          "num_mel_bins": 16, "downsample_hidden_size": 8, "output_dim": 64, "n_window_infer": 200}},
    ),
    "glmasr": (
        "GlmAsrForConditionalGeneration",
        {"model_type": "llama"},
        {"audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "num_mel_bins": 16}},
    ),
    "granite_speech": (
        "GraniteSpeechForConditionalGeneration",
        {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.25, "logits_scaling": 2.0,
         "residual_multiplier": 0.5},
        {"encoder_config": _CONFORMER, "projector_config": _QFORMER},
    ),
}  # fmt: skip
"""Class, fields of the text part, further fields of the config."""
CHATS = {
    "voxtral": "",
    "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "granite_speech": "<|audio|>",
}
"""What each family's chat template writes for a sound; empty: its checkpoints have none."""


def make_hearing(path: Path, name: str, **changes: Any) -> Any:
    """Save a tiny model that hears, and return it as transformers has it. changes: of its text part."""
    import transformers

    class_name, text, fields = HEARING[name]
    token = {"audio_token_index": PAD} if name == "granite_speech" else {"audio_token_id": PAD}
    config = AutoConfig.for_model(name, text_config={**TEXT, **text, **changes}, **fields, **token)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, value in model.state_dict(keep_vars=True).items():
            if value.ndim == 1 and value.is_floating_point() and "running_var" not in key:
                value.add_(torch.randn_like(value) * 0.2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    save_tokenizer(path, name)
    return model


def save_tokenizer(path: Path, name: str) -> None:
    """Save a tokenizer whose special tokens are those of the family, the placeholder at PAD."""
    family = sound_family_of_type(name)
    others = [mark for mark in family.marks if mark != family.mark]
    others += ["<asr_text>"] if name == "qwen3_asr" else []
    others += ["<s>", "[INST]", "[/INST]", "[TRANSCRIBE]"] if name == "voxtral" else []
    first = [*SPECIAL_TOKENS, *others][:PAD]
    first += [f"<|unused_{place}|>" for place in range(len(first), PAD)]
    save_tiny_tokenizer(path, [*first, family.mark, *[*SPECIAL_TOKENS, *others][PAD:]])
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if CHATS[name]:
        config["chat_template"] = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}"
            "{% else %}{% for part in m.content %}{% if part.type == 'audio' %}{{ '" + CHATS[name] + "' }}"
            "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        )
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def sound_family_of_type(name: str) -> Any:
    from localllm.models.vision.sound import FAMILIES

    return next(family for family in FAMILIES if name in family.model_types)


def noise(seconds: float, seed: int = 0) -> npt.NDArray[np.int16]:
    """Noise whose loudness and colour change, so that each second is another one."""
    draws, count = np.random.default_rng(seed), int(seconds * 16_000)
    times = np.arange(count) / 16_000
    tone = np.sin(2 * np.pi * (200 + 300 * (1 + np.sin(times * 3 + seed))) * times)
    return (3000 * draws.standard_normal(count) * (1.2 + np.sin(times * 5)) + 4000 * tone).clip(-32768, 32767).astype(
        np.int16
    )  # fmt: skip


def opened(spec: Any) -> SoundProcessor:
    return SoundProcessor(spec.hearing, 10_000)


def prompt_of(sounds: Sequence[ProcessedSound], seed: int = 0) -> list[int]:
    """A prompt of random text with the rows of the sounds in it."""
    draws = np.random.default_rng(seed)
    ids: list[int] = draws.integers(20, 400, 13).tolist()
    for each in sounds:
        ids += [PAD] * each.rows + draws.integers(20, 400, 9).tolist()
    return ids


def spans(ids: Sequence[int], sounds: Sequence[ProcessedSound], salt: str | None = None) -> tuple[MediaSpan, ...]:
    return spans_of(ids, PAD, sounds, salt, "sound")


@torch.no_grad()
def reference_with_sounds(model: Any, ids: Sequence[int], sounds: Sequence[ProcessedSound]) -> Tensor:
    """Return transformers' logits [T, vocab] of a prompt with sounds in one pass."""
    tokens = torch.tensor([list(ids)])
    rows = []
    for each in sounds:
        out = model.model.get_audio_features(**each.tensors, return_dict=True).pooler_output
        rows.append(out.reshape(-1, out.shape[-1]))
    embeds = model.get_input_embeddings()(torch.where(tokens == PAD, 0, tokens))
    if rows:
        embeds[tokens == PAD] = torch.cat(rows)
    # transformers 5.23 does not divide the logits of Granite Speech, which its decoder was trained with
    scaling = getattr(model.config.text_config, "logits_scaling", 1.0)
    return model(inputs_embeds=embeds, attention_mask=torch.ones_like(tokens)).logits[0] / scaling
