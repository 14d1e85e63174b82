"""Sizes of pictures by arithmetic: the tokens and the text of a size are what the processor and the tower make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localllm.errors import InvalidParameter
from localllm.models.read_spec import read_spec
from localllm.models.spec.vision import Detail, ImageLimits
from localllm.models.vision.families import GEMMA4_TOKENS, keywords
from localllm.models.vision.tower import load_tower
from tests.models.seeing import SEEING, make_seeing, opened, picture

SIZES = ((1, 1), (3, 200), (200, 3), (33, 35), (97, 61))
QUICK = ("gemma4", "llava_next")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.rotates(4)) for name in SEEING]


@pytest.mark.parametrize("name", ALL)
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
