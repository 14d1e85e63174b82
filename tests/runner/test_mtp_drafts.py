"""Prediction layers (MTP) in the real runner on a CPU: answers are those of a run without, and every draft is the one
that the layer gives over the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.opening import open_drafter, plan_drafter
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.drafter_steps import DrafterSteps
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.kv_cache import KVCache
from tests.models.formats.quantised import rewrite
from tests.mtp_models import KINDS, MTPOracle, make_mtp_model
from tests.runner.harness import MAX_LEN, assert_same, knowing, knowing_on_device, opened, serve, tokens_of
from tests.runner.harness import without_lookup as without_lookup

CPU = torch.device("cpu")
GREEDY = 5  # of the requests


@pytest.fixture(
    scope="module",
    params=["mimo", "deepseek_v3", "step3p5", "mimo_v2", pytest.param("deepseek_v32", marks=pytest.mark.slow)],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = make_mtp_model(tmp_path_factory.mktemp("mtp"), request.param)
    return Served(path, str(request.param))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(make_mtp_model(tmp_path_factory.mktemp("hybrid"), "qwen3_5"), "qwen3_5")


class Served:
    """A checkpoint with its layer loaded, and what each request gets alone and without drafts."""

    def __init__(self, path: Path, name: str) -> None:
        self.spec, self.oracle = read_spec(path), MTPOracle(path, name)
        model = load_model(path, self.spec, CPU, torch.float32, max_model_len=MAX_LEN)
        assert isinstance(model, DecoderModel)
        plan = plan_drafter(path, "mtp", self.spec, path)
        self.spec = replace(self.spec, drafter=plan)
        self.model, self.drafter = model, open_drafter(plan, model, CPU, torch.float32, max_model_len=MAX_LEN)
        self.num_places = 0 if self.spec.recurrent is None else 40
        self.alone: dict[str, list[EngineOutput]] = {
            r.request_id: serve(model, self.spec, [r], num_places=self.num_places)[0][r.request_id]
            for r in self.requests()
        }

    def requests(self) -> list[Request]:
        """Few of them, and short ones, for a model whose layers are slow on a CPU."""
        requests = make_requests()
        if not self.num_places:
            return requests
        for request in requests:
            request.max_output_tokens = min(14, request.max_output_tokens)
        return [requests[i] for i in (1, 2, 3, GREEDY)]


def make_requests() -> list[Request]:
    """Prompts with a common beginning; the first ones are greedy, the others sampled."""
    dice = random.Random(4)
    shared = [dice.randrange(3, 500) for _ in range(33)]
    sampled = [{"temperature": 0.7, "seed": 1}, {"temperature": 1.2, "seed": 2, "top_k": 20, "repetition_penalty": 1.2}]
    requests = []
    for i in range(GREEDY + len(sampled)):
        prompt = shared[: dice.choice([9, 20, 33])] + [dice.randrange(3, 500) for _ in range(dice.randint(1, 20))]
        prompt = prompt[-1:] if i == 0 else prompt  # the first token has no pair
        asked: dict[str, Any] = {"temperature": 0.0} if i < GREEDY else sampled[i - GREEDY]
        params = SamplingParams(max_tokens=dice.randint(12, 40), **asked)
        assert params.max_tokens is not None
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens, eos_token_ids=(2,)))
    return requests


class Watch:
    """What the drafter proposed behind which tokens, and how many requests began behind a prefix hit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposals: list[tuple[list[int], list[int]]] = []
        self.num_hits = 0
        propose, enter = DrafterSteps.propose, DrafterSteps.enter

        def watched(steps: DrafterSteps, most: Mapping[int, int]) -> dict[int, Any]:
            known = {slot: steps._inputs.known_tokens(slot, steps._slots.num_known(slot)).tolist() for slot in most}
            found = propose(steps, most)
            assert not steps.has_failed
            self.proposals += [(known[slot], drafts.tolist()) for slot, drafts in found.items()]
            return found

        def counted(steps: DrafterSteps, slot: int, num_computed_tokens: int) -> None:
            self.num_hits += num_computed_tokens > 0
            enter(steps, slot, num_computed_tokens)

        monkeypatch.setattr(DrafterSteps, "propose", watched)
        monkeypatch.setattr(DrafterSteps, "enter", counted)

    def check(self, oracle: MTPOracle) -> int:
        """Compare the drafts of greedy requests with the layer over the whole text. Return how many there were."""
        prompts = [list(request.token_ids) for request in make_requests()[:GREEDY]]
        of_greedy = [each for each in self.proposals if any(each[0][: len(p)] == p for p in prompts)]
        for known, drafts in random.Random(1).sample(of_greedy, min(20, len(of_greedy))):
            before = oracle.target_hidden(known)[:-1]
            for count, draft in enumerate(drafts):
                hidden = oracle.hidden([*known, *drafts[:count]], before)
                logits = oracle.logits(hidden[-1])
                assert float(logits.max() - logits[draft]) < 1e-3, (len(known), count)
                before = torch.cat((before, hidden[-1:]))
        return sum(len(drafts) for _, drafts in of_greedy)


def knows_at_times(knows: Callable[[HostDrafts, int, int], Any]) -> Callable[[HostDrafts, int, int], Any]:
    dice = random.Random(3)
    return lambda self, slot, most: knows(self, slot, dice.choice([0, 0, most]))


@pytest.mark.parametrize(("num_blocks", "depth", "step"), [(200, 2, 20), (16, 1, 64)])
def test_texts_stay_and_drafts_are_the_layers(
    served: Served, num_blocks: int, depth: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2 and S13: chunks, prefix hits, preemptions (15 usable blocks). Lookup knows the texts now and then, so that
    steps accept several tokens; otherwise the layer drafts."""
    texts = [[*r.token_ids, *tokens_of(served.alone[r.request_id])] for r in make_requests()]
    monkeypatch.setattr(HostDrafts, "_find", knows_at_times(knowing(texts, 0.2)))
    watch = Watch(monkeypatch)
    told, scheduler = serve(
        served.model, served.spec, make_requests(), num_blocks=num_blocks, depth=depth, step=step, speculates=True,
        drafter=opened(served.drafter), num_places=served.num_places,
    )  # fmt: skip
    assert_same(told, served.alone)
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 16)
    assert scheduler.recorder.num_failed_steps == 0
    assert watch.num_hits
    assert watch.check(served.oracle) > 60


def foresee(tensors: dict[str, Tensor]) -> None:
    """Let the next token depend on the last one alone, in the model and in its prediction layer alike: no layer adds
    anything to the stream, and the layer's stream is the embedding."""
    prefix, size = KINDS["mimo"].stored_prefix, 64
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors[f"{prefix}input_proj.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    tensors[f"{prefix}token_layernorm.weight"].fill_(1.0)
    tensors[f"{prefix}final_layernorm.weight"] = tensors["model.norm.weight"].clone()


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", ["host", "staged", "replayed"])
def test_a_layer_that_knows_the_model_is_always_right(tmp_path: Path, way: str) -> None:
    """S14: greedy and sampled; each draft is drawn with the noise of its position."""
    path = make_mtp_model(tmp_path, "mimo")
    rewrite(path, foresee)
    served = Served(path, "mimo")
    told, scheduler = serve(
        served.model, served.spec, make_requests(), step=24, speculates=True, drafter=opened(served.drafter), way=way
    )
    assert_same(told, served.alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60


@pytest.mark.slow  # the delta nets of transformers and of the twins are loops in Python
@pytest.mark.parametrize("way", ["staged", "replayed"])
def test_the_layer_of_a_hybrid_keeps_the_same_pairs_on_a_device(
    hybrid: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S13: also of the first token behind a prefix hit, whose pair reads the feature that is kept with the state."""
    texts = [[*r.token_ids, *tokens_of(hybrid.alone[r.request_id])] for r in hybrid.requests()]
    monkeypatch.setattr(HostDrafts, "_find", knows_at_times(knowing(texts, 0.2)))
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device(texts, 0.2))
    caches: list[KVCache] = []
    watch = Watch(monkeypatch)
    runs = [
        serve(hybrid.model, hybrid.spec, hybrid.requests(), num_blocks=200, depth=2, step=20, speculates=True, way=each,
              drafter=opened(hybrid.drafter, caches), num_places=hybrid.num_places)
        for each in ("host", way)
    ]  # fmt: skip
    for told, scheduler in runs:
        assert_same(told, hybrid.alone)
        assert scheduler.recorder.num_failed_steps == 0
        assert scheduler.recorder.prefix_cache_hits
    assert watch.check(hybrid.oracle) > 10
    (host, device), (host_names, names) = caches, (run[1].ledger.pools[0].names() for run in runs)
    common = sorted(set(host_names) & set(names))
    assert len(common) > 5
    for ours, theirs in zip(device.layers, host.layers, strict=True):
        assert ours is not None
        assert theirs is not None
        blocks = [names[name] for name in common], [host_names[name] for name in common]
        torch.testing.assert_close(ours.k[:, blocks[0]], theirs.k[:, blocks[1]], atol=1e-4, rtol=1e-4, equal_nan=True)
