"""Output depends on the request alone: not on chunks, neighbours, prefix cache, preemption, or steps in flight.

In fp32 the tokens are compared. In 16 bits sums in another order may change a token, so there deterministic mode has
to keep every bit.
"""

from typing import Any

import pytest
import torch

from localllm.kernels.launch import DEFAULTS, LaunchOptions
from scripts.gpu_check_lib.engine import RandomEngine
from scripts.random_weights import random_model, shape_spec
from tests.device.conftest import DEVICE, SIXTEEN_BITS, needs_gpu
from tests.device.serving import Answer, answer, many_requests, options, serve

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 1": {"depth": 1},
    "chunks of 20": {"max_num_batched_tokens": 20},
    "prefix cache": {"prefix_caching": True},
    "blocks as on a GPU": {"block_size": 64, "prefix_caching": True, "max_num_batched_tokens": 20},
    "preemption": {"num_kv_tokens": 96},
    "all at once": {"num_kv_tokens": 96, "max_num_batched_tokens": 20, "prefix_caching": True},
    "no graphs": {"graphs": "none"},
}
SPEC = shape_spec("tiny")


def model_of(dtype: torch.dtype) -> Any:
    return random_model(SPEC, DEVICE, dtype, max_model_len=160)


def alone(model: Any, dtype: torch.dtype, launch: LaunchOptions = DEFAULTS) -> dict[str, Answer]:
    engine = RandomEngine(SPEC, options(dtype, depth=1, graphs="none", launch=launch), model=model)
    answers: dict[str, Answer] = {}
    for request in many_requests(SPEC.vocab_size):
        answers |= {name: answer(outputs) for name, outputs in engine.generate([request]).items()}
    return answers


def test_tokens_in_fp32() -> None:
    model = model_of(torch.float32)
    wanted = {name: (tokens, reason) for name, (tokens, _, reason) in alone(model, torch.float32).items()}
    for name, changes in SCHEDULES.items():
        answers, engine = serve(SPEC, model, options(**changes), many_requests(SPEC.vocab_size))
        assert {name: (tokens, reason) for name, (tokens, _, reason) in answers.items()} == wanted, name
        assert (engine.scheduler.recorder.num_preemptions > 0) == ("num_kv_tokens" in changes), name


@needs_gpu
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_every_bit_in_deterministic_mode(dtype: torch.dtype) -> None:
    model, launch = model_of(dtype), LaunchOptions(deterministic=True)
    wanted = alone(model, dtype, launch)
    for name, changes in SCHEDULES.items():
        answers, _ = serve(SPEC, model, options(dtype, launch=launch, **changes), many_requests(SPEC.vocab_size))
        assert answers == wanted, name
