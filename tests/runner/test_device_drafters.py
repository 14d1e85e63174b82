"""Drafters with weights in staged steps, as on a GPU: answers are those of a run without, and what a drafter keeps of a
block is what it would compute for the block's text alone. On a CPU through the twins."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import LookupOnDevice, warn_once
from localllm.runner.device_steps import DeviceSteps
from localllm.runner.graphs import Replay
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.runner.harness import BLOCK, CPU, assert_same, draft_requests, knowing_on_device, opened, serve, tokens_of
from tests.runner.harness import without_lookup as without_lookup
from tests.tiny import make_tiny_model


def make_requests() -> list[Request]:
    return draft_requests(8, most_words=40)


WAYS_OF_A_GPU = [("staged", 200, 1), ("staged", 18, 2), ("replayed", 18, 2)]
"""How steps run, the blocks (17 usable ones: requests are preempted), and how many steps are in flight."""


@pytest.fixture(autouse=True)
def _without_native_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(model: Any, layers: Any) -> Any:
        raise NotSupportedNatively("a staged step has padding")

    monkeypatch.setattr(draft_model, "open_native_program", none)


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
    assert stats.num_draft_tokens > 25
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)


def test_a_smaller_model_of_fewer_tokens_and_a_shorter_context_drafts(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1: any drafter leaves the texts as they are. Its positions end in the middle of the requests, and now and then
    lookup drafts in its place."""
    make_tiny_model(tmp_path, "llama", seed=5, num_hidden_layers=1, vocab_size=400, max_position_embeddings=36)
    drafter = DraftModel(load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32), spec.vocab_size)
    texts = [[*r.token_ids, *tokens_of(alone[r.request_id])] for r in make_requests()]
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device(texts[::2], 0.2))
    told, scheduler = serve(model, spec, make_requests(), way="replayed", speculates=True, drafter=opened(drafter))
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("broken", [torch.nan, None])
def test_a_drafter_that_fails_changes_no_answer(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], broken: float | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One whose logits are not numbers drafts nothing; one that raises is used no more. The log says so once."""
    warn_once.cache_clear()

    def logits(self: DraftModel, hidden: Tensor) -> Tensor:
        if broken is None:
            raise ValueError("broken")
        return torch.full((len(hidden), spec.vocab_size), broken)

    monkeypatch.setattr(DraftModel, "logits", logits)
    told, scheduler = serve(
        model, spec, make_requests(), way="staged", speculates=True, drafter=opened(DraftModel(model, spec.vocab_size))
    )
    assert_same(told, alone)
    assert scheduler.recorder.num_failed_steps == 0
    assert [record.levelname for record in caplog.records if "drafter" in record.message] == ["WARNING"]


@pytest.mark.parametrize(("num_drafts", "graphs"), [(1, 222), (2, 222), (4, 218), (7, 206)])
def test_a_drafters_steps_have_its_width_and_few_graphs(
    model: Any, spec: ModelSpec, num_drafts: int, graphs: int
) -> None:
    """As many as there are without a drafter, or fewer."""
    recorded: list[Replay] = []

    def record(step: Replay) -> Replay:
        recorded.append(step)
        return step

    drafter = opened(DraftModel(model, spec.vocab_size))(40)
    cache = KVCache(spec, of_each(spec, 40), BLOCK, CPU, "float32")
    runner = TorchRunner(
        model, spec, cache, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=64, block_size=BLOCK,
        device=CPU, capture=record, drafter=replace(drafter, num_drafts=num_drafts),
    )  # fmt: skip
    steps = runner._steps
    assert isinstance(steps, DeviceSteps)
    assert steps._graphs is not None
    while steps._graphs.capture_next():
        pass
    assert len(recorded) == graphs <= 225
    assert runner.drafts.widths == (num_drafts, 15)
    assert steps._width(8, num_drafts) == num_drafts
    assert steps._width(8, num_drafts + 1) == 15


def test_a_token_that_runs_again_writes_nowhere(model: Any, spec: ModelSpec) -> None:
    """Behind a prefix hit the last token of the hit runs again: its keys and values stay as they are."""
    shared = list(range(40, 73))
    first, second = (
        Request(name, [*shared, token], SamplingParams(temperature=0.0, max_tokens=6), max_output_tokens=6)
        for name, token in (("first", 7), ("second", 8))
    )
    caches: list[KVCache] = []
    told, scheduler = serve(
        model, spec, [first], way="staged", speculates=True, then=[second],
        drafter=opened(DraftModel(model, spec.vocab_size), caches),
    )  # fmt: skip
    plain, _ = serve(model, spec, [Request("second", [*shared, 8], second.params, max_output_tokens=6)])
    assert tokens_of(told["second"]) == tokens_of(plain["second"])
    assert told["second"][-1].num_cached_tokens == 32
    (kept,) = caches[0].layers[:1]
    assert kept is not None
    assert kept.k[:, list(scheduler.ledger.pools[0].names().values())].isfinite().all()
