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
from localllm.models.vision.processed import Processed
from localllm.models.vision.processor import PictureProcessor
from tests.models.vision_models import make_model
from tests.tiny import SPECIAL_TOKENS, save_tiny_tokenizer

PAD = 10
"""The placeholder's id in every tiny model."""
_QWEN = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 40}}


@dataclass(frozen=True)
class Seeing:
    """How a tiny model that sees is made. fields: of its config."""

    config: str
    processor: str
    options: dict[str, Any]
    fields: dict[str, Any]
    changes: dict[str, Any]


PLACEHOLDERS: dict[str, str] = {}
"""Texts of the placeholders of families other than Qwen."""
SEEING = {
    "qwen2_vl": Seeing("Qwen2VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen2_5_vl": Seeing("Qwen2_5_VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen3_vl": Seeing("Qwen3VLConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
    "qwen3_vl_moe": Seeing("Qwen3VLMoeConfig", "Qwen2VLImageProcessorPil", _QWEN, {"image_token_id": PAD}, {}),
}


def make_seeing(path: Path, name: str) -> Any:
    """Save a tiny model with its image processor, and return it as transformers has it."""
    seeing = SEEING[name]
    model = make_model(path, seeing.config, fields=seeing.fields, **seeing.changes)
    processor_of(seeing.processor)(**seeing.options).save_pretrained(path)
    save_tokenizer(path, name)
    return model


def save_tokenizer(path: Path, family: str) -> None:
    """Save a tokenizer whose special tokens are those of the family, the placeholder at PAD, with a chat template."""
    save_tiny_tokenizer(path, special_tokens_of(family))
    config = json.loads((path / "tokenizer_config.json").read_text())
    mark = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>"}.get(family[:4], family_of_type(family).mark)
    config["chat_template"] = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{% if part.type == 'image' %}{{ '" + mark + "' }}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def special_tokens_of(family: str) -> list[str]:
    placeholder = PLACEHOLDERS.get(family, "<|image_pad|>")
    others = [mark for mark in family_of_type(family).marks if mark != placeholder]
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


@torch.no_grad()
def reference_with_pictures(model: Any, ids: Sequence[int], processed: Sequence[Processed]) -> Tensor:
    """Return transformers' logits [T, vocab] of a prompt with pictures in one pass."""
    tokens = torch.tensor([list(ids)])
    kinds = (tokens == PAD).int()
    names = processed[0].tensors if processed else {}
    given = {name: torch.cat([each.tensors[name] for each in processed]) for name in names}
    given |= {"mm_token_type_ids": kinds} if model.config.model_type.startswith("qwen") else {"token_type_ids": kinds}
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).logits[0]
