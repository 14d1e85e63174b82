"""Hybrid decoders in GGUF: the logits of the checkpoint that was converted, in fp32, and of what blocks stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from tests.gguf_hybrids import HYBRIDS, write_hybrid
from tests.models.harness import CPU, Harness, assert_close, prompt, reference_logits
from tests.tiny import load_reference, make_tiny_model

"""Families of tests/tiny.py with sizes of whole blocks; what a file cannot say is set to what is assumed then."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, sizes = HYBRIDS[name]
            made[name] = make_tiny_model(tmp_path_factory.mktemp("source") / family, family, **sizes)
        return made[name]

    return make


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_are_those_of_the_checkpoint(name: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    folder, tokens = source(name), prompt(37)
    file = write_hybrid(folder, tmp_path / "model.gguf")
    _, logits = Harness(file).prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(load_reference(folder), tokens))


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_are_those_of_the_blocks(name: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    folder, tokens = source(name), prompt(20)
    file = write_hybrid(folder, tmp_path / "quantised.gguf", "Q8_0")
    meant = write_hybrid(folder, tmp_path / "meant.gguf", "Q8_0", dequantised=True)
    harness = Harness(file, cpu_weights="exact")
    assert_close(harness.prefill(tokens)[1], Harness(meant).prefill(tokens)[1])
    predicted = resident_bytes(file, harness.spec, CPU, torch.float32, cpu_weights="exact")
    assert held_bytes(harness.model) == predicted


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_a_file_that_states_no_heads_at_all_is_read_by_its_tensors(
    name: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, tokens = source(name), prompt(20)
    layers = read_spec(folder).num_layers
    file = write_hybrid(folder, tmp_path / "model.gguf", metadata={"attention.head_count_kv": [0] * layers})
    _, logits = Harness(file).prefill(tokens)
    assert_close(logits, reference_logits(load_reference(folder), tokens))


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("qwen35, 2 value heads for a key head", r"blk\.0\.ssm_a$"),
        ("qwen35, 2 value heads for a key head", r"blk\.2\.ssm_dt\.bias"),
        ("granitehybrid", r"blk\.0\.ssm_conv1d\.weight"),
        ("lfm2", r"blk\.0\.shortconv\.conv\.weight"),
    ],
)
def test_a_missing_state_tensor_is_named(
    name: str, left_out: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_hybrid(source(name), tmp_path / "model.gguf", left_out=left_out)
    with pytest.raises(CorruptModel, match=f"lacks {left_out}".rstrip("$")):
        load_model(file, read_spec(file), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "metadata", "error"),
    [
        ("granitehybrid", {"attention.head_count_kv": [0, 2, 1]}, UnsupportedModel),
        ("granitehybrid", {"attention.head_count_kv": [0, 0, 0]}, CorruptModel),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}, CorruptModel),
        ("granitehybrid", {"ssm.inner_size": 129}, CorruptModel),
        ("qwen35, 2 value heads for a key head", {"ssm.group_count": 3}, CorruptModel),
        ("qwen35, 2 value heads for a key head", {"attention.recurrent_layers": [True, False]}, CorruptModel),
        ("lfm2", {"shortconv.l_cache": 0}, CorruptModel),
    ],
)
def test_metadata_that_does_not_fit(
    name: str, metadata: dict[str, Any], error: type[LocalLLMError], source: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(error):
        read_spec(write_hybrid(source(name), tmp_path / "model.gguf", metadata=metadata))
