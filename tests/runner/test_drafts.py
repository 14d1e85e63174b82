"""Drafts in the real runner on a CPU: the tokens and logprobs of every request are those of a run without drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.step import NewSlot, Row, RowResult, StepPlan, TokenMasks
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import FEW_ROWS
from localllm.kernels.sampling.noise import mix_seeds
from localllm.models.decoder import native_program
from localllm.models.decoder.native_program import NativeProgram
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import host_steps
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.host_steps import Forward, HostSteps, count_accepted
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.marks import needs_library
from tests.models.operations import DefinedLibrary
from tests.runner.desk import GREEDY
from tests.runner.harness import draft_requests, knowing, serve, tokens_of

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Native steps, as they are defined where this machine has no library; or none."""
    if request.param == "torch":
        monkeypatch.setattr(host_steps, "_lone_step", lambda *_: (None, "without a library"))
    elif native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in draft_requests()}


@pytest.mark.parametrize(
    ("way", "num_blocks", "errors", "depth"),
    [
        ("native", 200, 0.0, 1), ("native", 200, 0.3, 1), ("native", 18, 0.2, 1), ("native", 18, 0.1, 2),
        ("torch", 200, 0.2, 2),
    ],
    indirect=["way"],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_of_a_run_without_drafts(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int, errors: float,
    depth: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """S2: penalties, bias, bad words, min_tokens, stop ids and seeds; 17 usable blocks force preemptions."""
    texts = [[*r.token_ids, *tokens_of(alone[r.request_id])] for r in draft_requests()]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, errors))
    drafted, scheduler = serve(model, spec, draft_requests(), num_blocks=num_blocks, depth=depth, speculates=True)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_accepted_tokens > 20
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (errors == 0.0)
    for name, wanted in alone.items():
        got = drafted[name]
        assert tokens_of(got) == tokens_of(wanted), name
        assert got[-1].finish_reason == wanted[-1].finish_reason
        assert got[-1].stop_reason == wanted[-1].stop_reason
        scores = [[s for output in outputs for s in output.logprobs] for outputs in (got, wanted)]
        assert [s.token_ids for s in scores[0]] == [s.token_ids for s in scores[1]]
        for ours, theirs in zip(*scores, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@needs_library
def test_deterministic_answers_have_drafts_and_stay_the_same(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = serve(model, spec, draft_requests(), deterministic=True)
    texts = [[*r.token_ids, *tokens_of(plain[r.request_id])] for r in draft_requests()]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, 0.2))
    drafted, scheduler = serve(model, spec, draft_requests(), deterministic=True, speculates=True)
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_accepted_tokens > 20
    for name, wanted in plain.items():
        assert tokens_of(drafted[name]) == tokens_of(wanted)
        scores = [[s for output in outputs for s in output.logprobs] for outputs in (drafted[name], wanted)]
        assert scores[0] == scores[1], "not the same bits"


def test_a_text_that_repeats_itself_takes_fewer_steps(model: Any, spec: ModelSpec, way: str) -> None:
    """Of two tokens, greedy decoding soon repeats itself, which lookup finds."""
    params = SamplingParams(max_tokens=120, temperature=0.0, allowed_token_ids=[5, 6])

    def run(*, speculates: bool) -> tuple[list[int], int]:
        request = Request("r", [5, 6, 7], params, max_output_tokens=120)
        told, scheduler = serve(model, spec, [request], speculates=speculates)
        return tokens_of(told["r"]), scheduler.recorder.num_steps

    (plain, plain_steps), (drafted, steps) = run(speculates=False), run(speculates=True)
    assert drafted == plain
    assert steps < plain_steps


@needs_library
@pytest.mark.parametrize("order", [False, True])
def test_a_native_steps_drafts_have_the_bits_of_single_steps(model: Any, spec: ModelSpec, order: bool) -> None:
    """S2 to the bit: logits and KV of 8 tokens of one request, and of 3 and 5 tokens of two."""
    rows: list[Any] = []
    forward = NativeProgram.forward

    def spy(self: NativeProgram, inputs: Any, **options: Any) -> Any:
        rows.append(forward(self, inputs, **options).clone())
        return rows[-1]

    lengths = (3, 5) if order else (8,)
    texts = [[(7 * place + 3 * slot) % 500 for place in range(40)] for slot in range(len(lengths))]
    caches, logits = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeProgram, "forward", spy)
        for at_once in (False, True):
            runner, cache = open_runner(model, spec)
            rows.clear()
            news = tuple(NewSlot(s, f"r{s}", texts[s][:10], 10, GREEDY, (), 0) for s in range(len(lengths)))
            blocks = [(tuple(range(1 + 5 * s, 6 + 5 * s)),) * len(runner.num_blocks) for s in range(len(lengths))]
            run(runner, StepPlan(1, tuple(Row(s, f"r{s}", 0, 9, blocks[s], False) for s in range(len(lengths))), news))
            steps = [lengths] if at_once else [tuple(int(i < n) for n in lengths) for i in range(max(lengths))]
            done = [9] * len(lengths)
            for step in steps:
                force(runner, texts, done)
                run(runner, StepPlan(2, tuple(
                    Row(s, f"r{s}", done[s], n, (), True, tuple(texts[s][done[s] + 1 : done[s] + n]), None, n - 1)
                    for s, n in enumerate(step) if n
                )))  # fmt: skip
                done = [before + n for before, n in zip(done, step, strict=True)]
            caches.append([tensor.clone() for layer in cache.layers if layer is not None for tensor in layer.tensors()])
            logits.append(torch.cat(rows))
    assert all(torch.equal(one, other) for one, other in zip(*caches, strict=True))
    single, together = logits
    order_of_single = [i for s, n in enumerate(lengths) for i in place_of(s, lengths)]
    assert torch.equal(single[order_of_single], together)


def place_of(slot: int, lengths: Sequence[int]) -> list[int]:
    """Return the rows of single steps that are a request's, each step with those requests that still have tokens."""
    found, at = [], 0
    for i in range(max(lengths)):
        for s, n in enumerate(lengths):
            if i < n:
                if s == slot:
                    found.append(at)
                at += 1
    return found


def open_runner(model: Any, spec: ModelSpec) -> tuple[TorchRunner, KVCache]:
    cache = KVCache(spec, of_each(spec, 40), 8, CPU, "float32")
    runner = TorchRunner(model, spec, cache, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=8,
                         device=CPU)  # fmt: skip
    return runner, cache


def force(runner: TorchRunner, texts: Sequence[Sequence[int]], done: Sequence[int]) -> None:
    """Make the runner know the texts up to the next token, whatever it has drawn."""
    for slot, text in enumerate(texts):
        known = done[slot] + 1
        runner._inputs.token_ids[slot, :known] = torch.tensor(text[:known])
        runner._slots._num_tokens[slot] = known
        runner._slots._num_computed[slot] = done[slot]
        runner._slots._has_drafted[slot] = False


def run(runner: TorchRunner, plan: StepPlan, masks: TokenMasks | None = None) -> tuple[RowResult, ...]:
    runner.forward(plan)
    return runner.sample(plan, masks).result().rows


def test_masks_are_those_of_their_places(model: Any, spec: ModelSpec, way: str) -> None:
    """Each of a row's draws has its own mask; those behind the last accepted one do not matter."""
    runner, _ = open_runner(model, spec)
    text = [3, 1, 4, 1, 5]
    new = NewSlot(0, "r", text, 5, GREEDY, (), 0)
    run(runner, StepPlan(1, (Row(0, "r", 0, 4, ((1,),) * len(runner.num_blocks), False),), (new,)))
    bits = np.zeros((3, -(-spec.vocab_size // 32)), np.int32)
    for place, token in enumerate((10, 11, 12)):
        bits[place, token // 32] = 1 << token % 32
    row = Row(0, "r", 4, 4, (), True, (10, 11, 99), None, 3)
    (result,) = run(runner, StepPlan(2, (row,)), TokenMasks((0, 0, 0), bits, (0, 1, 2)))
    assert result.token_ids == (10, 11, 12)
    assert result.num_checked == 3
    assert runner._slots._num_ready[0] == 0, "drafts are verified once"


@pytest.mark.slow
def test_accepted_tokens_have_the_models_distribution(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: 2e5 draws against the probabilities themselves, since runs with and without drafts share one sampler."""
    slots, temperature, text = 64, 0.8, [3, 1, 4, 1, 5]
    logits = torch.full((4, spec.vocab_size), -30.0)  # at the last token and behind three drafts
    dice = torch.Generator().manual_seed(5)
    logits[:, 20:32] = torch.randn(4, 12, generator=dice)
    drafts = [int(row.argmax()) for row in logits[:3]]
    cache = KVCache(spec, of_each(spec, 4), 8, CPU, "float32")
    runner = TorchRunner(model, spec, cache, max_num_seqs=slots, max_num_batched_tokens=4 * slots, max_model_len=64,
                         block_size=8, device=CPU)  # fmt: skip
    monkeypatch.setattr(
        HostSteps, "forward", lambda self, batch, _=None: Forward(logits.repeat(len(batch.slots) // 4, 1), None)
    )
    params = SamplingParams(temperature=temperature)
    blocks = ((1, 2),) * len(runner.num_blocks)
    news = tuple(NewSlot(slot, f"r{slot}", text, 5, params, (), 0) for slot in range(slots))
    run(runner, StepPlan(1, tuple(Row(s, f"r{s}", 0, 4, blocks, False) for s in range(slots)), news))
    plan = StepPlan(2, tuple(Row(s, f"r{s}", 4, 4, (), True, tuple(drafts), None, 3) for s in range(slots)))
    counts, seeds = np.zeros((4, spec.vocab_size)), np.random.default_rng(3)
    for _ in range(800):
        runner._sampling._mixed_seed[:] = mix_seeds(seeds.integers(0, 2**63, slots, dtype=np.uint64))
        force(runner, [text] * slots, [4] * slots)
        for result in run(runner, plan):
            assert list(result.token_ids[:-1]) == drafts[: len(result.token_ids) - 1]
            for place, token in enumerate(result.token_ids):
                counts[place, token] += 1
    assert counts[3].sum() > 1000
    for place, row in enumerate(torch.softmax(logits.double() / temperature, -1).numpy()):
        wanted = counts[place].sum() * row[20:32]
        assert counts[place, 20:32].sum() == counts[place].sum()
        assert ((counts[place, 20:32] - wanted) ** 2 / wanted).sum() < 31.3, "p < 0.001 for 11 degrees of freedom"


def test_a_slot_that_is_taken_again_has_no_drafts(model: Any, spec: ModelSpec, way: str) -> None:
    """S5: after an end, and after a reset."""
    runner, _ = open_runner(model, spec)
    text, groups = [1, 2, 3, 1, 2, 3, 1, 2, 3], len(runner.num_blocks)
    first = NewSlot(0, "a", text, 9, GREEDY, (), 0, max_drafts=4)
    plans = [
        StepPlan(1, (Row(0, "a", 0, 9, ((1, 2),) * groups, True),), (first,), propose=4),
        StepPlan(2, (Row(0, "b", 0, 9, ((3, 4),) * groups, True),), (NewSlot(0, "b", text, 9, GREEDY, (), 0),), (0,)),
    ]  # fmt: skip
    run(runner, plans[0])
    runner._slots.add_drafts(0, np.array([1, 2], np.int32))
    runner.forward(plans[1])
    assert runner._slots._num_ready[0] == 0
    runner.sample(plans[1]).result()
    (result,) = run(runner, StepPlan(3, (Row(0, "b", 9, 3, (), True, (), None, 2),)))
    assert (result.num_checked, len(result.token_ids)) == (0, 1)


def test_support_says_what_can_be_verified(model: Any, spec: ModelSpec, way: str) -> None:
    support = open_runner(model, spec)[0].drafts
    assert support.proposes
    assert not support.why_none
    if way == "native":
        assert (support.most, support.step_tokens) == (FEW_ROWS - 1, FEW_ROWS)


@pytest.mark.parametrize(
    ("right", "usable", "counts", "expected"),
    [
        ([0], [1], [1], [1]), ([1], [1], [1], [1]), ([1, 1, 0], [1, 1, 1], [3], [3]), ([1, 0, 1], [1, 1, 1], [3], [2]),
        ([0, 1, 1], [1, 1, 1], [3], [1]), ([1, 1, 1], [1, 1, 0], [3], [2]), ([1, 1, 1], [1, 0, 1], [3], [1]),
        ([1, 1, 1], [0, 1, 1], [3], [3]), ([1, 0, 0, 1, 0], [1] * 5, [2, 1, 2], [2, 1, 2]),
        ([0, 1, 1, 1, 1], [1] * 5, [2, 3], [1, 3]),
    ],
)  # fmt: skip
def test_draws_are_accepted_up_to_the_first_wrong_draft(
    right: list[int], usable: list[int], counts: list[int], expected: list[int]
) -> None:
    accepted = count_accepted(np.array(right, bool), np.array(usable, bool), np.array(counts))
    assert accepted.tolist() == expected
