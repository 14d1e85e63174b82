"""The memory of encoding: no picture that a server admits takes more than was planned for the largest one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.models.fit.pictures import picture_sizes
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_tower
from tests.models import seeing
from tests.models.peak_bytes import PeakBytes
from tests.models.seeing import SEEING, make_seeing, opened, picture

MOST_TOKENS = 560
SIZES = ((256, 256), (300, 180), (90, 120))
LARGE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 64, "longest_edge": 64 * 600}},
    "qwen3_vl": {"size": {"shortest_edge": 64, "longest_edge": 64 * 600}},
    "mistral3": {"size": {"longest_edge": 192}},
    "pixtral": {"size": {"longest_edge": 160}},
    "gemma4": {"max_soft_tokens": 560},
}
"""Options of processors with which pictures have so many patches that what grows with their square shows."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.rotates(4)) for name in SEEING])
def test_no_admitted_picture_takes_more_than_the_plan_has_for_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(SEEING[name], options={**SEEING[name].options, **LARGE.get(name, {})})
    monkeypatch.setitem(seeing.SEEING, name, made)
    make_seeing(tmp_path, name)
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    config = EngineConfig(device="cpu", image_max_tokens=min(spec.vision.limits.max_tokens, MOST_TOKENS))
    sizes = picture_sizes(spec, config, "float32", 64)
    tower = load_tower(tmp_path, spec.vision, torch.device("cpu"), torch.float32)
    processor = opened(tmp_path, replace(spec, vision=replace(spec.vision, limits=sizes.limits)))
    for size in SIZES:
        pixels = processor.process_image(picture(*size)).pixels()
        held = sum(each.nbytes for each in pixels.values() if isinstance(each, torch.Tensor))
        with PeakBytes() as measured:
            rows = tower.encode(pixels)
        assert len(rows) <= sizes.rows
        assert 0 < measured.peak + held <= sizes.encode_bytes, (size, len(rows))
