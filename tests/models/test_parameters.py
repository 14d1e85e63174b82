"""The walk over a model's tensors: it finds each once, and can change all of them."""

from pathlib import Path

import torch
from torch import Tensor

from localllm.kernels.int4_linear import quantize_int4
from localllm.kernels.linear import StackedWeight
from localllm.models.layers.linear import Linear
from localllm.models.weights.parameters import held_bytes, replace_tensors
from tests.models.harness import Harness


def test_finds_what_a_checkpoint_holds(tiny_llama_path: Path) -> None:
    """Every stored number in fp32, q's and k's norms apart, and the rotary table."""
    harness = Harness(tiny_llama_path)
    with_table = sum(p.numel() for p in _reference(tiny_llama_path).parameters()) * 4
    table = harness.spec.max_position * harness.spec.rope.rotary_dim * 4
    assert held_bytes(harness.model) == with_table + table


def test_a_model_that_was_moved_answers_alike(tiny_llama_path: Path) -> None:
    harness = Harness(tiny_llama_path)
    _, before = harness.prefill([5, 6, 7, 8, 9])
    seen: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    replace_tensors(harness.model, copy)
    assert len({id(tensor) for tensor in seen}) == len(seen) >= 15
    with torch.inference_mode():
        for tensor in seen:
            tensor.zero_()  # nothing of the old model is read any more
    _, after = harness.prefill([5, 6, 7, 8, 9])
    assert torch.equal(before, after)


def test_shared_tensors_stay_shared_and_frozen_values_change() -> None:
    weight = quantize_int4(torch.randn(64, 128))
    shared = torch.ones(64)
    layers = [Linear(StackedWeight([weight]), shared), Linear(torch.randn(64, 8), shared)]
    model = StackedLayers(layers)
    before = held_bytes(model)
    replace_tensors(model, lambda tensor: tensor + 0)
    assert layers[0].bias is layers[1].bias
    assert layers[0].bias is not shared
    assert held_bytes(model) == before == weight.nbytes + shared.nbytes + 64 * 8 * 4


class StackedLayers:
    __module__ = "localllm.made_by_a_test"

    def __init__(self, layers: list[Linear]) -> None:
        self.layers = layers


def _reference(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model
