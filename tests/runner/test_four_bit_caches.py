"""KV caches of 4 bits beside drafts and shards: the answers are those of a run without."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.engine.outputs import EngineOutput
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.kv_cache import KVCache
from tests.models.sharded import ShardedModel, even_shards
from tests.runner.harness import BLOCK, CPU, NUM_DRAFTS, assert_same, draft_requests, knowing, serve, tokens_of
from tests.runner.harness import without_lookup as without_lookup
from tests.runner.shards import ShardRunner
from tests.tiny import make_tiny_model

SHORT = 4  # requests of a test


@pytest.fixture(scope="module", params=["k8v4", "int4"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("heads of 32") / "model", "llama", head_dim=32)


@pytest.fixture(scope="module")
def spec(path: Path) -> ModelSpec:
    return read_spec(path)


@pytest.fixture(scope="module")
def model(path: Path, spec: ModelSpec) -> Any:
    return load_model(path, spec, CPU, torch.float32)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec, kv_dtype: str) -> dict[str, list[EngineOutput]]:
    """What each request gets alone, without drafts and on one device."""
    return {r.request_id: serve(model, spec, [r], kv_dtype=kv_dtype)[0][r.request_id] for r in draft_requests(SHORT)}


def test_a_narrow_cache_is_not_the_models_own(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]]
) -> None:
    """Or the tests below would compare a cache of 32 bits with itself."""
    wide, _ = serve(model, spec, draft_requests(SHORT))
    assert any(tokens_of(wide[name]) != tokens_of(outputs) for name, outputs in alone.items())


@pytest.mark.parametrize(("num_blocks", "depth"), [(200, 1), (18, 2)])
def test_drafts_by_lookup(
    model: Any, spec: ModelSpec, kv_dtype: str, alone: dict[str, list[EngineOutput]], num_blocks: int, depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Right ones and wrong ones, in prompts of several chunks, with preemptions."""
    texts = [[*r.token_ids, *tokens_of(alone[r.request_id])] for r in draft_requests(SHORT)]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, 0.2))
    told, scheduler = serve(
        model, spec, draft_requests(SHORT), num_blocks=num_blocks, depth=depth, speculates=True, kv_dtype=kv_dtype
    )
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_accepted_tokens > 10
    assert_same(told, alone)


@pytest.mark.usefixtures("without_lookup")
def test_a_drafter_with_such_a_cache_of_its_own(
    model: Any, spec: ModelSpec, kv_dtype: str, alone: dict[str, list[EngineOutput]]
) -> None:
    """It is the model itself, so a draft is refused only where its cache differs from the model's."""

    def opened(num_blocks: int) -> OpenDrafter:
        drafter = DraftModel(model, spec.vocab_size)
        return OpenDrafter(drafter, KVCache(drafter.spec, (num_blocks,), BLOCK, CPU, kv_dtype), NUM_DRAFTS)

    told, scheduler = serve(
        model, spec, draft_requests(SHORT), depth=2, speculates=True, kv_dtype=kv_dtype, drafter=opened
    )
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_draft_tokens > 30
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_shards(path: Path, spec: ModelSpec, kv_dtype: str, alone: dict[str, list[EngineOutput]]) -> None:
    """Each holds whole KV heads, and a head has scales of its own."""
    shards = even_shards(path, 2)
    assert shards is not None
    model = ShardedModel(path, shards)
    runner = partial(ShardRunner, model.stages[0], model.threads[0], kv_dtype=kv_dtype)
    told, _ = serve(None, spec, draft_requests(SHORT), make_runner=runner)
    assert_same(told, alone)
