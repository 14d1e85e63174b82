"""Models whose matrices stay 16 bits wide on a CPU: with adapters, over ranks, from a GGUF file.

Row by row, products differ from those of the widened weights by the order of their sums alone.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.kernels.cpu import half
from localllm.kernels.cpu.half import CpuHalfWeight
from localllm.kernels.cpu.native.library import native
from localllm.kernels.launch import INTERPRETED
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.layers.lora import LoraLimits, LoraLinear
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.lora import open_lora, put_lora
from localllm.models.weights.parameters import held_bytes
from tests.adapters import make_tiny_adapter
from tests.gguf_files import write_gguf
from tests.models.harness import CPU, ModelHarness
from tests.models.sharded import ShardedModel, even_shards
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(native() is None or INTERPRETED, reason="there is no native library here")

TOKENS = [5, 7, 11, 13, 17] * 3


@pytest.fixture
def halves(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], Path]:
    """Writes the tiny model in 16 bits, of which no matrix is too small to stay so."""
    monkeypatch.setattr(half, "HALF_MIN_ELEMENTS", 0)

    def write(dtype: torch.dtype) -> Path:
        folder = tmp_path / str(dtype)
        shutil.copytree(tiny_llama_path, folder)
        file = folder / "model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
        return folder

    return write


def test_16_bit_weights_with_an_adapter(halves: Callable[[torch.dtype], Path], tmp_path: Path) -> None:
    """The adapter is added to the product of the 16-bit matrix, as to that of the widened one."""
    path, logits = halves(torch.float16), {}
    adapter = make_tiny_adapter(tmp_path / "adapter", path, seed=3)
    for keeps in (True, False):
        model = load_model(path, read_spec(path), CPU, torch.float32, lora=LoraLimits(1, 8), half_weights=keeps)
        assert isinstance(model, DecoderModel)
        assert model.lora is not None
        layer = model.layers[0].attention.qkv
        assert (type(layer), isinstance(layer.weight, CpuHalfWeight)) == (LoraLinear, keeps)
        put_lora(open_lora(adapter), model.lora, 0)
        logits[keeps] = [ModelHarness(model).prefill(TOKENS, 1, adapter=slot)[1] for slot in (-1, 0)]
    for got, wanted in zip(logits[True], logits[False], strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5
    assert float((logits[True][0] - logits[True][1]).norm()) > 0.01 * float(logits[True][0].norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_over_two_ranks(
    halves: Callable[[torch.dtype], Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's rows and columns stay 16 bits wide, and what is counted for a rank is what it holds."""
    monkeypatch.setattr(native(), "multiplies_pairs", False)  # no activations are rounded
    path = halves(dtype)
    spec, shards = read_spec(path), even_shards(path, 2)
    assert shards is not None
    model = ShardedModel(path, shards, half_weights=True)
    whole = load_model(path, spec, CPU, torch.float32, half_weights=False)
    one_by_one = (1,) * len(TOKENS)
    wanted = ModelHarness(whole).prefill(TOKENS, 1)[1]
    assert float((model.logits(TOKENS, one_by_one) - wanted).norm() / wanted.norm()) < 1e-5
    for shard, own in zip(shards, model.stages[0], strict=True):
        layer: Any = own.layers[0]
        assert isinstance(layer.attention.part.qkv.weight, CpuHalfWeight)
        count = resident_bytes(path, spec, CPU, torch.float32, shard=shard, half_weights=True)
        assert held_bytes(own) == count


def test_a_gguf_file_in_f16_stays_16_bits_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "HALF_MIN_ELEMENTS", 0)
    file, logits, held = tmp_path / "model.gguf", {}, {}
    write_gguf(make_tiny_model(tmp_path / "source", "llama"), file, "F16")
    spec = read_spec(file)
    for keeps in (True, False):
        model = load_model(file, spec, CPU, torch.float32, half_weights=keeps)
        weight = model.layers[0].attention.qkv.weight
        assert isinstance(weight, CpuHalfWeight) == keeps
        assert not keeps or weight.packed.dtype == torch.float16
        held[keeps] = held_bytes(model)
        assert held[keeps] == resident_bytes(file, spec, CPU, torch.float32, half_weights=keeps)
        logits[keeps] = ModelHarness(model).prefill(TOKENS, 1)[1]
    assert held[True] < 0.8 * held[False]
    assert float((logits[True] - logits[False]).norm() / logits[False].norm()) < 1e-5
