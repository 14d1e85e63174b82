"""Drafts change no token: with them a request gets what it gets without, through graphs and without."""

from dataclasses import replace

import pytest
import torch

from localllm.kernels.launch import LaunchOptions
from scripts.gpu_check_lib.drafts import FIRST, counting_model
from scripts.random_weights import shape_spec
from tests.device.conftest import ON_GPU, SIXTEEN_BITS, slow_on_cpu
from tests.device.serving import many_requests, options, serve

SPEC = shape_spec("tiny")
pytestmark = slow_on_cpu  # tests/runner/test_device_drafts.py


@pytest.mark.parametrize("graphs", ["replayed", "none"] if ON_GPU else ["padded"])
@pytest.mark.parametrize("dtype", [torch.float32, *(SIXTEEN_BITS if ON_GPU else [])], ids=str)
def test_drafts_change_no_token(dtype: torch.dtype, graphs: str) -> None:
    """In 16 bits sums in another order may change a token, so there deterministic mode has to keep every bit."""
    launch = LaunchOptions(deterministic=dtype != torch.float32)
    asked = options(dtype, graphs=graphs, block_size=64 if ON_GPU else 16, launch=launch)
    model = counting_model(SPEC, asked, period=6)
    answers = {}
    for most in (0, 15):
        requests = many_requests(SPEC.vocab_size, end=[FIRST])
        answers[most], engine = serve(SPEC, model, replace(asked, most_drafts=most), requests)
        assert (engine.speculation.stats().num_accepted_tokens > 0) == (most > 0)
        engine.close()
    assert {name: found[0] for name, found in answers[15].items()} == {
        name: found[0] for name, found in answers[0].items()
    }
