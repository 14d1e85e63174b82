"""Drafters with weights in the real runner on a CPU: answers are those of a run without, and a drafter that is the
model itself is always right."""

from array import array
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.kernels.cpu.native.library import native
from localllm.kernels.layer_cache import LayerKV
from localllm.models.decoder import native_program
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.drafter import FINAL_HIDDEN, DraftStep
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import host_steps
from localllm.runner.batch import HostInputs, StepBatch, StepRows
from localllm.runner.kv_cache import KVCache
from tests.models.harness import ModelHarness, Sequence
from tests.models.operations import DefinedLibrary
from tests.runner.harness import BLOCK, CPU, assert_same, opened, serve, tokens_of
from tests.runner.harness import draft_requests as make_requests
from tests.runner.harness import without_lookup as without_lookup
from tests.tiny import make_tiny_model


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Native steps of model and drafter, as they are defined where this machine has no library; or none."""

    def none(*_: Any) -> Any:
        raise native_program.NotSupportedNatively("without a library")

    if request.param == "torch":
        monkeypatch.setattr(host_steps, "open_native_program", none)
        monkeypatch.setattr(draft_model, "open_native_program", none)
    elif native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in make_requests()}


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


class Recorder:
    """A drafter of one layer that keeps, in the place of token i, i itself and the feature of token i - 1, and guesses
    by a fixed table. Features that are wrong, late or in a wrong place show in its cache."""

    taps: tuple[int, ...] = (FINAL_HIDDEN,)
    first_key = 1

    def __init__(self, spec: ModelSpec, *, fails_after: int = -1) -> None:
        heads, dim = 2, 1 + spec.hidden_size
        self.spec = replace(spec, num_layers=1, num_kv_heads=heads, head_dim=dim)
        self._vocab_size, self._calls_left = spec.vocab_size, fails_after
        self.num_calls = 0

    def serve_context(self, max_model_len: int) -> None: ...

    def extend(self, step: DraftStep, cache: Listed[LayerKV | None], features: Tensor | None) -> Tensor:
        assert features is not None
        assert len(features) == len(step.token_ids)
        kept = torch.cat([step.token_ids[:, None].float(), features], 1)
        return self._keep(step, cache, kept)

    def step(self, step: DraftStep, cache: Listed[LayerKV | None], hidden: Tensor) -> Tensor:
        assert step.num_decodes == len(step.token_ids) == len(hidden)
        return self._keep(step, cache, torch.full((len(hidden), self.spec.head_dim), -7.0))

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        self._calls_left -= 1
        if self._calls_left == -1:
            return torch.full((len(hidden), self._vocab_size), torch.nan)
        return torch.nn.functional.one_hot((hidden[:, 0].long() * 31 + 7) % 500, self._vocab_size).float()

    def _keep(self, step: DraftStep, cache: Listed[LayerKV | None], kept: Tensor) -> Tensor:
        (layer,), (group,) = cache, step.groups
        assert layer is not None
        assert (step.positions >= 0).all()
        assert (group.slot_mapping >= BLOCK).all(), "the null block"
        layer.k.view(2, -1, self.spec.head_dim)[:, group.slot_mapping] = kept
        return step.token_ids[step.logits_indices][:, None]


@pytest.mark.parametrize(
    ("way", "num_blocks", "step"), [("native", 200, 64), ("torch", 18, 64), ("native", 200, 12)], indirect=["way"]
)
def test_named_blocks_have_the_drafters_pairs_of_a_fresh_run(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int, step: int
) -> None:
    """S13: chunks, prefix hits, sharing within a step, preemptions, accepted and rejected drafts."""
    drafter, caches = Recorder(spec), list[KVCache]()
    told, scheduler = serve(
        model, spec, make_requests(), num_blocks=num_blocks, step=step, speculates=True,
        drafter=opened(drafter, caches),
    )  # fmt: skip
    assert_same(told, alone)
    assert drafter.num_calls > 20
    (layer,) = caches[0].layers
    assert layer is not None
    pool, checked = scheduler.ledger.main_pool, 0
    for request in make_requests():
        tokens = [*request.token_ids, *tokens_of(told[request.request_id])]
        harness = ModelHarness(model)
        sequence = Sequence(tokens)
        hidden = model.forward(harness._inputs([(sequence, len(tokens))], True), harness.kv_cache)
        names: list[bytes] = []
        scheduler.cache.hasher.extend(names, scheduler.cache.hasher.root(), array("i", tokens))
        for place, name in enumerate(names):
            block = pool.find(name)
            if block is None:
                continue
            rows = range(max(1, place * BLOCK), (place + 1) * BLOCK)
            wanted = torch.stack([torch.cat([torch.tensor([float(tokens[i])]), hidden[i - 1]]) for i in rows])
            got = layer.k[0, block, rows.start - place * BLOCK :]
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(("fails_after", "way"), [(3, "native"), (0, "torch")], indirect=["way"])
def test_a_drafter_whose_logits_are_not_numbers_is_used_no_more(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, fails_after: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    drafter = Recorder(spec, fails_after=fails_after)
    told, scheduler = serve(model, spec, make_requests(), speculates=True, drafter=opened(drafter))
    assert_same(told, alone)
    assert drafter.num_calls == fails_after + 1
    assert [record.levelname for record in caplog.records if "drafter failed" in record.message] == ["WARNING"]
    assert scheduler.recorder.num_failed_steps == 0


def test_a_drafter_that_raises_is_used_no_more(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Recorder, "step", fail)
    told, _ = serve(model, spec, make_requests(), speculates=True, drafter=opened(Recorder(spec)))
    assert_same(told, alone)


@pytest.mark.usefixtures("without_lookup")
def test_a_smaller_model_of_fewer_tokens_and_a_shorter_context_drafts(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], tmp_path: Path
) -> None:
    """S1: any drafter leaves the texts as they are. Its positions end in the middle of the requests."""
    make_tiny_model(tmp_path, "llama", seed=5, num_hidden_layers=1, vocab_size=400, max_position_embeddings=36)
    small = read_spec(tmp_path)
    drafter = DraftModel(load_model(tmp_path, small, CPU, torch.float32), spec.vocab_size)
    told, scheduler = serve(model, spec, make_requests(), speculates=True, drafter=opened(drafter))
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_draft_tokens > max(100, stats.num_accepted_tokens)


def test_a_token_that_runs_again_writes_to_the_null_block() -> None:
    inputs = HostInputs(max_num_seqs=1, max_model_len=32, block_size=BLOCK, device=CPU)
    inputs.add_blocks(0, 0, ((5, 3),))
    one, two = np.ones(1, np.int64), np.array([2])
    rows = StepRows(0 * one, 7 * one, two, np.array([0, 2]), one > 0, one < 0, -one, 0 * one, None, one)
    made = inputs.make(StepBatch(rows, one, (0,), 0 * one, 9 * one, one, ()))
    assert made.positions.tolist() == [7, 8]
    assert made.groups[0].slot_mapping.tolist() == [0, 3 * BLOCK]
    assert made.groups[0].block_table.tolist() == [[5, 3]]
