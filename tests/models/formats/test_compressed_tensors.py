"""compressed-tensors: integers packed and plain, FP8, 4-bit floats; groups of modules; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.kernels.planar.linear import PlanarWeight
from localllm.kernels.stacked_weight import StackedWeight
from localllm.models.formats.registry import quantization_in_words, quantization_notes
from tests.models.formats.quantised import (
    SHAPE,
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
from tests.models.formats.stores import ct_config, ct_fp8, ct_mxfp4, ct_nvfp4, ints, packed, plain
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ct"), "llama", **{**SHAPE, "dtype": "bfloat16"})


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("group", "symmetric"), [(32, True), (128, False), (-1, True), (-1, False)])
def test_packed_integers(bits: int, group: int, symmetric: bool, source: Path, tmp_path: Path) -> None:
    quantization = ct_config("pack-quantized", ints(bits, group, symmetric=symmetric))
    saved = save_quantised(source, tmp_path / "model", quantization, packed(bits, group, symmetric=symmetric))
    for matrix in quantised_matrices(agrees(saved)):
        assert isinstance(matrix, Int4Weight)
        assert matrix.bits == (8 if bits == 8 else 4)


@pytest.mark.parametrize("order", ["layer", "part", "unused"])
def test_order_of_inputs(order: str, source: Path, tmp_path: Path) -> None:
    quantization = ct_config("pack-quantized", ints(4, 32, actorder="group"))
    qkv, *_ = quantised_matrices(
        agrees(save_quantised(source, tmp_path / "model", quantization, packed(4, 32, order=order)))
    )
    assert isinstance(qkv, StackedWeight if order == "part" else Int4Weight)


INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "inputs",
    [INT8_INPUTS, {**INT8_INPUTS, "dynamic": False, "strategy": "tensor"}, None],
    ids=["dynamic", "static", "none"],
)
def test_int8(symmetric: bool, inputs: dict[str, Any] | None, source: Path, tmp_path: Path) -> None:
    quantization = ct_config("int-quantized", ints(8, -1, symmetric=symmetric), inputs)
    static = inputs is not None and not inputs["dynamic"]
    saved = save_quantised(source, tmp_path / "model", quantization, plain(8, symmetric=symmetric, static=static))
    qkv, *_ = quantised_matrices(agrees(saved))
    assert isinstance(qkv, Int8Weight)
    assert (qkv.zeros is None) == symmetric
    assert qkv.activations == ("16-bit" if inputs is None else "dynamic")
    assert len(quantization_notes(quantization)) == static


def test_int8_per_tensor(source: Path, tmp_path: Path) -> None:
    quantization = ct_config(
        "naive-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}, INT8_INPUTS
    )
    agrees(save_quantised(source, tmp_path / "model", quantization, plain(8, tensor=True)))


@pytest.mark.parametrize(("bits", "group"), [(4, -1), (4, 128), (8, 128)])
def test_integers_in_bytes_that_become_groups(bits: int, group: int, source: Path, tmp_path: Path) -> None:
    """W4A8 runs as W4A16, and says so."""
    quantization = ct_config("int-quantized", ints(bits, group), INT8_INPUTS)
    saved = save_quantised(source, tmp_path / "model", quantization, plain(bits, group))
    assert all(isinstance(matrix, Int4Weight) for matrix in quantised_matrices(agrees(saved)))
    (note,) = quantization_notes(quantization)
    assert f"W{bits}A8 runs as W{bits}A16" in note


FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("inputs", ["dynamic", "static", "16-bit"])
def test_fp8(strategy: str, inputs: str, source: Path, tmp_path: Path) -> None:
    asked = {"dynamic": FP8_INPUTS, "static": {**FP8_INPUTS, "dynamic": False, "strategy": "tensor"}, "16-bit": None}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "block_structure": [128, 128]}
    quantization = ct_config("float-quantized", weights, asked[inputs])
    saved = save_quantised(source, tmp_path / "model", quantization, ct_fp8(strategy, static=inputs == "static"))
    gate_up = quantised_matrices(agrees(saved))[2]
    assert isinstance(gate_up, Fp8Weight)
    assert gate_up.activations == ("dynamic" if strategy == "block" and inputs == "static" else inputs)


@pytest.mark.parametrize("store", [ct_nvfp4, ct_mxfp4])
def test_floats_of_4_bits(store: Store, source: Path, tmp_path: Path) -> None:
    """NVFP4's scales are products, rounded to fp16; MXFP4 loses nothing."""
    size = 16 if store is ct_nvfp4 else 32
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": size}
    layout = "nvfp4-pack-quantized" if store is ct_nvfp4 else "mxfp4-pack-quantized"
    quantization = ct_config(layout, weights, {"num_bits": 4, "type": "float", "dynamic": "local"})
    saved = save_quantised(source, tmp_path / "model", quantization, store)
    harness = agrees(saved, within=5e-3 if store is ct_nvfp4 else 1e-4)
    weights_agree(saved, harness, within=2**-11 if store is ct_nvfp4 else 0)
    for matrix in quantised_matrices(harness):
        assert isinstance(matrix, PlanarWeight)
        assert (matrix.bits, matrix.group) == (4, size)
    assert "16 bits" in quantization_notes(quantization)[0]


def test_groups_of_modules(source: Path, tmp_path: Path) -> None:
    """Patterns name the attention in 8 bits; the rest of the class is in 4; down is left alone."""
    quantization = ct_config("pack-quantized", ints(4, 32), ignore=["lm_head", "re:.*down_proj"])
    quantization["config_groups"]["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": ints(8, 64)}

    def store(stem: str, weight: Tensor) -> Any:
        return packed(8, 64)(stem, weight) if "self_attn" in stem else packed(4, 32, skip="down_proj")(stem, weight)

    def but_head(stem: str, weight: Tensor) -> Any:
        return None if stem == "lm_head" else store(stem, weight)

    qkv, out, gate_up = quantised_matrices(agrees(save_quantised(source, tmp_path / "model", quantization, but_head)))
    assert (qkv.bits, out.bits, gate_up.bits) == (8, 8, 4)
    assert quantization_in_words(quantization) == (
        "compressed-tensors: 4 bits, groups of 32; 8 bits, groups of 64 · runs as packed int4, int8 in groups"
    )


def test_scales_of_a_cache_are_left_out_and_said_so(source: Path, tmp_path: Path) -> None:
    quantization = ct_config("pack-quantized", ints(4, 32), kv_cache_scheme={"num_bits": 8, "type": "float"})
    saved = save_quantised(source, tmp_path / "model", quantization, packed(4, 32))
    rewrite(saved.path, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    agrees(saved)
    assert "KV cache" in quantization_notes(quantization)[0]
    set_quantization(saved.path, {**quantization, "kv_cache_scheme": None})
    assert_refused(saved, LocalLLMError, r"1 tensors.*k_scale")


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Saved:
    return save_quantised(source, tmp_path / "model", ct_config("pack-quantized", ints(4, 32)), packed(4, 32))


INTS = ints(4, 32)
PACKED = ct_config("pack-quantized", INTS)


def of_targets(*targets: str) -> dict[str, Any]:
    return {**PACKED, "config_groups": {"group_0": {"targets": list(targets), "weights": INTS}}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": (ct_config("marlin-24", INTS), "format marlin-24"),
    "sparse": ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "turned": ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "3 bits": (ct_config("pack-quantized", ints(3, 32)), "integers of 3 bits"),
    "no groups": ({**PACKED, "config_groups": {}}, "no config_groups"),
    "fp8 groups": (
        ct_config("float-quantized", {"num_bits": 8, "type": "float", "strategy": "group"}),
        "8 bits with scales per group",
    ),
    "pattern": (of_targets("re:("), "target"),
    "no group": (of_targets("re:.*mlp.*"), r"No group.*q_proj.*I32"),
    "no name": (of_targets("model.layers.0.mlp.down_proj"), r"No group.*q_proj.*I32"),
    "wrong bits": (ct_config("pack-quantized", ints(8, 32)), "weight_scale has shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_are_refused(name: str, saved: Saved) -> None:
    quantization, message = REFUSED[name]
    set_quantization(saved.path, quantization)
    assert_refused(saved, LocalLLMError, message)


Q = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "scale": (lambda t: t.pop(f"{Q}.weight_scale"), rf"lacks {Q}\.weight_scale"),
    "shape": (lambda t: t[f"{Q}.weight_shape"].add_(1), r"weight_shape says \[129, 129\].*\[128, 128\]"),
    "no shape": (lambda t: t.pop(f"{Q}.weight_shape"), rf"lacks {Q}\.weight_shape"),
    "groups": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].clone()}), r"\[128, 2\].*\[128, 4\]"
    ),
    "words": (lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].float()}), "stored as F32"),
    "order": (lambda t: t.update({f"{Q}.weight_g_idx": torch.full((128,), 7).int()}), "groups 7 to 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, saved: Saved) -> None:
    change, message = DAMAGE[name]
    rewrite(saved.path, change)
    assert_refused(saved, LocalLLMError, message)


def test_codes_beyond_their_bits(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", ct_config("int-quantized", ints(4, -1)), plain(8))
    assert_refused(saved, LocalLLMError, r"weight holds -1\d\d to 127.*-8 to 7")
