"""Tiny models of every family on the device have the logits of the CPU's fp32 (tests/models: those of transformers)."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.device.conftest import BLOCK_SIZES, DEVICE, ON_GPU, SIXTEEN_BITS
from tests.models.harness import Harness
from tests.tiny import FAMILIES, VOCAB_SIZE

TOLERANCE = {torch.float32: 4e-3, torch.float16: 2e-2, torch.bfloat16: 1.2e-1}
"""Of the largest logit. fp32 on a GPU multiplies in TF32; in 16 bits the weights themselves are rounded."""
KINDS = [(torch.float32, BLOCK_SIZES[0]), *((dtype, BLOCK_SIZES[-1]) for dtype in SIXTEEN_BITS)]
HERE = list(FAMILIES) if ON_GPU else ["llama", "gemma2"]


@pytest.mark.parametrize(("dtype", "block_size"), KINDS, ids=str)
@pytest.mark.parametrize("family", HERE)
def test_logits_are_those_of_the_cpu(
    family: str, dtype: torch.dtype, block_size: int, tiny_model_path: Callable[[str], Path]
) -> None:
    path, tokens = tiny_model_path(family), random.Random(0).choices(range(3, VOCAB_SIZE), k=75)
    _, wanted = Harness(path).prefill(tokens)
    for chunk in (None, 11, 1):
        _, logits = Harness(path, dtype=dtype, device=DEVICE, block_size=block_size).prefill(tokens, chunk)
        error = float((logits.cpu() - wanted).abs().max() / wanted.abs().max())
        assert error < TOLERANCE[dtype], f"chunks of {chunk}: {error:.1e}"
