"""bitsandbytes: NF4 and FP4 with plain and with quantised scales, and LLM.int8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.errors import LocalLLMError, UnsupportedModel
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.planar.linear import PlanarWeight
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    Saved,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
    weights_agree,
)
from tests.models.formats.stores import NF4, eight_bits, four_bits
from tests.models.harness import CPU


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_4_bits(kind: str, double: bool, source: Path, tmp_path: Path) -> None:
    """Scales are rounded to fp16; nothing else is. Scales that are fp16 numbers already, the source's, stay exact."""
    config = {**NF4, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    saved = save_quantised(source, tmp_path / "model", config, four_bits(kind, double=double))
    harness = agrees(saved, within=5e-3 if double else 1e-4)
    weights_agree(saved, harness, within=2**-11 if double else 1e-6)
    for matrix in quantised_matrices(harness):
        assert isinstance(matrix, PlanarWeight)
        assert matrix.bits == 4


def test_config_without_a_method(source: Path, tmp_path: Path) -> None:
    config = {name: value for name, value in NF4.items() if name != "quant_method"}
    agrees(save_quantised(source, tmp_path / "model", config, four_bits("nf4", double=True)), within=5e-3)


def test_blocks_of_128(source: Path, tmp_path: Path) -> None:
    agrees(save_quantised(source, tmp_path / "model", NF4, four_bits("nf4", double=False, block=128)))


@pytest.mark.parametrize("read", [load_model, resident_bytes])
def test_blocks_that_no_kernel_takes(read: Callable[..., object], source: Path, tmp_path: Path) -> None:
    """Refused by name, by a load and by whoever only asks how much it would hold."""
    saved = save_quantised(source, tmp_path / "model", NF4, four_bits("nf4", double=False, block=16))
    with pytest.raises(UnsupportedModel, match=r"_proj has a stored form that is not supported.*blocks of 16 weights"):
        read(saved.path, read_spec(saved.path), CPU, torch.float32)


def test_llm_int8(source: Path, tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    saved = save_quantised(source, tmp_path / "model", config, eight_bits)
    assert all(isinstance(matrix, Int8Weight) for matrix in quantised_matrices(agrees(saved)))


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Saved:
    return save_quantised(source, tmp_path / "model", NF4, four_bits("nf4", double=True))


W = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{W}.quant_state.bitsandbytes__nf4"


def said(**state: Any) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


DAMAGE = {
    "no JSON": (lambda t: t[STATE].fill_(255), "quant_state.*cannot be read"),
    "list": (lambda t: t.update({STATE: torch.tensor([91, 93], dtype=torch.uint8)}), "cannot be read"),
    "no shape": (lambda t: t.update({STATE: said(blocksize=64)}), "cannot be read.*shape"),
    "negative": (lambda t: t.update({STATE: said(blocksize=64, shape=[-128, -128])}), "cannot be read"),
    "large": (lambda t: t.update({STATE: said(blocksize=64, shape=[1 << 40, 128])}), "1099511627[79]"),
    "blocks": (lambda t: t.update({STATE: said(blocksize=96, shape=[128, 128])}), "blocks of 96"),
    "absmax": (lambda t: t.pop(f"{W}.absmax"), r"lacks .*weight\.absmax"),
    "nested": (lambda t: t.pop(f"{W}.nested_absmax"), "lacks .*nested_absmax"),
    "map": (lambda t: t.update({f"{W}.quant_map": torch.zeros(8)}), r"quant_map has shape \[8\].*\[16\]"),
    "nan": (lambda t: t[f"{W}.nested_absmax"].fill_(torch.nan), "NaN or infinite"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, saved: Saved) -> None:
    change, message = DAMAGE[name]
    rewrite(saved.path, change)
    assert_refused(saved, LocalLLMError, message)


@pytest.mark.parametrize(
    ("config", "message"),
    [({**NF4, "bnb_4bit_quant_type": "af4"}, "af4"), ({"quant_method": "bitsandbytes"}, "neither in 4 nor in 8")],
)
def test_configs_that_are_refused(config: dict[str, Any], message: str, saved: Saved) -> None:
    set_quantization(saved.path, config)
    with pytest.raises(LocalLLMError, match=message):
        read_spec(saved.path)


def test_tiles_of_a_gpu_are_refused(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {"load_in_8bit": True}, eight_bits)
    rewrite(saved.path, lambda t: t["model.layers.0.self_attn.q_proj.weight_format"].fill_(2))
    assert_refused(saved, LocalLLMError, "GPU-specific tile layout")
