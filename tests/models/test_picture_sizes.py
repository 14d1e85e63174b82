"""Sizes of pictures by arithmetic: the tokens and the text of a size are what the processor and the tower make."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import InvalidParameter
from localllm.models.read_spec import read_spec
from localllm.models.spec.vision import Detail, ImageLimits
from localllm.models.vision.families import GEMMA4_TOKENS, keywords
from localllm.models.vision.tower import load_tower
from tests.models.seeing import SEEING, make_seeing, opened, picture

SIZES = ((1, 1), (4, 200), (200, 4), (33, 35), (97, 61))


@pytest.mark.parametrize("name", SEEING)
def test_the_rows_of_a_size_are_those_of_the_tower(name: str, tmp_path: Path) -> None:
    make_seeing(tmp_path, name)
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    processor, tower = opened(tmp_path, spec), load_tower(tmp_path, spec.vision, torch.device("cpu"), torch.float32)
    pad = processor._family.frame[1]
    for number, size in enumerate(SIZES):
        made, layout = processor.process_image(picture(*size, seed=number)), processor.layout(*size)
        assert len(tower.encode(made.pixels())) == layout.rows == made.rows == made.prompt.count(pad)
        assert (made.shown, made.grid, made.prompt) == (layout.shown, layout.grid, layout.prompt)
        assert layout.rows <= spec.vision.limits.max_tokens


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl.Qwen2_5_VL", {"image_token": "<|image_pad|>"}),
    "qwen3_vl": ("qwen3_vl.Qwen3VL", {"image_token": "<|image_pad|>"}),
    "glm4v": ("glm4v.Glm4v", {"image_token": "<|image|>"}),
    "glm46v": ("glm46v.Glm46V", {"image_token": "<|image|>"}),
    "gemma3": (
        "gemma3.Gemma3",
        {"full_image_sequence": f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"},
    ),
    "gemma4": ("gemma4.Gemma4", {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}),
    "internvl": (
        "internvl.InternVL",
        {"start_image_token": "<img>", "image_token": "<IMG_CONTEXT>", "end_image_token": "</img>",
         "image_seq_length": 1},
    ),
    "smolvlm": ("smolvlm.SmolVLM", {"image_seq_len": 1, "global_image_token": "<global-img>"}),
    "idefics3": ("idefics3.Idefics3", {"image_seq_len": 1, "global_image_tag": "<global-img>"}),
    "llava": ("llava.Llava", {"num_additional_image_tokens": 1}),
    "llava_next": ("llava_next.LlavaNext", {"num_additional_image_tokens": 1}),
    "llava_onevision": (
        "llava_onevision.LlavaOnevision",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_1"},
    ),
}  # fmt: skip
"""transformers' processors and their attributes. Pixtral's cannot be imported without torchvision."""
USUAL = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "patch_size": 4,
         "vision_feature_select_strategy": "default"}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_tensors_and_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make_seeing(tmp_path, name)
    processor = opened(tmp_path, read_spec(tmp_path))
    place, attributes = PROCESSORS[name]
    package, _, kind = place.partition(".")
    base = getattr(import_module(f"transformers.models.{package}.processing_{package}"), f"{kind}Processor")
    other = base.__new__(base)  # its __init__ asks for a video processor, which needs torchvision
    vars(other).update({**USUAL, **attributes, "image_processor": processor.processor})
    for number, size in enumerate(((1, 1), (40, 3), (97, 61), (500, 375))):
        image = picture(*size, seed=number)
        wanted = processor.processor(images=[image], return_tensors="pt", **getattr(base, "images_kwargs", {}))
        made = processor.process_image(image)
        assert made.prompt == other.replace_image_token(wanted, 0)
        for key, tensor in made.tensors.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(wanted[key])), key


def test_a_picture_that_scaling_would_make_a_line_without_width_is_refused(tmp_path: Path) -> None:
    make_seeing(tmp_path, "mistral3")
    processor = opened(tmp_path, read_spec(tmp_path))
    with pytest.raises(InvalidParameter, match="3 x 200 pixels would be scaled to 0 x 64"):
        processor.process_image(picture(3, 200))


def test_patches_of_a_model_without_a_tower_are_squares_of_the_picture(tmp_path: Path) -> None:
    """Gemma 4 12B reads patches of 3 x 3 smaller ones, row by row, in the order of their places."""
    make_seeing(tmp_path, "gemma4_unified")
    processor, image = opened(tmp_path, read_spec(tmp_path)), picture(84, 120)  # 7 x 10 tokens of 12 pixels
    made = processor.process_image(image)
    values, places = (made.tensors[name][0] for name in ("pixel_values", "image_position_ids"))
    pixels = torch.tensor(list(image.tobytes())).view(120, 84, 3) / 255
    assert made.shown == image.size
    for place in (0, 8, 69):
        column, row = places[place].tolist()
        assert (column, row) == (place % 7, place // 7)
        square = pixels[12 * row : 12 * (row + 1), 12 * column : 12 * (column + 1)]
        torch.testing.assert_close(values[place].float(), square.flatten())


def test_gemma_4_chooses_one_of_five_numbers_of_tokens(tmp_path: Path) -> None:
    make_seeing(tmp_path, "gemma4")
    spec = read_spec(tmp_path).vision
    assert spec is not None

    def chosen(detail: Detail, most: int = 1120) -> int:
        return int(keywords(spec, ImageLimits(35, most), detail)["max_soft_tokens"])

    assert [chosen(Detail(level)) for level in ("low", "auto", "high", "original")] == [70, 70, 1120, 1120]
    assert [chosen(Detail("high"), most) for most in (300, 280, 60)] == [280, 280, 70]
    assert chosen(Detail("high", max_pixels=spec.limits.px_per_token * 600)) == 560
    assert chosen(Detail(min_pixels=spec.limits.px_per_token * 140)) == 140
    with pytest.raises(InvalidParameter, match=f"It is one of {', '.join(map(str, GEMMA4_TOKENS))}"):
        opened(tmp_path, read_spec(tmp_path)).layout(9, 9, Detail(options=(("max_soft_tokens", 71),)))
