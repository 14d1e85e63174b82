"""Drafters with weights in the real runner on a CPU: answers are those of a run without, and a drafter that is the
model itself is always right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from localllm.engine.outputs import EngineOutput
from localllm.kernels.cpu.native.library import native
from localllm.models import lone_step
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import host_steps
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.host_drafts import NO_DRAFTS, HostDrafts
from localllm.runner.kv_cache import KVCache
from tests.models.operations import DefinedLibrary
from tests.runner.test_drafts import make_requests, tokens_of
from tests.runner.test_with_scheduler import BLOCK, serve

CPU = torch.device("cpu")
NUM_DRAFTS = 4


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Native steps of model and drafter, as they are defined where this machine has no library; or none."""

    def none(model: Any, layers: Any) -> Any:
        raise lone_step.NoLoneStep("without a library")

    if request.param == "torch":
        monkeypatch.setattr(host_steps, "open_lone_step", none)
        monkeypatch.setattr(draft_model, "open_lone_step", none)
    elif native() is None:
        monkeypatch.setattr(lone_step, "native", DefinedLibrary)
    return str(request.param)


@pytest.fixture
def without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDrafts, "_find", lambda self, slot, most: NO_DRAFTS)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in make_requests()}


def opened(drafter: Drafter, caches: list[KVCache] | None = None) -> Callable[[int], OpenDrafter]:
    """Return what makes the drafter's KV cache, filled with NaN, for a number of blocks."""

    def make(num_blocks: int) -> OpenDrafter:
        cache = KVCache(drafter.spec, (num_blocks,), BLOCK, CPU, torch.float32)
        for layer in cache.layers:
            assert layer is not None
            for tensor in layer.tensors():
                tensor.fill_(torch.nan)
        if caches is not None:
            caches.append(cache)
        return OpenDrafter(drafter, cache, NUM_DRAFTS)

    return make


def assert_same(told: dict[str, list[EngineOutput]], alone: dict[str, list[EngineOutput]]) -> None:
    for name, wanted in alone.items():
        assert tokens_of(told[name]) == tokens_of(wanted), name
        assert told[name][-1].finish_reason == wanted[-1].finish_reason


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(
    ("way", "num_blocks", "depth"), [("native", 200, 1), ("native", 18, 2), ("torch", 200, 2), ("torch", 18, 1)],
    indirect=["way"],
)  # fmt: skip
def test_a_drafter_that_is_the_model_is_always_right(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int, depth: int
) -> None:
    """S14: greedy and sampled, with chunks, prefix hits and preemptions (17 usable blocks)."""
    drafter = DraftModel(model, spec.vocab_size)
    told, scheduler = serve(
        model, spec, make_requests(), num_blocks=num_blocks, depth=depth, speculates=True, drafter=opened(drafter)
    )
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_draft_tokens > 50
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
