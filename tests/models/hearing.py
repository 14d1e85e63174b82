"""Tiny checkpoints of models that hear, and what transformers computes from sound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from localllm.engine.media import MediaSpan, spans_of
from localllm.models.vision.sound import ProcessedSound, SoundProcessor
from tests.models.vision_models import TEXT
from tests.tiny import SPECIAL_TOKENS, VOCAB_SIZE, save_tiny_tokenizer

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
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 24, "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "pad_token_id": 3,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
                          "subsampling_conv_channels": [16, 8]}, "vision_config": None},
    ),
}  # fmt: skip
"""Class, fields of the text part, further fields of the config."""
CHATS = {
    "voxtral": "",
    "glmasr": "<|begin_of_audio|><|pad|><|end_of_audio|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "granite_speech": "<|audio|>",
    "gemma4": "<|audio|>",
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


def publish_as_qwen(path: Path) -> None:
    """Rewrite the files of a tiny Qwen3-ASR as Qwen publishes them: a `thinker` with other names."""
    config = json.loads((path / "config.json").read_text())
    audio, text = config.pop("audio_config"), config.pop("text_config")
    audio |= {"model_type": "qwen3_asr_audio_encoder", "max_source_positions": 1500, "conv_chunksize": 500}
    text |= {"model_type": "qwen3_asr_text", "rope_theta": 1e4}
    text["rope_scaling"] = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3],
                            "mrope_interleaved": True, "interleaved": True}  # fmt: skip
    text.pop("rope_parameters", None)
    thinker = {"audio_config": audio, "text_config": text, "audio_token_id": config.pop("audio_token_id")}
    whole = {name: config[name] for name in ("architectures", "model_type", "dtype", "tie_word_embeddings")}
    thinker["model_type"] = "qwen3_asr_thinker"
    written = {**whole, "support_languages": ["German"], "thinker_config": thinker}
    (path / "config.json").write_text(json.dumps(written))
    (path / "generation_config.json").unlink()
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        name = name.replace("model.language_model.", "model.").replace("model.audio_tower.", "audio_tower.")
        name = name.replace("model.multi_modal_projector.linear_", "audio_tower.proj")
        tensors[f"thinker.{name}"] = tensor
    save_file(tensors, path / "model.safetensors")


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
    if model.config.model_type == "gemma4":  # its layers read the tokens' ids, too
        return whole_with_sounds(model, tokens, sounds)
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


def whole_with_sounds(model: Any, tokens: Tensor, sounds: Sequence[ProcessedSound]) -> Tensor:
    """Return the logits of the model's own forward pass, whose sounds are padded to the longest."""
    if not sounds:
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    names, most = (
        ("input_features", "input_features_mask"),
        max(each.tensors["input_features"].shape[1] for each in sounds),
    )
    padded: dict[str, Tensor] = {}
    for name in names:
        each = [sound.tensors[name][0] for sound in sounds]
        padded[name] = torch.stack([torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:]))) for x in each])
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **padded).logits[0]
