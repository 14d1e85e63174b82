"""The memory of encoding: the plan's arithmetic against the tensors of transformers' towers."""

from pathlib import Path

import pytest
import torch

from tests.models.encode_memory import make_wide, planned_and_measured
from tests.models.seeing import SEEING


@pytest.mark.parametrize("name", SEEING)
def test_the_plan_of_a_picture_is_what_its_tensors_hold(name: str, tmp_path: Path) -> None:
    spec = make_wide(tmp_path, name)
    for dtype in (torch.float32, torch.bfloat16):
        planned, measured = planned_and_measured(tmp_path, spec, dtype)
        assert planned == pytest.approx(measured, rel=0.03), (dtype, planned / measured)
