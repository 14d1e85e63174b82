"""EAGLE drafters in the real runner on a CPU: answers are those of a run without, and what the drafter keeps of a block
is what it would compute for the block's text alone."""

import json
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.kernels.cpu.native.library import native
from localllm.models.decoder import native_program
from localllm.models.decoder.decoder import DecoderModel, Taps
from localllm.models.drafters.drafter import Drafter
from localllm.models.drafters.opening import open_drafter, plan_drafter
from localllm.models.inputs import ForwardInputs, GroupInputs, StateInputs
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import device_drafter, host_steps
from localllm.runner.drafter_steps import DrafterSteps
from localllm.runner.kv_cache import KVCache, StateCache, layer_caches
from tests.eagle_files import write_eagle
from tests.models.harness import TAPS, Crank
from tests.models.operations import DefinedLibrary
from tests.runner.desk import WAYS
from tests.runner.harness import BLOCK, assert_same, draft_requests, opened, serve, tokens_of
from tests.runner.harness import without_lookup as _without_lookup
from tests.tiny import make_tiny_model

CPU, F32 = torch.device("cpu"), torch.float32
without_lookup = _without_lookup
METHODS = ["eagle", "eagle3"]
HYBRID_TAPS = [0, 1, 2]


def make_requests() -> list[Request]:
    return draft_requests(8, most_words=40)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 layers, and a drafter of each method beside it."""
    path = make_tiny_model(tmp_path_factory.mktemp("eagle") / "target", num_hidden_layers=4)
    config = json.loads((path / "config.json").read_text("utf-8"))
    for method in METHODS:
        write_eagle(path.parent / method, config, method, taps=TAPS if method == "eagle3" else None)
    return path


@pytest.fixture(scope="module")
def spec(path: Path) -> ModelSpec:
    return read_spec(path)


@pytest.fixture(scope="module")
def model(path: Path, spec: ModelSpec) -> Any:
    return load_model(path, spec, CPU, F32)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in make_requests()}


@pytest.fixture(params=METHODS)
def drafter(request: pytest.FixtureRequest, path: Path, model: DecoderModel, spec: ModelSpec) -> Drafter:
    plan = plan_drafter(path.parent / request.param, "", spec, path)
    assert plan.method == request.param
    return open_drafter(plan, model, CPU, F32, max_model_len=200)


@pytest.fixture(params=["native", "torch", "staged", "replayed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Native steps of the model, as they are defined where this machine has no library; or none; or steps of a GPU."""

    def none(*_: Any) -> Any:
        raise native_program.NotSupportedNatively("without a library")

    if request.param == "torch":
        monkeypatch.setattr(host_steps, "open_native_program", none)
    elif request.param == "native" and native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    return str(request.param)


def often_right(texts: list[list[int]], share: float) -> Callable[..., Any]:
    """The drafter's own draws, replaced by the right token in some places."""
    real, dice = DrafterSteps._draw, random.Random(5)

    def draw(self: DrafterSteps, slots: Any, lengths: Any, hidden: Tensor) -> Any:
        drawn, usable = real(self, slots, lengths, hidden)
        assert drawn is not None
        for place, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            known = self._inputs.known_tokens(slot, length).tolist()
            text = next((text for text in texts if text[:length] == known and len(text) > length), None)
            if text is not None and dice.random() < share:
                drawn[place] = text[length]
        return drawn, usable

    return draw


def often_right_on_device(texts: list[list[int]], share: float) -> Callable[..., None]:
    """Do the same for drafts of a device."""
    real, dice = device_drafter.record_draft, random.Random(5)

    def record(drawn: Tensor, best: Tensor, table: Tensor, slots: Any, *rest: Any) -> None:
        _, _, out, _, place = rest
        for row, slot in enumerate(out.draft_slots.tolist()):
            known = slots.token_ids[slot, : int(slots.known[slot]) + place].tolist()
            text = next((text for text in texts if text[: len(known)] == known and len(text) > len(known)), None)
            if slot >= 0 and text is not None and dice.random() < share:
                drawn[row] = text[len(known)]
        real(drawn, best, table, slots, *rest)

    return record


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(
    ("way", "num_blocks", "depth"),
    [
        ("native", 200, 1), ("native", 18, 2), ("torch", 200, 2), ("torch", 18, 1), ("staged", 18, 2),
        ("replayed", 200, 2),
    ],
    indirect=["way"],
)  # fmt: skip
def test_answers_and_the_drafters_blocks_are_those_of_runs_alone(
    model: Any, spec: ModelSpec, drafter: Drafter, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int,
    depth: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """S1, S13: with right and wrong drafts, chunks, prefix hits and preemptions (17 usable blocks)."""
    texts = {r.request_id: [*r.token_ids, *tokens_of(alone[r.request_id])] for r in make_requests()}
    monkeypatch.setattr(DrafterSteps, "_draw", often_right(list(texts.values()), 0.7))
    monkeypatch.setattr(device_drafter, "record_draft", often_right_on_device(list(texts.values()), 0.7))
    caches: list[KVCache] = []
    told, scheduler = serve(
        model, spec, make_requests(), num_blocks=num_blocks, depth=depth, speculates=True,
        drafter=opened(drafter, caches), way=way if way in WAYS else "host",
    )  # fmt: skip
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_named_blocks_are_right(model, drafter, caches[0], scheduler.ledger.pools[0].names(), texts)


def assert_named_blocks_are_right(
    model: DecoderModel, drafter: Any, cache: KVCache, named: dict[bytes, int], texts: dict[str, list[int]]
) -> None:
    (kept,) = cache.layers
    assert kept is not None
    seen = set()
    for text in texts.values():
        hasher, names = BlockHasher(b"tiny", BLOCK), list[bytes]()
        hasher.extend(names, hasher.root(), array("i", text))
        found = [named.get(name) for name in names]
        if not any(found):
            continue
        crank = Crank(drafter)
        row, tokens = crank.row(len(text)), torch.tensor(text)
        crank.extend([(row, 1, tokens[1:])], features_of(model, tokens, drafter.taps)[:-1])
        for place, block in enumerate(found):
            if block is not None and block not in seen:
                first = 1 if place == 0 else 0
                wanted = crank.stored(row, place * BLOCK + first, BLOCK - first)
                for ours, plane in zip(wanted, (kept.k, kept.v), strict=True):
                    got = plane[:, block, first:].transpose(0, 1)
                    torch.testing.assert_close(got, ours, rtol=1e-4, atol=1e-4)
                seen.add(block)
    assert len(seen) == len(named)


def features_of(model: DecoderModel, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Return the features [n, taps * hidden] of a whole text, computed at once."""
    count = len(tokens)
    blocks = -(-count // BLOCK)
    cache = KVCache(model.spec, (1 + blocks,), BLOCK, CPU, "float32")
    inputs = ForwardInputs(
        token_ids=tokens,
        positions=torch.arange(count),
        groups=(GroupInputs(torch.arange(1, 1 + blocks, dtype=torch.int32)[None], BLOCK + torch.arange(count)),),
        context_lens=torch.tensor([count], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        logits_indices=torch.tensor([count - 1]),
        num_decodes=0,
        query_lens=(count,),
        context_lens_host=(count,),
    )
    features, layers = torch.empty(count, len(taps) * model.spec.hidden_size), cache.layers
    if model.spec.recurrent is not None:
        at, on_host = [torch.tensor([place], dtype=torch.int32) for place in (-1, 1, 0)], ((-1,), (1,), (0,))
        inputs = replace(inputs, state=StateInputs(*at, *on_host))
        layers = layer_caches(layers, StateCache(model.spec, 2, CPU, F32))
    model.forward(inputs, layers, taps=Taps(taps, features))
    return features


def hybrid_requests() -> tuple[list[Request], list[Request]]:
    """Return requests, and others that come when these have ended and begin behind their blocks."""
    asked = make_requests()[:5]
    return asked, [
        Request(f"again {r.request_id}", [*r.token_ids, 9], r.params, max_output_tokens=9) for r in asked[1:3]
    ]


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", ["staged"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_of_a_hybrid_keeps_the_pairs_of_runs_alone(
    tmp_path: Path, method: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states cannot run a token again, so the pair behind a prefix hit reads the feature that is kept with
    the state. Blocks behind a hit are compared, too."""
    path = make_tiny_model(tmp_path / "target", "lfm2")
    config = json.loads((path / "config.json").read_text("utf-8"))
    write_eagle(tmp_path / method, config, method, taps=HYBRID_TAPS if method == "eagle3" else None)
    spec = read_spec(path)
    model = load_model(path, spec, CPU, F32)
    plan = plan_drafter(tmp_path / method, "", spec, path)
    drafter = open_drafter(plan, model, CPU, F32, max_model_len=200)
    spec = replace(spec, drafter=plan)
    asked, begun = hybrid_requests()
    alone = {r.request_id: serve(model, spec, [r], num_places=4)[0][r.request_id] for r in (*asked, *begun)}
    texts = {r.request_id: [*r.token_ids, *tokens_of(alone[r.request_id])] for r in (*asked, *begun)}
    asked, begun = hybrid_requests()
    monkeypatch.setattr(DrafterSteps, "_draw", often_right(list(texts.values()), 0.7))
    monkeypatch.setattr(device_drafter, "record_draft", often_right_on_device(list(texts.values()), 0.7))
    caches: list[KVCache] = []
    told, scheduler = serve(
        model, spec, asked, depth=2, step=24, speculates=True, drafter=opened(drafter, caches), num_places=40,
        way=way if way in WAYS else "host", then=begun,
    )  # fmt: skip
    assert_same(told, alone)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert scheduler.recorder.prefix_cache_hits > 0
    assert_named_blocks_are_right(model, drafter, caches[0], scheduler.ledger.pools[0].names(), texts)
