"""GGUF files of models that a class of transformers computes: logits are those of the class in fp32 with the values
that the file stands for, in mixed batches and chunks; bytes are those that were predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.formats.gguf import matrices
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.transformers_backend.layouts import QuantizedLinear
from localllm.models.transformers_backend.module import StoredTable
from localllm.models.weights.parameters import held_bytes
from tests.gguf_classes import KINDS, SIZES, Written, write_class
from tests.marks import needs_library
from tests.models.class_models import make_class_model
from tests.models.classes import LENGTHS, class_logits, largest_difference
from tests.models.harness import CPU, ModelHarness, prompt

HELD = {
    "deepseek_v4": (31, 4),
    "glm5_next": (21, 3),
    "hy_v4": (28, 3),
    "minimax_m3_vl_text": (25, 3),
    "qwen4_exp_text": (32, 4),
}
"""Linear layers and layers of experts that are in blocks: not those that the class's own code reads a weight beside."""
BLOCKS_OF_256 = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
PROMPTS = [prompt(length + 2, length) for length in LENGTHS]


def written(model_type: str, folder: Path, *how: Any, sizes: dict[str, Any] | None = None, **more: Any) -> Written:
    folder.mkdir(exist_ok=True)
    own = SIZES[model_type]
    asked = (
        {"text_config": {**own["text_config"], **(sizes or {})}} if "text_config" in own else {**own, **(sizes or {})}
    )
    make_class_model(folder / "model", model_type, **asked)
    return write_class(folder / "model", folder, *how, **more)


def load(path: Path, **asked: Any) -> Any:
    """Load a file through its class. Its bytes are those that were predicted."""
    spec = read_spec(path)
    assert spec.implementation == "transformers"
    model = load_model(path, spec, CPU, torch.float32, cpu_weights="exact", **asked)
    assert held_bytes(model) == resident_bytes(path, spec, CPU, torch.float32, cpu_weights="exact")
    return model


def difference(model: Any, dense: Path) -> float:
    with torch.inference_mode():
        return largest_difference(ModelHarness(model), PROMPTS, class_logits(dense, PROMPTS))


def linears_and_experts(model: Any) -> tuple[set[str], set[str]]:
    """The names of the linear layers, and of the layers of experts, that keep their blocks."""
    parts = dict(model.module.named_modules())
    linears = {name for name, part in parts.items() if isinstance(part, QuantizedLinear)}
    return linears, {name for name, part in parts.items() if hasattr(part, "localllm_experts")}


@pytest.mark.parametrize("model_type", KINDS)
def test_a_file_of_floats_is_the_class(model_type: str, tmp_path: Path) -> None:
    file, dense, _ = written(model_type, tmp_path)
    model = load(file, verify=True)
    assert difference(model, dense) < 2e-3
    assert linears_and_experts(model) == (set(), set())


@pytest.mark.parametrize("model_type", KINDS)
def test_matrices_and_experts_keep_their_blocks(model_type: str, tmp_path: Path) -> None:
    file, dense, quantized = written(model_type, tmp_path, "Q8_0", others={"_exps": "Q4_0", "ffn_up": "Q5_0"})
    model = load(file, verify=False)
    assert difference(model, dense) < 2e-3
    linears, experts = linears_and_experts(model)
    assert linears <= {name.removesuffix(".weight") for name in quantized}
    assert (len(linears), len(experts)) == HELD[model_type]


@needs_library
@pytest.mark.parametrize("model_type", KINDS)
def test_types_that_a_device_does_not_read_are_dequantised(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has no kernel for types of 2 bits; nor has a CPU without the native library."""
    shared = {"shared_intermediate_size": 256} if model_type == "minimax_m3_vl_text" else {}
    types = {"ffn_down": "IQ2_XXS"}
    file, dense, quantized = written(model_type, tmp_path, "Q8_0", others=types, sizes={**BLOCKS_OF_256, **shared})
    as_stored = load(file, verify=False)
    assert difference(as_stored, dense) < 2e-3
    monkeypatch.setattr(matrices, "reads_blocks", lambda _: False)
    widened = load(file, verify=False)
    assert difference(widened, dense) < 2e-3
    assert held_bytes(widened) > held_bytes(as_stored)
    of_two_bits = {name.removesuffix(".weight") for name, types in quantized.items() if types == {"IQ2_XXS"}}
    assert of_two_bits != set()
    assert of_two_bits.isdisjoint(linears_and_experts(widened)[0])


def test_a_table_of_ngrams_stays_in_the_file(tmp_path: Path) -> None:
    """Blocks of the rows that a step reads are widened; the table takes no memory of its own."""
    (plain, dense, _), (blocks, meant, _) = (
        written("qwen4_exp_text", tmp_path / kind, kind, sizes={"ple_embed_dim": 128}) for kind in ("F32", "Q8_0")
    )
    for file, folder in ((plain, dense), (blocks, meant)):
        model = load(file, verify=False)
        (table,) = (part for part in model.module.modules() if isinstance(part, StoredTable))
        assert difference(model, folder) < 2e-3
        assert not list(table.parameters())
    assert table.weight.dtype == torch.uint8


def test_a_part_that_is_not_quantised_is_joined_with_the_one_that_is(tmp_path: Path) -> None:
    file, dense, _ = written("hy_v4", tmp_path, "Q8_0", others={"ffn_up_exps": "F16"})
    model = load(file, verify=False)
    assert difference(model, dense) < 2e-3
    assert not linears_and_experts(model)[1]


def test_a_tensor_that_the_class_does_not_have_is_named(tmp_path: Path) -> None:
    file, _, _ = written("hy_v4", tmp_path, tensors={"blk.1.new.weight": torch.zeros(64)})
    with pytest.raises(CorruptModel, match=r"unexpected keys: .*blk\.1\.new\.weight"):
        load(file, verify=False)


def test_embeddings_of_ngrams_in_several_layers_are_refused(tmp_path: Path) -> None:
    file, _, _ = written("qwen4_exp_text", tmp_path, metadata={"qwen4exp.ple.layers": [0, 2]})
    with pytest.raises(UnsupportedModel, match=r"several layers.*\[0, 2\]"):
        read_spec(file)


def test_a_projector_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    file, _, _ = written("minimax_m3_vl_text", tmp_path)
    with pytest.raises(UnsupportedModel, match="pictures"):
        read_spec(file, mmproj="mmproj.gguf")
    assert read_spec(file, mmproj="none").implementation == "transformers"
