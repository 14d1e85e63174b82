"""Drafters with weights in staged steps, as on a GPU: answers are those of a run without, and what a drafter keeps of a
block is what it would compute for the block's text alone. On a CPU through the twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.kernels.sampling.tables import MAX_WORDS
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.kv_cache import KVCache
from tests.runner.harness import CPU, assert_same, knowing_on_device, opened, serve, tokens_of
from tests.runner.harness import draft_requests
from tests.tiny import make_tiny_model

def make_requests() -> list[Request]:
    """Requests whose bad words fit the tables on the device, but for the last one's: beside it no step has drafts."""
    requests = draft_requests()
    for request in requests[:-1]:
        request.bad_words_token_ids = request.bad_words_token_ids[:40]
    requests[-1].bad_words_token_ids = tuple((token,) for token in range(0, 500, 7))
    assert len(requests[-1].bad_words_token_ids) > MAX_WORDS
    return requests


WAYS_OF_A_GPU = [("staged", 200, 1), ("staged", 18, 2), ("replayed", 18, 2)]
"""How steps run, the blocks (17 usable ones: requests are preempted), and how many steps are in flight."""


@pytest.fixture(autouse=True)
def _without_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(model: Any, layers: Any) -> Any:
        raise NotSupportedNatively("a staged step has padding")

    monkeypatch.setattr(draft_model, "open_native_program", none)


@pytest.fixture
def without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: LookupOnDevice, slots: Tensor) -> Tensor:
        return torch.zeros(len(slots), 17, dtype=torch.int32)

    monkeypatch.setattr(LookupOnDevice, "launch", none)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in make_requests()}


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(("way", "num_blocks", "depth"), WAYS_OF_A_GPU)
def test_a_drafter_that_is_the_model_is_always_right(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int, depth: int
) -> None:
    """S14: greedy and sampled, with chunks, prefix hits and preemptions."""
    told, scheduler = serve(
        model, spec, make_requests(), num_blocks=num_blocks, depth=depth, way=way, speculates=True,
        drafter=opened(DraftModel(model, spec.vocab_size)),
    )  # fmt: skip
    assert_same(told, alone)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_draft_tokens > 50
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
