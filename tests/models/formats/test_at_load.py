"""Quantised at load: the model that comes out, its bytes, the memory on the way there, and what is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from localllm.errors import UnsupportedOption
from localllm.kernels import int4_linear
from localllm.kernels.fp8_linear import Fp8Weight
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.int8_linear import Int8Weight
from localllm.models.formats.at_load import AT_LOAD, at_load
from localllm.models.formats.registry import quantization_in_words
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from scripts.random_weights import SHAPES
from tests.models.formats.quantised import SHAPE, in_order, reference, rounded
from tests.models.harness import CPU, ModelHarness, prompt, reference_logits
from tests.tiny import make_tiny_model

KINDS = {"int4": Int4Weight, "int8": Int8Weight, "fp8": Fp8Weight}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("at_load"), "llama", **{**SHAPE, "dtype": "bfloat16"})


def meant(method: str, weight: Tensor) -> Tensor:
    """What the method makes of a matrix, from its definition."""
    if method == "int4":
        return rounded(weight, in_order(weight.shape[1], 128), 4, sym=False, dtype=torch.bfloat16)[3]
    scale = weight.abs().amax(1, keepdim=True) / (127 if method == "int8" else 448)
    scaled = weight / scale
    return (scaled.round() if method == "int8" else scaled.to(torch.float8_e4m3fn).float()) * scale


@pytest.mark.parametrize("method", KINDS)
def test_logits_are_those_of_the_quantised_model(method: str, source: Path) -> None:
    spec, tokens = read_spec(source), prompt(29)
    model = load_model(source, spec, CPU, torch.float32, quantization=method, cpu_weights="exact")
    assert isinstance(model.layers[0].mlp.down.weight, KINDS[method])
    assert isinstance(model.lm_head.weight, Tensor)
    predicted = resident_bytes(source, spec, CPU, torch.float32, quantization=method, cpu_weights="exact")
    assert held_bytes(model) == predicted
    _, ours = ModelHarness(model).prefill(tokens)
    theirs_model = reference(source)
    plain = {name: tensor.clone() for name, tensor in theirs_model.state_dict().items() if "_proj" in name}
    theirs_model.load_state_dict({name: meant(method, tensor) for name, tensor in plain.items()}, strict=False)
    theirs = reference_logits(theirs_model, tokens)
    theirs_model.load_state_dict(plain, strict=False)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-3


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("family", ["phi3", "qwen2", "gemma2"])
def test_bytes_are_predicted(method: str, family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, **{**SHAPE, "hidden_size": 256, "dtype": "float16"})
    spec = read_spec(path)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(path, spec, CPU, dtype, quantization=method)
        assert held_bytes(model) == resident_bytes(path, spec, CPU, dtype, quantization=method)


def wide_model(path: Path, num_layers: int) -> Path:
    """Wide enough that what is held beside a matrix is small against it."""
    import transformers

    config = transformers.LlamaConfig(
        **{**SHAPES["tiny"], "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
           "num_key_value_heads": 4, "num_hidden_layers": num_layers, "dtype": torch.bfloat16}
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("method", KINDS)
def test_memory_stays_under_the_quantised_size_and_one_layer(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by torch's own allocator. Work areas of fixed size are made as small as this model is."""
    monkeypatch.setattr(int4_linear, "QUANTIZE_ELEMENTS", 1 << 15)
    monkeypatch.setattr("localllm.kernels.fp8_linear.ROW_BLOCK", 128)
    monkeypatch.setattr("localllm.kernels.int8_linear.ROW_BLOCK", 128)
    path = wide_model(tmp_path, 6)
    spec = read_spec(path)
    tensors = load_file(path / "model.safetensors")
    layer = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.0." in name)
    del tensors
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = load_model(path, spec, CPU, torch.bfloat16, quantization=method, cpu_weights="exact")
    allocated = peak = 0
    mapped = (path / "model.safetensors").stat().st_size  # a map of the file is reported too, and takes no memory
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped:
            allocated += event.nbytes()
            peak = max(peak, allocated)
    held = held_bytes(model)
    assert allocated == pytest.approx(held, rel=0.02)  # the counter counts what there is
    assert peak < held + layer, f"{peak:,} bytes for a model of {held:,} and a layer of {layer:,}"


STORED: list[tuple[str, dict[str, Any] | None, str]] = [
    ("int4", {"quant_method": "awq"}, "int4.*quantised already: awq"),
    ("gptq", {"quant_method": "awq"}, "gptq.*awq"),
    ("fp8", {"quant_method": "compressed-tensors"}, "fp8.*compressed-tensors"),
    ("awq", None, "awq does not fit.*not quantised.*int4, int8, fp8"),
    ("int3", None, "int3 is not known"),
]


@pytest.mark.parametrize(("asked", "stored", "message"), STORED)
def test_what_does_not_fit_is_refused_with_both_names(asked: str, stored: Any, message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message) as caught:
        at_load(asked, stored)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "gguf"])
def test_naming_what_the_checkpoint_is_changes_nothing(method: str) -> None:
    assert at_load(method, {"quant_method": method}) is None


def test_one_line_says_what_was_found_and_how_it_runs() -> None:
    awq = {"quant_method": "awq", "group_size": 128}
    assert quantization_in_words(awq) == "AWQ, 4 bits, groups of 128 · runs as packed int4"
    assert quantization_in_words(None) == ""
    assert {method: quantization_in_words(None, method) for method in AT_LOAD} == {
        "int4": "int4 made at load, groups of 128 · runs as packed int4",
        "int8": "int8 made at load, per output · runs as int8",
        "fp8": "FP8 made at load, per output · runs as fp8",
    }


def test_a_quantised_checkpoint_is_not_quantised_anew(source: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(source, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedOption, match="quantised already"):
        load_model(path, read_spec(path), CPU, torch.float32, quantization="int8")


def test_counting_bytes_does_not_import_the_compiler(tiny_model_path: Callable[[str], Path]) -> None:
    """torch does so for some arithmetic on `meta`: seconds of each start, for nothing."""
    program = (
        "import sys, torch; from pathlib import Path; from localllm.models.loader import resident_bytes;"
        "from localllm.models.read_spec import read_spec; path = Path(sys.argv[1]);"
        "assert resident_bytes(path, read_spec(path), torch.device('cpu'), torch.float32, quantization='int4');"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    asked = [sys.executable, "-c", program, str(tiny_model_path("qwen3"))]
    assert subprocess.run(asked, check=False).returncode == 0
