"""Whole models whose low-bit weights are laid out for the CPU: their logits beside those of the same model with its
weights as stored, and their layouts while another model's bytes are counted."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.kernels.cpu import half, int8, pack
from localllm.kernels.cpu.half import CpuHalfWeight
from localllm.kernels.cpu.int8 import CpuInt8Weight
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.q4 import CpuQ4Weight
from localllm.kernels.launch import INTERPRETED
from localllm.models.fit.checkpoint import count_resident
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from scripts.random_weights import WeightFormat, random_model, shape_spec
from tests.marks import needs_library
from tests.models.harness import CPU, ModelHarness

pytestmark = pytest.mark.skipif(
    INTERPRETED or not int8.has_int8(), reason="this torch on this processor has no such product"
)
FOUR = CpuQ4Weight if native() else CpuInt8Weight
KINDS = {"fast": {"int4": FOUR, "int8": CpuInt8Weight, "fp8": CpuInt8Weight}, "small": {"int4": FOUR}}


@pytest.mark.parametrize(("mode", "weights"), [(mode, weights) for mode, kinds in KINDS.items() for weights in kinds])
def test_logits_stay_near_those_of_the_weights_as_stored(
    mode: str, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight products in a row, each off by 1.1 % at most where its values are normally distributed (0.8 % weights and
    0.8 % activations): 3.1 % together. One row after another with two bytes, and all of them as one prompt."""
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    logits = {}
    for way in ("exact", mode):
        model = random_model(shape_spec("tiny"), CPU, torch.float32, max_model_len=64, weights=weights, cpu_weights=way)
        kind = type(model.layers[0].attention.qkv.weight)
        assert (kind is KINDS[mode][weights]) == (way != "exact")
        assert held_bytes(model) > 0
        prompt = [(7 * place) % 512 for place in range(24)]
        logits[way] = [ModelHarness(model).prefill(prompt, chunk)[1] for chunk in (None, 1)]
    for got, wanted in zip(logits[mode], logits["exact"], strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize(("loads", "counts"), [("fast", "exact"), ("exact", "fast"), ("small", "exact")])
def test_counting_bytes_on_another_thread_leaves_a_load_alone(
    loads: str, counts: str, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each tensor the load waits until another thread has counted the same checkpoint under another setting."""
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    spec = read_spec(tiny_llama_path)
    counted: dict[str, set[int]] = {loads: set(), counts: set()}

    def count(cpu_weights: str) -> None:
        resident = count_resident(tiny_llama_path, spec, cpu_weights)
        counted[cpu_weights].add(resident("cpu", "float32", spec.max_position, "int4"))

    def progress(done: int, total: int) -> None:
        thread = threading.Thread(target=count, args=[counts])
        thread.start()
        thread.join()

    model = load_model(tiny_llama_path, spec, CPU, torch.float32, progress, quantization="int4", cpu_weights=loads)
    count(loads)
    assert counted[loads] == {held_bytes(model)}
    assert len(counted[counts]) == 1
    assert counted[counts] != counted[loads]


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_checkpoint_stays_16_bits_wide(
    dtype: torch.dtype, tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding and a tied head are one copy, and the count from headers is the load's."""
    monkeypatch.setattr(half, "HALF_MIN_ELEMENTS", 0)
    shutil.copytree(tiny_llama_path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    spec = read_spec(tmp_path)
    logits, held = {}, {}
    for keeps in (True, False):
        model = load_model(tmp_path, spec, CPU, torch.float32, half_weights=keeps, cpu_weights="exact")
        count = count_resident(tmp_path, spec, half_weights=keeps)
        held[keeps] = held_bytes(model)
        assert count("cpu", "float32", model.max_model_len, None) == held[keeps]
        assert isinstance(model.layers[0].attention.qkv.weight, CpuHalfWeight) == keeps
        if spec.tie_word_embeddings and keeps:
            assert model.embedding.weight is model.lm_head.weight
        logits[keeps] = [ModelHarness(model).prefill([5, 7, 11, 13, 17] * 5, chunk)[1] for chunk in (None, 1)]
    assert held[True] < 0.8 * held[False]
    for got, wanted, allowed in zip(logits[True], logits[False], (0.03, 1e-5), strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < allowed
