"""Model Optimizer: FP8 and NVFP4, and both places of its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from localllm.errors import UnsupportedModel
from localllm.models.formats.registry import quantization_notes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    agrees,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
    weights_agree,
)
from tests.models.formats.stores import modelopt_fp8, modelopt_nvfp4


def test_fp8(source: Path, tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    matrices = quantised_matrices(agrees(save_quantised(source, tmp_path / "model", config, modelopt_fp8)))
    assert all(matrix.activations == "static" for matrix in matrices)


def test_nvfp4_with_the_config_in_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {}, modelopt_nvfp4)
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
    saved = save_quantised(source, tmp_path / "model", {}, modelopt_fp8)
    set_quantization(saved.path, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(UnsupportedModel, match=r"W4A8_AWQ.*FP8 and NVFP4"):
        read_spec(saved.path)
