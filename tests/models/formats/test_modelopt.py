"""Model Optimizer: FP8 and NVFP4, and both places of its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.models.formats.registry import quantization_notes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    agrees,
    e2m1,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
    weights_agree,
)


def fp8(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if stem == "lm_head":
        return None
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, values.float() * scale


def nvfp4(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if stem == "lm_head":
        return None
    rows, whole = weight.shape[0], weight.abs().max() / (448 * 6)
    scale = (weight.view(rows, -1, 16).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    step = (scale.float() * whole)[..., None]
    codes, values = e2m1((weight.view(rows, -1, 16) / step).nan_to_num().view(rows, -1))
    tensors = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": whole,
               "input_scale": torch.tensor(0.01)}  # fmt: skip
    return tensors, (values.view(rows, -1, 16) * step).view(rows, -1)


def test_fp8(source: Path, tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    matrices = quantised_matrices(agrees(save_quantised(source, tmp_path / "model", config, fp8)))
    assert all(matrix.activations == "static" for matrix in matrices)


def test_nvfp4_with_the_config_in_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {}, nvfp4)
    config = json.loads((saved.path / "config.json").read_text())
    del config["quantization_config"]
    (saved.path / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (saved.path / "hf_quant_config.json").write_text(json.dumps(beside))
    rewrite(saved.path, lambda t: t.update({"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)}))
    weights_agree(saved, agrees(saved, within=5e-3), within=2**-11)
    notes = quantization_notes(read_spec(saved.path).quantization)
    assert any("16 bits" in note for note in notes)
    assert any("KV cache" in note for note in notes)


def test_other_algorithms_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {}, fp8)
    set_quantization(saved.path, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(UnsupportedModel, match=r"W4A8_AWQ.*FP8 and NVFP4"):
        read_spec(saved.path)
