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
    Store,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
    weights_agree,
)
from tests.models.harness import CPU

TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    "fp4": [
        0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
        -0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ],
}  # fmt: skip
NF4: dict[str, Any] = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


def four_bits(kind: str, *, double: bool, block: int = 64) -> Store:
    table = torch.tensor(TABLES[kind])

    def store(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if stem == "lm_head":
            return None
        blocks = weight.reshape(-1, block)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(weight.shape),
        }  # fmt: skip
        tensors = {}
        if double:  # scales less their mean, as codes of a table, in blocks of 256
            offset = float(scale.mean())
            dynamic = torch.linspace(-1, 1, 256)
            groups = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
            outer = groups.abs().amax(1)
            codes = (groups / outer[:, None])[..., None].sub(dynamic).abs().argmin(-1).flatten()[: len(scale)]
            scale = dynamic[codes] * outer.repeat_interleave(256)[: len(scale)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": dynamic}
            tensors["weight.absmax"] = codes.to(torch.uint8)
        else:
            tensors["weight.absmax"] = scale
        codes = (blocks / scale[:, None])[..., None].sub(table).abs().argmin(-1)
        flat = codes.flatten().to(torch.uint8)
        blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {
            "weight": (flat[::2] << 4 | flat[1::2])[:, None], "weight.quant_map": table,
            f"weight.quant_state.bitsandbytes__{kind}": blob,
        }  # fmt: skip
        return tensors, (table[codes] * scale[:, None]).view(weight.shape)

    return store


def eight_bits(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if stem == "lm_head":
        return None
    most = weight.abs().amax(1)
    values = (weight * 127 / most[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values * most[:, None] / 127


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
