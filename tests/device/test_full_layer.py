"""One layer of an 8B model in 16 bits, prefill and decode, against the same numbers in fp32 on the CPU."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import replace_tensors
from scripts.random_weights import RandomTensors, random_model, shape_spec
from tests.device.conftest import BLOCK_SIZES, DEVICE, ON_GPU, SIXTEEN_BITS
from tests.models.harness import CPU, ModelHarness

SMALLER = {} if ON_GPU else {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
                             "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest logit: some roundings to 11 or 8 bits one after the other."""


class Widened(RandomTensors):
    """The 16-bit numbers that a device draws, as fp32 on the CPU; what is computed from them lies there, too."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        super().__init__(CPU, torch.float32, seed)
        self._drawn = RandomTensors(device, dtype, seed)

    def take(self, names: Iterable[str], shape: tuple[int, ...], **options: Any) -> Tensor:
        return self._drawn.take(names, shape, **options).float().cpu()


def devices_of(model: DecoderModel) -> list[torch.device]:
    """Of every tensor that a model holds."""
    found: list[torch.device] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor.device)
        return tensor

    replace_tensors(model, look)
    return found


def in_fp32(spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> DecoderModel:
    with torch.inference_mode():
        source = Widened(DEVICE, dtype, seed=0)
        model = DecoderBuilder(spec, source, CPU, torch.float32).build(max_model_len)
    assert set(devices_of(model)) == {CPU}
    return model


@pytest.mark.parametrize("block_size", BLOCK_SIZES if ON_GPU else BLOCK_SIZES[-1:])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-4b"])
def test_a_layer_is_its_fp32_twin(shape: str, dtype: torch.dtype, block_size: int) -> None:
    spec = shape_spec(shape, num_hidden_layers=1, vocab_size=1024, tie_word_embeddings=False, **SMALLER)
    tokens = random.Random(0).choices(range(1024), k=67)
    twin = ModelHarness(in_fp32(spec, dtype, 256))
    ours = ModelHarness(random_model(spec, DEVICE, dtype, max_model_len=256), kv_dtype=dtype, block_size=block_size)
    for chunk in (None, 16, 1):
        _, wanted = twin.prefill(tokens, chunk)
        _, got = ours.prefill(tokens, chunk)
        error = float((got.cpu() - wanted).abs().max() / wanted.abs().max())
        assert error < TOLERANCE[dtype], f"chunks of {chunk}: {error:.1e}"
