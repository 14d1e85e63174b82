"""A step that is replayed as one graph gives the bits of the same step launched kernel by kernel."""

import pytest
import torch

from scripts.random_weights import random_model, shape_spec
from tests.device.conftest import BLOCK_SIZES, DEVICE, ON_GPU, SIXTEEN_BITS
from tests.device.serving import many_requests, options, serve

SHAPE = {"num_hidden_layers": 2, "vocab_size": 2048}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS if ON_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen2.5-0.5b"] if ON_GPU else ["tiny"])
def test_replayed_equals_launched(shape: str, dtype: torch.dtype, block_size: int) -> None:
    """Padded alike: other paddings are other shapes, for which a library may choose other kernels."""
    spec = shape_spec(shape, **SHAPE)
    model = random_model(spec, DEVICE, dtype, max_model_len=160)
    answers = {}
    for graphs in ("replayed", "padded"):
        asked = options(dtype, graphs=graphs, max_num_batched_tokens=256, block_size=block_size)
        answers[graphs], engine = serve(spec, model, asked, many_requests(spec.vocab_size))
        assert engine.runner.stats().replayed_steps > 0 or not (ON_GPU or graphs == "padded")
        engine.close()
    if ON_GPU:
        assert answers["replayed"] == answers["padded"]
    else:  # nothing is recorded, so nothing is padded: sums in another order
        assert [found[0] for found in answers["replayed"].values()] == [
            found[0] for found in answers["padded"].values()
        ]
