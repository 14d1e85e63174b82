"""FP8: per tensor, output and block; static and dynamic activations; the files of three tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import LocalLLMError
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.stacked_weight import StackedWeight
from tests.models.formats.quantised import (
    Saved,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
)
from tests.models.formats.stores import BLOCKS, DYNAMIC, E4M3, STATIC, per_block, per_output, per_tensor


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Saved:
    return save_quantised(source, tmp_path / "model", STATIC, per_tensor(static="input_scale"))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_per_tensor(shape: tuple[int, ...], source: Path, tmp_path: Path) -> None:
    """q, k and v have a scale each; as one matrix they have one per output."""
    saved = save_quantised(source, tmp_path / "model", DYNAMIC, per_tensor(shape=shape))
    qkv = quantised_matrices(agrees(saved))[0]
    assert isinstance(qkv, Fp8Weight)
    assert qkv.activations == "dynamic"
    assert len(qkv.scales.unique()) == 3


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_activations(name: str, source: Path, tmp_path: Path) -> None:
    """The parts of a layer read the same x: its widest measured range holds for all of them."""
    saved = save_quantised(source, tmp_path / "model", STATIC, per_tensor(static=name))
    qkv, *_ = quantised_matrices(agrees(saved))
    assert qkv.activations == "static"
    stem = "model.layers.0.self_attn.q_proj"
    assert float(qkv.activation_scale) == pytest.approx(0.01 + len(stem) / 1e4)


def test_per_output(source: Path, tmp_path: Path) -> None:
    agrees(save_quantised(source, tmp_path / "model", DYNAMIC, per_output))


def test_fbgemm(source: Path, tmp_path: Path) -> None:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    agrees(save_quantised(source, tmp_path / "model", config, per_output))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks(kind: torch.dtype, source: Path, tmp_path: Path) -> None:
    """k has 64 outputs: the blocks of v cannot follow on its own."""
    qkv, _, gate_up, _ = quantised_matrices(
        agrees(save_quantised(source, tmp_path / "model", BLOCKS, per_block(kind=kind)))
    )
    assert isinstance(qkv, StackedWeight)
    assert isinstance(gate_up, Fp8Weight)
    assert gate_up.scales.shape == (4, 1)


def test_larger_blocks(source: Path, tmp_path: Path) -> None:
    config = {**BLOCKS, "weight_block_size": [256, 256]}
    agrees(save_quantised(source, tmp_path / "model", config, per_block(256)))


def test_quantised_head(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", DYNAMIC, per_tensor(head=True))
    assert isinstance(agrees(saved).model.lm_head.weight, Fp8Weight)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "e5m2"),
        ({"activation_scheme": "weekly"}, "weekly"),
        ({"weight_block_size": [64, 64]}, "64 x 64.*128 x 128"),
        ({"weight_block_size": 128}, "weight_block_size = 128"),
        ({"weight_block_size": [128, 128]}, r"weight_scale has shape \[\].*\[1, 1\]"),
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, saved: Saved) -> None:
    set_quantization(saved.path, {**STATIC, **changes})
    assert_refused(saved, LocalLLMError, message)


DAMAGE = {
    "no scale": (lambda t: t.pop(f"{Q}.weight_scale"), rf"lacks {Q}\.weight_scale"),
    "no input scale": (lambda t: t.pop(f"{Q}.input_scale"), rf"lacks {Q}\.input_scale"),
    "many scales": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(7)}), r"shape \[7\].*\[\].*\[128\]"),
    "nan": (lambda t: t[f"{Q}.weight_scale"].fill_(torch.inf), "NaN or infinite"),
    "e5m2": (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float().to(torch.float8_e5m2)}), "F8_E5M2.*F8_E4M3"),
    "shape": (
        lambda t: t.update({f"{Q}.weight": torch.zeros(128, 256).to(E4M3)}),
        "different numbers of inputs.*q_proj: 256",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, saved: Saved) -> None:
    change, message = DAMAGE[name]
    rewrite(saved.path, change)
    assert_refused(saved, LocalLLMError, message)
