"""Tiny checkpoints of models that see, with their image processors, and what transformers computes from pictures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from localllm.engine.media import MediaSpan, spans_of
from localllm.models.vision.families import family_of_type
from localllm.models.vision.processor import PictureProcessor, Processed
from tests.models.vision_models import make_model
from tests.tiny import SPECIAL_TOKENS, save_tiny_tokenizer

PAD = 10
"""The placeholder's id in every tiny model."""
_SQUARE = {"size": {"height": 16, "width": 16}}
_CROP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_TILES = {"size": {"longest_edge": 24}, "max_image_size": {"longest_edge": 8}}
_POINTS = [[16, 32], [32, 16], [32, 32]]
_GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
_GLM = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 128, "longest_edge": 128 * 60}}
_QWEN = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 40}}


@dataclass(frozen=True)
class Seeing:
    """How a tiny model that sees is made. fields: of its config."""

    config: str
    processor: str
    options: dict[str, Any]
    fields: dict[str, Any]
    changes: dict[str, Any]


PLACEHOLDERS = {
    "gemma3": "<image_soft_token>", "gemma4": "<|image|>", "gemma4_both": "<|image|>", "gemma4_unified": "<|image|>",
    "mistral3": "[IMG]", "pixtral": "[IMG]", "internvl": "<IMG_CONTEXT>", "smolvlm": "<image>", "idefics3": "<image>",
    "llava": "<image>",
    "llava_next": "<image>", "llava_onevision": "<image>", "granite_vision": "<image>",
    "glm4v": "<|image|>", "glm4v_moe": "<|image|>", "glm46v": "<|image|>",
}  # fmt: skip
"""Texts of the placeholders of families other than Qwen."""
TOWERS = {"mistral3": "pixtral", "gemma4_both": "gemma4", "granite_vision": "llava_next"}
SEEING = {
    "qwen2_vl": Seeing("Qwen2VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen2_5_vl": Seeing("Qwen2_5_VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen3_vl": Seeing("Qwen3VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen3_vl_moe": Seeing("Qwen3VLMoeConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen3_5": Seeing("Qwen3_5Config", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "glm4v": Seeing("Glm4vConfig", "Glm4vImageProcessorPil", _GLM, {"image_token_id": PAD}, {}),
    "glm4v_moe": Seeing("Glm4vMoeConfig", "Glm4vImageProcessorPil", _GLM, {"image_token_id": PAD}, {}),
    "glm46v": Seeing("Glm46VConfig", "Glm46VImageProcessorPil", _GLM, {"image_token_id": PAD}, {}),
    "gemma3": Seeing(
        "Gemma3Config", "Gemma3ImageProcessorPil", _SQUARE, {"image_token_index": PAD, "mm_tokens_per_image": 4}, {}
    ),
    "gemma4": Seeing("Gemma4Config", "Gemma4ImageProcessorPil", _GEMMA4, {"image_token_id": PAD}, {}),
    "gemma4_both": Seeing(
        "Gemma4Config",
        "Gemma4ImageProcessorPil",
        _GEMMA4,
        {"image_token_id": PAD},
        {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4_unified": Seeing("Gemma4UnifiedConfig", "Gemma4ImageProcessorPil", _GEMMA4, {"image_token_id": PAD}, {}),
    "mistral3": Seeing(
        "Mistral3Config",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 64}, "patch_size": 4},
        {"image_token_index": PAD, "spatial_merge_size": 2},
        {},
    ),
    "pixtral": Seeing(
        "PixtralConfig",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 64}, "patch_size": 4},
        {"image_token_index": PAD, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {},
    ),
    "internvl": Seeing(
        "InternVLConfig",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 8, "width": 8}, "max_patches": 6},
        {"image_token_id": PAD, "image_seq_length": 1},
        {},
    ),
    "smolvlm": Seeing("SmolVLMConfig", "SmolVLMImageProcessorPil", _TILES, {"image_token_id": PAD}, {}),
    "idefics3": Seeing("Idefics3Config", "Idefics3ImageProcessorPil", _TILES, {"image_token_id": PAD}, {}),
    "llava": Seeing("LlavaConfig", "CLIPImageProcessorPil", _CROP, {"image_token_index": PAD}, {}),
    "llava_next": Seeing(
        "LlavaNextConfig",
        "LlavaNextImageProcessorPil",
        {**_CROP, "image_grid_pinpoints": _POINTS},
        {"image_token_index": PAD, "image_grid_pinpoints": _POINTS},
        {},
    ),
    "granite_vision": Seeing(
        "LlavaNextConfig",
        "LlavaNextImageProcessorPil",
        {**_CROP, "image_grid_pinpoints": _POINTS},
        {
            "image_token_index": PAD,
            "image_grid_pinpoints": _POINTS,
            "vision_feature_layer": [-2, -1],
        },
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "llava_onevision": Seeing(
        "LlavaOnevisionConfig",
        "LlavaOnevisionImageProcessorPil",
        {**_SQUARE, "image_grid_pinpoints": _POINTS},
        {"image_token_index": PAD, "image_grid_pinpoints": _POINTS, "vision_aspect_ratio": "anyres_max_1"},
        {},
    ),
}


def make_seeing(path: Path, name: str, seeing: Seeing | None = None, tower: dict[str, Any] | None = None) -> Any:
    """Save a tiny model with its image processor, and return it as transformers has it. tower: other values of the
    fields that its tower has."""
    seeing = seeing or SEEING[name]
    model = make_model(path, seeing.config, fields=seeing.fields, tower=tower, **seeing.changes)
    processor_of(seeing.processor)(**seeing.options).save_pretrained(path)
    save_tokenizer(path, name)
    return model


def save_tokenizer(path: Path, family: str) -> None:
    """Save a tokenizer whose special tokens are those of the family, the placeholder at PAD, with a chat template."""
    save_tiny_tokenizer(path, special_tokens_of(family))
    config = json.loads((path / "tokenizer_config.json").read_text())
    tower = family_of_type(TOWERS.get(family, family))
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if family.startswith("qwen") else tower.mark
    config["chat_template"] = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{% if part.type == 'image' %}{{ '" + mark + "' }}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def special_tokens_of(family: str) -> list[str]:
    placeholder = PLACEHOLDERS.get(family, "<|image_pad|>")
    others = [mark for mark in family_of_type(TOWERS.get(family, family)).marks if mark != placeholder]
    first = [*SPECIAL_TOKENS, *others][:PAD]
    first += [f"<|unused_{place}|>" for place in range(len(first), PAD)]
    return [*first, placeholder, *[*SPECIAL_TOKENS, *others][PAD:]]


def processor_of(name: str) -> Any:
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    return get_image_processor_class_from_name(name)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def opened(path: Path, spec: Any) -> PictureProcessor:
    return PictureProcessor(path, spec.vision, lambda data, wanted: Image.open(data))


def prompt_of(processed: Sequence[Processed], seed: int = 0, *, first: bool = False, last: bool = False) -> list[int]:
    """A prompt of random text with the pictures' rows in it. first, last: nothing before the first, behind the last."""
    draws = np.random.default_rng(seed)
    ids = [] if first else draws.integers(20, 400, 13).tolist()
    for place, each in enumerate(processed):
        ids += [PAD] * each.rows
        if not last or place + 1 < len(processed):
            ids += draws.integers(20, 400, 9).tolist()
    return ids


def spans(ids: Sequence[int], processed: Sequence[Processed], salt: str | None = None) -> tuple[MediaSpan, ...]:
    return spans_of(ids, PAD, processed, salt)


def joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Return the tensors of several pictures as one; pictures of other sizes are padded with zeros."""
    sizes = [max(size) for size in zip(*(part.shape for part in parts), strict=True)]
    out = parts[0].new_zeros([sum(part.shape[axis] for part in parts) if place == axis else size
                              for place, size in enumerate(sizes)])  # fmt: skip
    first = 0
    for part in parts:
        where = tuple(slice(0, size) for size in part.shape)
        where = (*where[:axis], slice(first, first + part.shape[axis]), *where[axis + 1 :])
        out[where], first = part, first + part.shape[axis]
    return out


@torch.no_grad()
def reference_with_pictures(model: Any, ids: Sequence[int], processed: Sequence[Processed]) -> Tensor:
    """Return transformers' logits [T, vocab] of a prompt with pictures in one pass."""
    tokens = torch.tensor([list(ids)])
    kinds = (tokens == PAD).int()
    names = processed[0].tensors if processed else {}
    axis = 1 if model.config.model_type in ("smolvlm", "idefics3") else 0  # tiles of one text
    given = {name: joined([each.tensors[name] for each in processed], axis) for name in names}
    if model.config.model_type.startswith(("qwen", "gemma4", "glm")):
        given["mm_token_type_ids"] = kinds
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = kinds
    for name in ("num_crops", "num_soft_tokens_per_image"):
        given.pop(name, None)
    if model.config.model_type == "gemma4_unified":  # the masks of `generate`; those of `forward` differ in 5.23
        embeds, places = model.get_input_embeddings()(tokens), torch.arange(len(ids))[None]
        masks = model.create_masks_for_generate(
            model.config, embeds, torch.ones_like(tokens), None, places, mm_token_type_ids=kinds
        )
        return model(input_ids=tokens, attention_mask=masks, **given).logits[0]
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).logits[0]
