"""Requests of many kinds, and an engine of random weights for them; what each got, in a form that compares by bits."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.spec.model_spec import ModelSpec
from scripts.gpu_check_lib.engine import Options, RandomEngine
from tests.device.conftest import DEVICE

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "min_tokens": 10, "stop_token_ids": [7, 9]},
]
Answer = tuple[list[int], list[tuple[float, ...]], str | None]


def options(dtype: torch.dtype = torch.float32, **changes: Any) -> Options:
    common = Options(
        DEVICE, dtype, max_num_seqs=4, max_model_len=160, num_kv_tokens=1600, max_num_batched_tokens=64, block_size=16
    )
    return replace(common, **changes)


def many_requests(vocab_size: int, count: int = 10, end: Sequence[int] = ()) -> list[Request]:
    """Prompts of 1 to 70 tokens, some with a beginning in common; every kind of sampling. end: of each prompt."""
    dice = random.Random(8)
    shared = [dice.randrange(vocab_size) for _ in range(40)]
    requests = []
    for i in range(count):
        prompt = shared[: dice.choice([0, 17, 40])] + [dice.randrange(vocab_size) for _ in range(dice.randint(1, 30))]
        prompt += end
        length = dice.randint(10, 30)
        params = SamplingParams(max_tokens=length, **ASKED[i % len(ASKED)])
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=length, eos_token_ids=(2,)))
    return requests


def serve(
    spec: ModelSpec, model: DecoderModel, asked: Options, requests: Sequence[Request], drafter: Drafter | None = None
) -> tuple[dict[str, Answer], RandomEngine]:
    engine = RandomEngine(spec, asked, model=model, drafter=drafter)
    return {name: answer(outputs) for name, outputs in engine.generate(requests).items()}, engine


def answer(outputs: Sequence[EngineOutput]) -> Answer:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry.logprobs for output in outputs for entry in output.logprobs]
    return tokens, logprobs, outputs[-1].finish_reason
