"""Deterministic mode: a request's tokens and log-probabilities have the same bits beside 0 to 127 neighbours."""

import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.kernels.launch import LaunchOptions
from localllm.tuning.workload import PromptSource
from scripts.gpu_check_lib.engine import RandomEngine
from scripts.random_weights import random_model, shape_spec
from tests.device.conftest import DEVICE, ON_GPU, SIXTEEN_BITS
from tests.device.serving import Answer, answer, options

BATCHES = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 96, 127, 128] if ON_GPU else [1, 2, 5, 12]
LENGTH = 24
SHAPE, CHANGES = ("llama-3.1-8b", {"num_hidden_layers": 2, "vocab_size": 8192}) if ON_GPU else ("tiny", {})


@pytest.mark.parametrize("dtype", SIXTEEN_BITS if ON_GPU else [torch.float32], ids=str)
def test_neighbours_change_nothing(dtype: torch.dtype) -> None:
    spec = shape_spec(SHAPE, **CHANGES)
    model = random_model(spec, DEVICE, dtype, max_model_len=160)
    asked = options(dtype, max_num_seqs=BATCHES[-1], num_kv_tokens=BATCHES[-1] * 130, max_num_batched_tokens=512,
                    block_size=64, launch=LaunchOptions(deterministic=True))  # fmt: skip
    params = SamplingParams(temperature=0.8, seed=1, logprobs=1, max_tokens=LENGTH, ignore_eos=True)
    engine = RandomEngine(spec, asked, model=model)
    seen: dict[int, Answer] = {}
    for batch in BATCHES:
        prompts = PromptSource(0, spec.vocab_size)  # the first prompt is always the same, its neighbours are not
        first = Request("first", prompts.prompt(37), params, max_output_tokens=LENGTH)
        beside = PromptSource(batch, spec.vocab_size)
        others = [
            Request(f"n{i}", beside.prompt(1 + (7 * i) % 90), params, max_output_tokens=LENGTH)
            for i in range(batch - 1)
        ]
        answers = engine.generate([*others[: batch // 2], first, *others[batch // 2 :]])
        seen[batch] = answer(answers["first"])
    engine.close()
    tokens = {batch: found[0] for batch, found in seen.items()}
    assert all(found == tokens[1] for found in tokens.values()), tokens
    if ON_GPU:  # a CPU's library may sum in another order for other batches
        assert all(found == seen[1] for found in seen.values())
