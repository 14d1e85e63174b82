"""Windowed layers, recurrent states, experts and latents: output depends on the request alone, as in test_schedules.py.

On a CPU tests/runner runs these models under more schedules.
"""

from typing import Any

import pytest
import torch

from localllm.models.read_spec import spec_of_config
from scripts.random_weights import random_model
from tests.device.conftest import DEVICE, ON_GPU, slow_on_cpu
from tests.device.serving import many_requests, options, serve
from tests.runner.served import CONVOLUTION, DELTA, DENSE, LATENT, MAMBA, MIXTURE, SINKS, WINDOWS

pytestmark = slow_on_cpu
KINDS = {
    "delta": DELTA, "mixture": MIXTURE, "windows": WINDOWS, "sinks": SINKS, "mamba": MAMBA, "convolution": CONVOLUTION,
    "latent": LATENT,
}  # fmt: skip
HARD: dict[str, Any] = {"num_kv_tokens": 96, "max_num_batched_tokens": 20, "prefix_caching": True}
"""Preemptions, chunks and prefix hits, two steps in flight."""


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["delta", "mixture"])
def test_tokens_do_not_depend_on_the_schedule(kind: str) -> None:
    small = {"sliding_window": 20} if "sliding_window" in KINDS[kind] else {}
    spec = spec_of_config({**DENSE, **KINDS[kind], **small, "vocab_size": 512})
    model = random_model(spec, DEVICE, torch.float32, max_model_len=160)
    answers = {}
    for name, changes in {"easy": {"depth": 1, "graphs": "none"}, "hard": HARD}.items():
        answers[name], engine = serve(spec, model, options(**changes), many_requests(spec.vocab_size))
        assert (engine.scheduler.recorder.num_preemptions > 0) == (name == "hard")
        engine.close()
    assert {name: found[0] for name, found in answers["hard"].items()} == {
        name: found[0] for name, found in answers["easy"].items()
    }
