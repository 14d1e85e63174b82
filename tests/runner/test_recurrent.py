"""Models with recurrent states through the real scheduler and runner: whatever the schedule, the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.step import NewSlot, Row, StateUse, StepPlan
from localllm.kernels.cpu.native.library import native
from localllm.kernels.layer_cache import HybridCache, LayerKV, LayerState
from localllm.machine.hardware import Hardware
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.fit import plan_memory
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec, state_bytes
from localllm.runner import host_steps
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.kv_cache import KVCache, StateCache, layer_caches
from localllm.runner.opening import _allocate, open_runner
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.runner.desk import WAYS
from tests.runner.harness import assert_same, draft_requests, knowing, knowing_on_device, make_requests, opened, serve
from tests.runner.harness import without_lookup as without_lookup
from tests.tiny import make_tiny_model

CPU = torch.device("cpu")
FAMILIES = ["lfm2", "qwen3_5", "granite_hybrid", "falcon_h1"]


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelSpec]:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def load(family: str, path: Path) -> tuple[Any, ModelSpec]:
    make_tiny_model(path, family)
    spec = read_spec(path)
    return load_model(path, spec, CPU, torch.float32), spec


ALONE: dict[tuple[str, str], list[int]] = {}


def alone(model: Any, spec: ModelSpec, request: Request) -> list[int]:
    """Return the tokens of a request that runs alone, with nothing cached."""
    key = (spec.architecture, request.request_id)
    if key not in ALONE:
        ALONE[key] = tokens_of(serve(model, spec, [request], num_places=2)[0][request.request_id])
    return ALONE[key]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    ("depth", "num_blocks", "step", "way", "num_places"),
    [(1, 200, 64, "host", 30), (2, 18, 20, "replayed", 7)],
)
def test_output_depends_on_the_request_alone(hybrid, depth, num_blocks, step, way, num_places):
    """H1, H13 and H14: chunks, batch mates, hits, preemptions and both depths change no token; memory begins as NaN."""
    model, spec = hybrid
    asked = make_requests()
    sizes = {"num_blocks": num_blocks, "depth": depth, "step": step, "way": way}
    together, scheduler = serve(model, spec, asked, num_places=num_places, **sizes)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.corrupted_requests == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
    assert scheduler.recorder.prefix_cache_hits > 0 or num_places < 30
    for request in make_requests():
        assert tokens_of(together[request.request_id]) == alone(model, spec, request), request.request_id


def test_layers_keep_what_their_kind_needs(hybrid):
    _, spec = hybrid
    kv, states = KVCache(spec, of_each(spec, 5), 8, CPU, "float32"), StateCache(spec, 6, CPU, torch.float32)
    caches = layer_caches(kv.layers, states)
    assert len(caches) == spec.num_layers
    expected = {"attention": LayerKV, "recurrent": LayerState, "both": HybridCache, "mlp": type(None)}
    assert [type(kept) for kept in caches] == [expected[spec.layer_kind(layer)] for layer in range(spec.num_layers)]
    assert states.allocated_bytes == 6 * state_bytes(spec, "float32")  # H11


def test_an_engine_allocates_what_was_planned(hybrid):
    """H11, with a context that is a multiple of nothing."""
    model, spec = hybrid
    config = EngineConfig(max_num_seqs=3, max_model_len=131)
    machine = Hardware((), "CPU", 4, 64 * 1024**3, 8 * 1024**3)
    plan = plan_memory(config, spec, 10_000_000, machine)
    assert plan.num_places == 1 + 3 + plan.num_blocks[0]
    assert plan.state_bytes == plan.num_places * state_bytes(spec, plan.dtype)
    kv, states, kept = _allocate(spec, config, plan, machine, CPU)
    assert kept == plan
    assert (kv.allocated_bytes, states.allocated_bytes) == (plan.kv_bytes, plan.state_bytes)
    runner, kept = open_runner(model, spec, config, plan, machine, lambda text: None)
    assert kept == plan
    runner.close()


def test_a_plan_counts_the_copies_of_states_for_drafts(hybrid):
    _, spec = hybrid
    machine = Hardware((), "CPU", 4, 64 * 1024**3, 8 * 1024**3)
    sizes = {"max_num_seqs": 9, "max_model_len": 131, "max_num_batched_tokens": 16}
    configs = [EngineConfig(**sizes, speculative=each) for each in ("auto", "off")]
    drafted, plain = (plan_memory(config, spec, 10_000_000, machine) for config in configs)
    assert drafted.activation_bytes - plain.activation_bytes == 4 * state_bytes(spec, drafted.dtype)


def test_the_second_request_with_a_prompt_computes_its_end_only(hybrid):
    model, spec = hybrid
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
    prompt = [7 * i % 300 for i in range(60)]
    asked = [Request(name, prompt, params, max_output_tokens=4) for name in "ab"]
    told, scheduler = serve(model, spec, asked, num_places=9)
    assert [told[name][-1].num_cached_tokens for name in "ab"] == [0, 56]
    assert tokens_of(told["a"]) == tokens_of(told["b"])
    assert scheduler.recorder.prefix_cache_hits == 56


@pytest.mark.parametrize("way", [{}, {"staged": True}])
def test_a_runner_refuses_places_that_two_rows_need(tmp_path, way):
    model, spec = load("lfm2", tmp_path)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "block_size": 8}
    params = SamplingParams(temperature=0.0)

    def step(*uses: StateUse | None) -> None:
        kv, states = KVCache(spec, of_each(spec, 5), 8, CPU, "float32"), StateCache(spec, 4, CPU, torch.float32)
        runner = TorchRunner(model, spec, kv, device=CPU, states=states, **sizes, **way)
        rows = tuple(Row(i, str(i), 0, 2, ((1 + i,),), True, (), use) for i, use in enumerate(uses))
        new = tuple(NewSlot(i, str(i), [1, 2], 2, params, ((),), 0) for i in range(len(uses)))
        runner.forward(StepPlan(1, rows, new))

    step(StateUse(-1, 1), StateUse(-1, 2, 3))
    for uses, why in [
        ((StateUse(-1, 1), StateUse(-1, 1)), "written by two"),
        ((StateUse(-1, 1, 2), StateUse(-1, 2)), "written by two"),
        ((StateUse(-1, 1), StateUse(1, 2)), "what another writes"),
        ((StateUse(0, 1),), "null place"),
        ((StateUse(-1, 0),), "null place"),
        ((StateUse(-1, 4),), "places"),
        ((None,), "without a place"),
    ]:
        with pytest.raises(Exception, match=why):
            step(*uses)


def test_no_schedule_changes_a_bit(tmp_path):
    """H1 in deterministic mode: hits, preemptions and batch mates leave no trace in any log-probability."""
    model, spec = load("lfm2", tmp_path)

    def bits(requests: list[Request], **sizes: Any) -> dict[str, list[Any]]:
        told, _ = serve(model, spec, requests, deterministic=True, **sizes)
        return {
            name: [(tuple(e.token_ids), tuple(e.logprobs)) for output in outputs for e in output.logprobs]
            for name, outputs in told.items()
        }

    asked = [request for request in make_requests() if request.params.logprobs is not None]
    together = bits(make_requests(), num_blocks=18, step=24, num_places=7)
    for request in asked:
        assert together[request.request_id] == bits([request], num_places=2)[request.request_id] != []


UNDRAFTED: dict[str, dict[str, list[EngineOutput]]] = {}


def undrafted(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """Return what each request gets alone and without drafts."""
    if spec.architecture not in UNDRAFTED:
        told = [serve(model, spec, [request], num_places=9)[0] for request in draft_requests(most_words=40)]
        UNDRAFTED[spec.architecture] = {name: outputs for each in told for name, outputs in each.items()}
    return UNDRAFTED[spec.architecture]


@pytest.mark.parametrize(
    ("way", "num_blocks", "errors", "depth"),
    [
        ("native", 200, 0.3, 1), ("native", 18, 0.3, 2), ("torch", 200, 0.3, 1), ("staged", 200, 0.3, 1),
        ("replayed", 18, 0.3, 2),
    ],
)  # fmt: skip
def test_drafts_change_no_token(hybrid, monkeypatch, way, num_blocks, errors, depth):
    """S2: a state comes after the accepted tokens alone. Preemptions and hits read states that drafts were near."""
    model, spec = hybrid
    if way == "torch":
        monkeypatch.setattr(host_steps, "_lone_step", lambda *_: (None, "without a library"))
    elif way == "native" and native() is None:
        pytest.skip("this machine has no native library")
    plain = undrafted(model, spec)
    texts = [[*r.token_ids, *tokens_of(plain[r.request_id])] for r in draft_requests(most_words=40)]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, errors))
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device(texts, errors))
    drafted, scheduler = serve(
        model,
        spec,
        draft_requests(most_words=40),
        num_places=30,
        num_blocks=num_blocks,
        depth=depth,
        speculates=True,
        way=way if way in WAYS else "host",
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_accepted_tokens > 10
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
    assert_same(drafted, plain)


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("way", ["host", "staged", "replayed"])
def test_a_draft_model_drafts_for_a_hybrid(tmp_path, monkeypatch, way):
    """Its keys and values have no hole behind a prefix hit, where no token of the hybrid runs again."""
    model, spec = load("lfm2", tmp_path / "target")
    make_tiny_model(tmp_path / "draft", num_hidden_layers=1)
    drafter = DraftModel(
        load_model(tmp_path / "draft", read_spec(tmp_path / "draft"), CPU, torch.float32), spec.vocab_size
    )
    if way != "host":
        monkeypatch.setattr(draft_model, "open_native_program", _not_native)
    caches: list[KVCache] = []
    told, scheduler = serve(
        model, spec, draft_requests(most_words=40), num_places=30, depth=2, speculates=True, way=way,
        drafter=opened(drafter, caches),
    )  # fmt: skip
    assert_same(told, undrafted(model, spec))
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.prefix_cache_hits > 0
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_draft_tokens > 60
    blocks = list(scheduler.ledger.pools[0].names().values())
    assert blocks
    assert all(layer.k[:, blocks].isfinite().all() for layer in caches[0].layers if layer is not None)


def _not_native(model: Any, layers: Any) -> Any:
    raise NotSupportedNatively("a staged step has padding")


@pytest.mark.parametrize("way", ["host", "replayed"])
def test_a_wrong_draft_leaves_the_state_of_the_accepted_tokens(hybrid, monkeypatch, way):
    """The next request begins from a checkpoint in the output of one with drafts, most of them wrong."""
    model, spec = hybrid
    params = SamplingParams(temperature=0.0, max_tokens=50)
    first = Request("a", [7 * i % 300 for i in range(11)], params, max_output_tokens=50)
    text = [*first.token_ids, *tokens_of(serve(model, spec, [first], num_places=9)[0]["a"])]

    def chat() -> list[Request]:
        return [Request("a", text[:11], params, max_output_tokens=50),
                Request("b", [*text[:-3], 5, 6, 7], params, max_output_tokens=20)]  # fmt: skip

    expected = tokens_of(serve(model, spec, [chat()[1]], num_places=9)[0]["b"])
    monkeypatch.setattr(HostDrafts, "_find", knowing([text], 0.5))
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device([text], 0.5))
    told, scheduler = serve(model, spec, chat()[:1], num_places=30, speculates=True, then=chat()[1:], way=way)
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_draft_tokens > scheduler.speculation.stats().num_accepted_tokens
    assert tokens_of(told["a"]) == text[11:]
    assert told["b"][-1].num_cached_tokens >= 48
    assert tokens_of(told["b"]) == expected
