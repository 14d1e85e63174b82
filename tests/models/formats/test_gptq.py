"""GPTQ: bits, groups, act order, zero conventions; and files that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.stacked_weight import StackedWeight
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    SHAPE,
    Saved,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
)
from tests.models.formats.stores import GPTQ, gptq
from tests.models.harness import CPU
from tests.tiny import make_tiny_model


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Saved:
    return save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("variant", ["sym v1", "asym v2", "desc_act"])
def test_bits(bits: int, variant: str, source: Path, tmp_path: Path) -> None:
    sym, v2, order = variant == "sym v1", variant == "asym v2", "layer" if variant == "desc_act" else ""
    config = {**GPTQ, "bits": bits, "sym": sym, "desc_act": bool(order)}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    store = gptq(bits, 32, sym=sym, v2=v2, order=order)
    for matrix in quantised_matrices(agrees(save_quantised(source, tmp_path / "model", config, store))):
        assert isinstance(matrix, Int4Weight)
        assert matrix.bits == (8 if bits == 8 else 4)
        assert (matrix.zeros is None) == sym
        assert (matrix.input_order is None) == (not order)


@pytest.mark.parametrize("group", [64, 128, -1])
def test_groups(group: int, source: Path, tmp_path: Path) -> None:
    config = {**GPTQ, "group_size": group}
    agrees(save_quantised(source, tmp_path / "model", config, gptq(4, group)))


@pytest.mark.parametrize("read", [load_model, resident_bytes])
def test_groups_that_no_kernel_takes(read: Callable[..., object], source: Path, tmp_path: Path) -> None:
    """Refused by name, by a load and by whoever only asks how much it would hold."""
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "group_size": 8}, gptq(4, 8))
    with pytest.raises(UnsupportedModel, match=r"_proj has a stored form that is not supported.*groups of 8 weights"):
        read(saved.path, read_spec(saved.path), CPU, torch.float32)


def test_each_part_of_a_layer_in_an_order_of_its_own(source: Path, tmp_path: Path) -> None:
    config = {**GPTQ, "desc_act": True}
    qkv, out, *_ = quantised_matrices(
        agrees(save_quantised(source, tmp_path / "model", config, gptq(4, 32, order="part")))
    )
    assert isinstance(qkv, StackedWeight)
    assert len(qkv.parts) == 3
    assert isinstance(out, Int4Weight)


def test_desc_act_over_inputs_that_are_in_order(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "desc_act": True}, gptq(4, 32))
    assert all(matrix.input_order is None for matrix in quantised_matrices(agrees(saved)))


def test_desc_act_with_one_group_a_row(source: Path, tmp_path: Path) -> None:
    config = {**GPTQ, "desc_act": True, "group_size": -1}
    agrees(save_quantised(source, tmp_path / "model", config, gptq(4, -1, order="part")))


def test_the_older_layout_with_its_settings_in_a_file_beside_the_config(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ before 0.5: config.json says nothing of quantisation, quantize_config.json does not name the method."""
    saved = save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32, sym=True))
    config = json.loads((saved.path / "config.json").read_text())
    del config["quantization_config"]
    (saved.path / "config.json").write_text(json.dumps(config))
    beside = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
              "true_sequential": True, "model_name_or_path": None, "model_file_base_name": None}  # fmt: skip
    (saved.path / "quantize_config.json").write_text(json.dumps(beside))
    spec = read_spec(saved.path)
    assert spec.quantization is not None
    assert spec.quantization["quant_method"] == "gptq"
    assert all(isinstance(matrix, Int4Weight) for matrix in quantised_matrices(agrees(saved)))


def test_quantised_head(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "lm_head": True}, gptq(4, 32, head=True))
    assert isinstance(agrees(saved).model.lm_head.weight, Int4Weight)


def test_rows_of_biased_layers(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen2", **SHAPE)
    agrees(save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32)))


def test_dynamic_settings_of_some_matrices(source: Path, tmp_path: Path) -> None:
    """GPTQModel's patterns: the feed-forward part in 8 bits, o left alone."""
    config = {**GPTQ, "dynamic": {"+:.*\\.mlp\\.": {"bits": 8, "group_size": 64}, "-:.*o_proj": {}}}

    def store(stem: str, weight: Tensor) -> tuple[Any, Tensor] | None:
        if "o_proj" in stem:
            return None
        return gptq(8, 64)(stem, weight) if ".mlp." in stem else gptq(4, 32)(stem, weight)

    qkv, gate_up, down = quantised_matrices(agrees(save_quantised(source, tmp_path / "model", config, store)))
    assert (qkv.bits, gate_up.bits, down.bits) == (4, 8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "marlin"}, "marlin layout"),
        ({"is_marlin_format": True}, "layout"),
        ({"bits": 5}, "5 bits"),
        ({"bits": None}, "bits = None"),
        ({"group_size": 48}, "128 inputs.*groups of 48"),
        ({"dynamic": {"+:(": {"bits": 8}}}, "pattern"),
        ({"dynamic": {"-:.*q_proj": {}}}, "q_proj.*dynamic"),
        ({"sym": True}, "qzeros.*not 8.*sym"),
        ({"bits": 8}, "qzeros has shape"),
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, saved: Saved) -> None:
    set_quantization(saved.path, {**GPTQ, **changes})
    assert_refused(saved, LocalLLMError, message)


def test_symmetric_zero_points_read_by_the_wrong_convention(source: Path, tmp_path: Path) -> None:
    """v2 zero points under a config that says v1 would shift every weight by a step."""
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "sym": True}, gptq(4, 32, sym=True, v2=True))
    assert_refused(saved, CorruptModel, r"not 8: 9 for one.*checkpoint_format gptq;")


def test_order_that_the_config_does_not_tell_of(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32, order="layer"))
    assert_refused(saved, CorruptModel, r"g_idx is not in order.*desc_act is false")


Q = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "out of range": (lambda t: t[f"{Q}.g_idx"].fill_(4), "groups 4 to 4.*There are 4"),
    "negative": (lambda t: t[f"{Q}.g_idx"].sub_(1), "groups -1 to 2"),
    "uneven": (lambda t: t[f"{Q}.g_idx"].fill_(2), "does not divide 128 columns"),
    "short": (lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"][:64].clone()}), r"g_idx has shape \[64\]"),
    "no scales": (lambda t: t.pop(f"{Q}.scales"), rf"lacks {Q}\.scales"),
    "no zeros": (lambda t: t.pop(f"{Q}.qzeros"), rf"lacks {Q}\.qzeros"),
    "zeros": (lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :8].clone()}), r"\[4, 8\].*\[4, 16\]"),
    "words": (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}), "qweight is stored as F32"),
    "both": (lambda t: t.update({f"{Q}.weight": torch.zeros(128, 128)}), rf"1 tensors.*{Q}\.weight"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, saved: Saved) -> None:
    change, message = DAMAGE[name]
    rewrite(saved.path, change)
    assert_refused(saved, LocalLLMError, message)


def test_missing_order_of_desc_act(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "desc_act": True}, gptq(4, 32, order="layer"))
    rewrite(saved.path, lambda t: t.pop(f"{Q}.g_idx"))
    assert_refused(saved, CorruptModel, rf"lacks {Q}\.g_idx")


def test_zero_point_of_256(source: Path, tmp_path: Path) -> None:
    """8 bits, v1: 255 in the file means 256, which a byte cannot say."""
    saved = save_quantised(source, tmp_path / "model", {**GPTQ, "bits": 8}, gptq(8, 32))
    rewrite(saved.path, lambda t: t[f"{Q}.qzeros"].fill_(-1))
    assert_refused(saved, LocalLLMError, f"{Q}.*zero point of 256")


def test_a_bias_of_zeros_beside_a_quantised_matrix_is_dropped(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every layer."""
    saved = save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32))
    rewrite(saved.path, lambda tensors: tensors.update(_biases(tensors, 0.0)))
    agrees(saved)


def test_another_bias_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", GPTQ, gptq(4, 32))
    rewrite(saved.path, lambda tensors: tensors.update(_biases(tensors, 0.25)))
    assert_refused(saved, CorruptModel, r"_proj\.bias is not zero")


def _biases(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".scales")}
    return {name.replace(".scales", ".bias"): torch.full((t.shape[1],), value).half() for name, t in scales.items()}
