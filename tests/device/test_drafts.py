"""Drafts change no token: with them a request gets what it gets without, through graphs and without."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.kernels.launch import LaunchOptions
from localllm.kernels.propose_lookup import MOST_DRAFTS
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.runner.device_drafts import LookupOnDevice
from scripts.gpu_check_lib.drafts import FIRST, counting_model, random_drafters
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


def _not_native(*_: object) -> None:
    raise NotSupportedNatively("a staged step has padding")


@pytest.mark.parametrize("graphs", ["replayed", "none"] if ON_GPU else ["padded"])
@pytest.mark.parametrize("dtype", [torch.float32, *(SIXTEEN_BITS if ON_GPU else [])], ids=str)
def test_a_drafter_with_weights_changes_no_token(
    dtype: torch.dtype, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as its own drafter, which is right, and a smaller model and EAGLE heads, which are mostly wrong."""
    monkeypatch.setattr(
        LookupOnDevice, "launch",
        lambda self, slots: torch.zeros(len(slots), 1 + MOST_DRAFTS, dtype=torch.int32, device=slots.device),
    )  # fmt: skip
    monkeypatch.setattr(draft_model, "open_native_program", _not_native)
    launch = LaunchOptions(deterministic=dtype != torch.float32)
    asked = options(dtype, graphs=graphs, block_size=64 if ON_GPU else 16, launch=launch)
    model = counting_model(SPEC, asked, period=6)
    few = slice(None) if ON_GPU else slice(4)
    plain, engine = serve(SPEC, model, asked, many_requests(SPEC.vocab_size, end=[FIRST])[few])
    engine.close()
    drafters = random_drafters(tmp_path, model, "tiny", asked.max_model_len)
    for name, drafter in [("itself", DraftModel(model, SPEC.vocab_size)), *(drafters if ON_GPU else ())]:
        requests = many_requests(SPEC.vocab_size, end=[FIRST])[few]
        drafted, engine = serve(SPEC, model, replace(asked, most_drafts=4), requests, drafter)
        assert {each: found[0] for each, found in drafted.items()} == {each: found[0] for each, found in plain.items()}
        stats = engine.speculation.stats()
        assert stats.num_draft_tokens > 0, name
        assert name != "itself" or stats.num_accepted_tokens > stats.num_draft_tokens // 2
        engine.close()
