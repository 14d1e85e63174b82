"""Quantised checkpoints of models that a class of transformers computes: logits are those of the class in fp32 with the
dequantised weights, in mixed batches and chunks; bytes are those that were predicted."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.pack import cpu_layout
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.models.formats.at_load import AT_LOAD
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend.layouts import QuantizedLinear
from localllm.models.weights.parameters import held_bytes
from tests.models.class_models import make_class_model
from tests.models.classes import LENGTHS, class_logits, largest_difference
from tests.models.formats import stores
from tests.models.formats.quantised import Store
from tests.models.formats.stores import BLOCKS
from tests.models.harness import CPU, ModelHarness, prompt
from tests.models.quantised_classes import CLASSES, OURS, quantise, quantised_class

PROMPTS = [prompt(length + 2, length) for length in LENGTHS]


def load(path: Path, verify: bool = False, **asked: Any) -> Any:
    """Load a model through its class. Its bytes are those that were predicted."""
    spec = read_spec(path)
    assert spec.implementation == "transformers"
    model = load_model(path, spec, CPU, torch.float32, verify=verify, **asked)
    assert held_bytes(model) == resident_bytes(path, spec, CPU, torch.float32, **asked)
    return model


def difference(model: Any, dense: Path) -> float:
    with torch.inference_mode():
        return largest_difference(ModelHarness(model), PROMPTS, class_logits(dense, PROMPTS))


def held(model: Any) -> tuple[int, int]:
    """The linear layers and the layers of experts that are quantised."""
    parts = list(model.module.modules())
    experts = [part for part in parts if hasattr(part, "localllm_experts")]
    assert not any(part._parameters for part in experts)
    return sum(isinstance(part, QuantizedLinear) for part in parts), len(experts)


HELD = {
    "deepseek_v4": (30, 4),
    "glm5_next": (26, 3),
    "hy_v4": (28, 3),
    "minimax_m3_vl": (30, 3),
    "mistral_large4": (14, 1),
    "qwen4_exp": (52, 4),
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_class_computes_its_quantised_checkpoint(model_type: str, tmp_path: Path) -> None:
    packed, dense = quantised_class(model_type, tmp_path)
    model = load(packed, cpu_weights="exact")
    assert difference(model, dense) < 2e-3
    assert held(model) == HELD[model_type]


@pytest.mark.parametrize("model_type", OURS)
def test_a_decoder_of_ours_computes_a_checkpoint_of_a_class(model_type: str, tmp_path: Path) -> None:
    packed, dense = quantised_class(model_type, tmp_path)
    spec = read_spec(packed)
    model = load_model(packed, spec, CPU, torch.float32, cpu_weights="exact")
    assert held_bytes(model) == resident_bytes(packed, spec, CPU, torch.float32, cpu_weights="exact")
    assert difference(model, dense) < 2e-3


FORMATS: dict[str, tuple[Mapping[str, Any], Store]] = {
    **stores.FORMATS,
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, stores.modelopt_nvfp4),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model that has no decoder of ours."""
    path = tmp_path_factory.mktemp("apertus") / "model"
    make_class_model(path, "apertus", intermediate_size=128)
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_any_class_computes_a_format_of_ours(name: str, plain: Path, tmp_path: Path) -> None:
    packed, dense = quantise(plain, tmp_path, *FORMATS[name])
    model = load(packed, verify=True, cpu_weights="exact")
    assert held(model) == (6 * model.spec.num_layers, 0)
    assert difference(model, dense) < 2e-3


def test_a_cpu_packs_large_matrices_as_for_decoders_of_ours(tmp_path: Path) -> None:
    make_class_model(tmp_path / "model", "apertus", intermediate_size=1024)
    packed, dense = quantise(tmp_path / "model", tmp_path, *FORMATS["blocks"])
    stored, model = (load(packed, cpu_weights=layout) for layout in ("exact", "fast"))
    before, after = (each.module.model.layers[0].mlp.up_proj.linear.weight for each in (stored, model))
    assert isinstance(before, Fp8Weight)
    assert isinstance(after, Fp8Weight) == (cpu_layout(before, "fast") is None)
    assert difference(model, dense) < 5e-2


@pytest.mark.parametrize("asked", AT_LOAD)
def test_matrices_of_layers_are_quantised_at_load(asked: str, plain: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    shutil.copytree(plain, dense)
    tensors = load_file(dense / "model.safetensors")
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        tensors[name] = AT_LOAD[asked](tensors[name]).dequantize(torch.float32)
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    model = load(plain, quantization=asked, cpu_weights="exact")
    assert held(model) == (6 * model.spec.num_layers, 0)
    assert difference(model, dense) < 2e-3


def test_experts_are_quantised_at_load_however_they_are_stored(tmp_path: Path) -> None:
    make_class_model(tmp_path / "each", "hy_v4")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "each", dtype=torch.float32)
    module.save_pretrained(tmp_path / "stacked", save_original_format=False)
    models = [load(tmp_path / name, quantization="int8", cpu_weights="exact") for name in ("each", "stacked")]
    assert [held(model)[1] for model in models] == [3, 3]
    first, second = (ModelHarness(model).prefill(PROMPTS[1])[1] for model in models)
    assert torch.equal(first, second)


def test_bytes_count_what_a_class_keeps_in_fp32(tmp_path: Path) -> None:
    packed, _ = quantised_class("hy_v4", tmp_path)
    spec = read_spec(packed)
    model = load_model(packed, spec, CPU, torch.bfloat16, verify=False)
    assert {p.dtype for p in model.module.parameters()} == {torch.float32, torch.bfloat16}
    assert held_bytes(model) == resident_bytes(packed, spec, CPU, torch.bfloat16)


def test_an_older_transformers_is_named(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = quantise(plain, tmp_path, *FORMATS["blocks"])
    spec = read_spec(packed)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(UnsupportedModel, match="with this version of transformers"):
        resident_bytes(packed, spec, CPU, torch.float32)


def changed(packed: Path, tensors: Mapping[str, Tensor]) -> Path:
    file = packed / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return packed


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    packed, _ = quantised_class("deepseek_v4", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    drafts = {
        name.replace("layers.0", "mtp.0"): tensor.clone() for name, tensor in tensors.items() if "layers.0" in name
    }
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in drafts.values())
    before = held(load(packed))
    assert held(load(changed(packed, drafts))) == before


def test_a_matrix_without_a_place_is_named(tmp_path: Path) -> None:
    packed, _ = quantised_class("deepseek_v4", tmp_path)
    extra = {
        "layers.0.attn.wx.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
        "layers.0.attn.wx.scale": torch.ones(1, 1),
    }
    with pytest.raises(CorruptModel, match=r"unexpected keys: layers\.0\.attn\.wx\.weight"):
        load(changed(packed, extra))


def test_a_bias_that_the_class_does_not_add(plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes zeros; others would change the answers."""
    packed, _ = quantise(plain, tmp_path, *FORMATS["gptq"])
    name = "model.layers.0.self_attn.q_proj.bias"
    load(changed(packed, {name: torch.zeros(64)}))
    with pytest.raises(CorruptModel, match=f"{name} is not zero"):
        load(changed(packed, {name: torch.ones(64)}))


def test_matrices_of_wrong_sizes_are_named(plain: Path, tmp_path: Path) -> None:
    packed, _ = quantise(plain, tmp_path, *FORMATS["blocks"])
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.up_proj has shape"):
        load(changed(packed, {name: torch.zeros(128, 32).to(torch.float8_e4m3fn)}))


def test_what_a_format_does_not_store_is_refused(plain: Path, tmp_path: Path) -> None:
    packed, _ = quantise(plain, tmp_path, *FORMATS["awq"])
    name = "model.layers.1.attention_layernorm.weight"
    with pytest.raises(UnsupportedModel, match=rf"{name} is stored as F8_E4M3.*AWQ"):
        load(changed(packed, {name: torch.ones(64).to(torch.float8_e4m3fn)}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BLOCKS, "weight_block_size": [32, 32]}, r"a scale for each 32 x 32 weights.*128 x 128"),
        ({**BLOCKS, "expert_dtype": "fp6"}, r"expert_dtype of 'fp6'.*fp8 and fp4"),
        ({"quant_method": "mxfp6"}, r"quantised \(mxfp6\).*Supported: awq"),
        ({"quant_method": "mxfp8", "weight_block_size": [32, 1]}, r"weight_block_size = \[32, 1\].*1, 32"),
    ],
)
def test_formats_that_are_not_supported_are_named(config: Any, message: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = quantise(plain, tmp_path, config, lambda *_: None)
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(packed)
