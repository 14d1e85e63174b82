"""Drafts in staged steps, as on a GPU: the tokens and logprobs of every request are those of a run without drafts.

On a CPU through the twins; test_through_kernels.py does the same through the kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.engine.step import NewSlot, Row, StepPlan, TokenMasks
from localllm.kernels.sampling.tables import MAX_WORDS
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import (
    DRAFT_WIDTHS,
    LookupOnDevice,
    draft_shapes,
    draft_support,
    fitting_width,
    most_draws,
    narrowed,
)
from localllm.runner.device_steps import FEATURE_SETS, FORWARD, DeviceSteps
from localllm.runner.graphs import STEPS_PER_CAPTURE, Replay, capture_shapes
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from localllm.runner.staging import StagedInputs, StepShape
from tests.kv import of_each
from tests.runner.desk import GREEDY, WAYS
from tests.runner.harness import draft_requests as make_requests
from tests.runner.harness import knowing_on_device, serve, tokens_of

CPU = torch.device("cpu")


def asked(max_drafts: int | None = None) -> list[Request]:
    """Requests of which one has more bad words than the tables on the device hold."""
    requests = make_requests()
    for request in requests[:-2]:
        request.bad_words_token_ids = request.bad_words_token_ids[:40]
        request.options = replace(request.options, max_drafts=max_drafts)
    assert max(len(request.bad_words_token_ids) for request in requests[-2:]) > MAX_WORDS
    return requests


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in asked()}


@pytest.mark.parametrize(
    ("way", "num_blocks", "errors", "depth"),
    [
        ("staged", 200, 0.0, 1), ("staged", 200, 0.3, 2), ("staged", 20, 0.2, 2), ("replayed", 20, 0.1, 2),
    ],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_of_a_run_without_drafts(
    model: Any, spec: ModelSpec, alone: dict[str, list[EngineOutput]], way: str, num_blocks: int, errors: float,
    depth: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """S2 on the path of a GPU: with lists that do not fit the tables, preemptions, and steps launched before the last
    one's draws are read."""
    texts = [[*r.token_ids, *tokens_of(alone[r.request_id])] for r in asked()]
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device(texts, errors))
    requests = asked(4 if num_blocks < 200 else None)
    drafted, scheduler = serve(model, spec, requests, num_blocks=num_blocks, depth=depth, way=way, speculates=True)
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks < 200)
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_accepted_tokens > 20
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (errors == 0.0)
    for name, wanted in alone.items():
        got = drafted[name]
        assert tokens_of(got) == tokens_of(wanted), name
        assert got[-1].finish_reason == wanted[-1].finish_reason
        scores = [[s for output in outputs for s in output.logprobs] for outputs in (got, wanted)]
        assert [s.token_ids for s in scores[0]] == [s.token_ids for s in scores[1]]
        for ours, theirs in zip(*scores, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


# ---- widths and shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "draws", "support"),
    [(256, 4096, 256, 15), (512, 4096, 256, 15), (8, 2048, 64, 15), (2, 2048, 32, 15), (1, 2048, 16, 15),
     (64, 24, 24, 15), (64, 10, 10, 7), (64, 4, 4, 3), (64, 3, 3, 0)],
)  # fmt: skip
def test_support_follows_the_size_of_a_step(max_num_seqs: int, budget: int, draws: int, support: int) -> None:
    assert most_draws(max_num_seqs, budget) == draws
    told = draft_support(draws)
    assert (told.most, told.proposes, bool(told.why_none)) == (support, support > 0, support == 0)
    assert all(shape.tokens <= draws for shape in draft_shapes(range(1, max_num_seqs + 1), draws))
    widths = {shape.drafts for shape in draft_shapes([max_num_seqs], draws)}
    assert widths == {width for width in DRAFT_WIDTHS if width < draws}


@pytest.mark.parametrize(
    ("wanted", "runnable", "width"),
    [(1, {3, 7, 15}, 3), (3, {3, 7, 15}, 3), (4, {3, 7, 15}, 7), (15, {3, 7, 15}, 15), (8, {3, 7}, 7), (2, {7}, 7),
     (8, {3}, 3), (5, set(), 0)],
)  # fmt: skip
def test_a_step_has_the_width_that_holds_its_drafts_or_the_largest_there_is(
    wanted: int, runnable: set[int], width: int
) -> None:
    assert fitting_width(wanted, sorted(runnable)) == width


def test_rows_keep_the_drafts_that_fit() -> None:
    rows = tuple(Row(slot, f"r{slot}", 9, 1 + count, (), True, (), None, count) for slot, count in enumerate((0, 2, 9)))
    fewer = narrowed(StepPlan(1, rows), 3).rows
    assert [(row.num_drafts, row.num_scheduled_tokens) for row in fewer] == [(0, 1), (2, 3), (3, 4)]


def test_recorded_shapes_have_few_widths() -> None:
    shapes = [shape for shape in capture_shapes(64, 2048, 64) if shape.drafts]
    by_width = {width: [shape.rows for shape in shapes if shape.drafts == width] for width in DRAFT_WIDTHS}
    assert by_width == {3: [1, 2, 4, 8, 16], 7: [1, 2, 4, 8], 15: [1, 2, 4]}
    assert not any(shape.drafts for shape in capture_shapes(64, 2048))


# ---- one step --------------------------------------------------------------------------------------------------------


def open_runner(model: Any, spec: ModelSpec, **options: Any) -> TorchRunner:
    cache = KVCache(spec, of_each(spec, 40), 8, CPU, "float32")
    return TorchRunner(
        model, spec, cache, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=8, device=CPU,
        **options,
    )  # fmt: skip


def steps_of(runner: TorchRunner) -> DeviceSteps:
    assert isinstance(runner._steps, DeviceSteps)
    return runner._steps


def staged_of(runner: TorchRunner) -> StagedInputs:
    assert isinstance(runner._inputs, StagedInputs)
    return runner._inputs


def enter(runner: TorchRunner, *texts: Sequence[int], step: int = 1) -> None:
    """Run the texts as prompts up to their last token. Each has blocks for 32 tokens."""
    groups = len(runner.num_blocks)
    news = tuple(NewSlot(slot, f"r{slot}", text, len(text), GREEDY, (), 0, max_drafts=15)
                 for slot, text in enumerate(texts))  # fmt: skip
    rows = tuple(
        Row(slot, f"r{slot}", 0, len(text) - 1, (tuple(range(1 + 4 * slot, 5 + 4 * slot)),) * groups, False)
        for slot, text in enumerate(texts)
    )
    runner.forward(StepPlan(step, rows, news))
    runner.sample(StepPlan(step, rows, news)).result()


def run(runner: TorchRunner, plan: StepPlan, masks: TokenMasks | None = None) -> Any:
    runner.forward(plan)
    return runner.sample(plan, masks).result().rows


def add_drafts(runner: TorchRunner, slot: int, drafts: list[int]) -> None:
    """Put drafts behind a slot's known tokens, as a lookup does."""
    ids, known, valid = staged_of(runner).slots
    at = int(known[slot])
    ids[slot, at : at + len(drafts)], valid[slot] = torch.tensor(drafts), len(drafts)


@pytest.mark.parametrize("way", ["staged", "replayed"])
def test_masks_are_those_of_their_places(model: Any, spec: ModelSpec, way: str) -> None:
    """Each of a row's draws has its own mask. A mask of a draft that a narrower step leaves out is not used."""
    runner = open_runner(model, spec, **WAYS[way])
    while runner.use_idle_time():
        pass
    enter(runner, [3, 1, 4, 1, 5])
    run(runner, StepPlan(2, (Row(0, "r0", 4, 1, (), True),)))
    bits = np.zeros((3, -(-spec.vocab_size // 32)), np.int32)
    for place, token in enumerate((10, 11, 12)):
        bits[place, token // 32] = 1 << token % 32
    add_drafts(runner, 0, [10, 11])
    row = Row(0, "r0", 5, 3, (), True, (), None, 2)
    (result,) = run(runner, StepPlan(3, (row,)), TokenMasks((0, 0, 0), bits, (0, 1, 2)))
    assert (result.token_ids, result.num_checked) == ((10, 11, 12), 2)
    narrow = runner._row_masks(runner._slots.batch(StepPlan(4, (Row(0, "r0", 8, 2, (), True, (), None, 1),))),
                               TokenMasks((0, 0, 0), bits, (0, 1, 2)))  # fmt: skip
    assert narrow is not None
    assert narrow.rows.tolist() == [0, 1]


def test_a_slot_that_is_taken_again_has_no_drafts(model: Any, spec: ModelSpec) -> None:
    """S5: after the first step of another request in the slot, and after a failed step."""
    runner = open_runner(model, spec, staged=True)
    enter(runner, [1, 2, 3])
    run(runner, StepPlan(2, (Row(0, "r0", 2, 1, (), True),), propose=15))
    staged = staged_of(runner)
    add_drafts(runner, 0, [1, 2, 3])
    new = NewSlot(0, "other", [4, 5, 6, 7], 4, GREEDY, (), 0, max_drafts=15)
    groups = len(runner.num_blocks)
    plan = StepPlan(3, (Row(0, "other", 0, 2, ((9, 10),) * groups, False),), (new,), (0,))
    runner.forward(plan)
    assert staged.slots.valid.tolist() == [0] * 4
    runner.sample(plan).result()
    add_drafts(runner, 0, [1, 2, 3])
    runner.reset()
    assert staged.slots.valid.tolist() == [0] * 4


def test_a_row_verifies_no_more_drafts_than_it_has(model: Any, spec: ModelSpec) -> None:
    """A row that the scheduler gives 9 drafts, of which 2 exist, beside one that has none, and one with a wrong one."""
    runner = open_runner(model, spec, staged=True)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
    plain = open_runner(model, spec, staged=True)
    for each in (plain, runner):
        enter(each, *texts)
    drawn: list[list[int]] = [[], [], []]
    for step in range(4):
        rows = tuple(Row(s, f"r{s}", len(text) - 1 + step, 1, (), True) for s, text in enumerate(texts))
        for tokens, result in zip(drawn, run(plain, StepPlan(2 + step, rows)), strict=True):
            tokens += result.token_ids
    run(runner, StepPlan(2, tuple(Row(s, f"r{s}", len(text) - 1, 1, (), True) for s, text in enumerate(texts))))
    add_drafts(runner, 0, drawn[0][1:3])
    add_drafts(runner, 2, [drawn[2][1], (drawn[2][2] + 1) % 400])
    rows = tuple(Row(s, f"r{s}", len(text), 1 + n, (), True, (), None, n)
                 for s, (text, n) in enumerate(zip(texts, (9, 0, 9), strict=True)))  # fmt: skip
    results = run(runner, StepPlan(3, rows, propose=15))
    assert [result.token_ids for result in results] == [tuple(drawn[0][1:4]), (drawn[1][1],), tuple(drawn[2][1:3])]
    assert [result.num_checked for result in results] == [2, 0, 2]
    assert staged_of(runner).slots.known[:3].tolist() == [len(t) + n for t, n in zip(texts, (4, 2, 3), strict=True)]


def test_no_step_has_a_width_that_was_not_recorded(model: Any, spec: ModelSpec) -> None:
    """S12: before a shape is recorded, rows verify the drafts that a recorded one holds, or none."""
    recorded: list[Any] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        recorded.append(step)
        return step

    runner = open_runner(model, spec, capture=capture)
    steps = steps_of(runner)

    def width(rows: int, wanted: int) -> int:
        plan = StepPlan(1, tuple(Row(s, f"r{s}", 9, 1 + wanted, (), True, (), None, wanted) for s in range(rows)))
        narrow, chosen = steps.narrowed(plan)
        most = max(row.num_drafts for row in narrow.rows)
        assert most <= chosen
        return most

    assert width(1, 7) == 0, "nothing is recorded"
    runner.warm_up()
    assert width(1, 2) == 2
    assert width(1, 7) == 3, "the first width alone is recorded before the server is ready"
    count = len(recorded)
    for _ in range(2 * STEPS_PER_CAPTURE):
        width(1, 2)
    assert len(recorded) == count, "under load nothing is recorded that this step does not need"
    for _ in range(STEPS_PER_CAPTURE):
        width(1, 7)
    assert (len(recorded), width(1, 7)) == (count + 1, 7)
    while runner.use_idle_time():
        pass
    assert (width(1, 7), width(1, 15), width(4, 15), width(4, 9)) == (7, 15, 15, 9)
    assert steps._graphs is not None
    assert {shape.drafts for shape in steps._graphs._replays} == {0, *DRAFT_WIDTHS}
    enter(runner, [3, 1, 4])
    run(runner, StepPlan(2, (Row(0, "r0", 2, 1, (), True),)))
    before, count = runner.stats(), len(recorded)
    run(runner, StepPlan(3, (Row(0, "r0", 3, 6, (), True, (), None, 5),), propose=15))
    assert runner.stats().replayed_steps == before.replayed_steps + 1
    assert len(recorded) == count


def test_a_step_runs_in_the_recorded_width_that_was_chosen_for_it(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the smallest width that holds the drafts cannot be recorded, a wider one that was recorded is replayed."""
    parts = DeviceSteps._parts

    def without_the_first_width(self: DeviceSteps, shape: StepShape) -> Any:
        if shape.drafts == DRAFT_WIDTHS[0]:
            raise ValueError("cannot be recorded")
        return parts(self, shape)

    monkeypatch.setattr(DeviceSteps, "_parts", without_the_first_width)
    runner = open_runner(model, spec, capture=lambda step: step)
    runner.warm_up()
    while runner.use_idle_time():
        pass
    enter(runner, [3, 1, 4])
    run(runner, StepPlan(2, (Row(0, "r0", 2, 1, (), True),)))
    before = runner.stats()
    add_drafts(runner, 0, [1, 2])
    (result,) = run(runner, StepPlan(3, (Row(0, "r0", 3, 3, (), True, (), None, 2),)))
    assert result.num_checked == 2
    assert steps_of(runner)._shape == StepShape(1, drafts=DRAFT_WIDTHS[1])
    assert runner.stats().replayed_steps == before.replayed_steps + 1


@pytest.mark.parametrize(("budget", "shapes", "graphs"), [(2048, 75, 225), (8192, 78, 228)])
def test_the_default_ladder_has_few_graphs(model: Any, spec: ModelSpec, budget: int, shapes: int, graphs: int) -> None:
    recorded: list[Replay] = []

    def record(step: Replay) -> Replay:
        recorded.append(step)
        return step

    cache = KVCache(spec, of_each(spec, 40), 8, CPU, "float32")
    runner = TorchRunner(
        model, spec, cache, max_num_seqs=256, max_num_batched_tokens=budget, max_model_len=64, block_size=8, device=CPU,
        capture=record,
    )  # fmt: skip
    ladder = steps_of(runner)._graphs
    assert ladder is not None
    while ladder.capture_next():
        pass
    assert (len(ladder), len(recorded)) == (shapes, graphs)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_without_masks_replays_one_graph(model: Any, spec: ModelSpec, drafts: int) -> None:
    """Where masks may come, tokens are drawn when they have come."""
    runner = open_runner(model, spec, capture=lambda step: step)
    runner.warm_up()
    while runner.use_idle_time():
        pass
    graphs, replayed = steps_of(runner)._graphs, []
    assert graphs is not None
    for parts in graphs._replays.values():
        for part, replay in parts.items():
            parts[part] = lambda part=part, replay=replay: (replayed.append(part), replay())  # type: ignore[misc]
    results = {}
    for is_unmasked in (True, False):
        enter(runner, [3, 1, 4, 1, 5, 3, 1, 4])
        if drafts:
            run(runner, StepPlan(2, (Row(0, "r0", 7, 1, (), True),), propose=15))
        add_drafts(runner, 0, [2] * drafts)
        at = 7 + bool(drafts)
        replayed.clear()
        row = Row(0, "r0", at, 1 + drafts, (), True, (), None, drafts)
        (result,) = run(runner, StepPlan(3, (row,), propose=15, is_unmasked=is_unmasked))
        results[is_unmasked] = result._replace(num_checked=0)
        assert replayed == [FEATURE_SETS[0] if is_unmasked else FORWARD]
        assert result.num_checked == drafts
        runner.forward(StepPlan(4, (), (), (0,)))
        runner.reset()
    assert results[True] == results[False]


def test_steps_with_a_prompt_or_with_long_lists_have_no_drafts(model: Any, spec: ModelSpec) -> None:
    runner = open_runner(model, spec, staged=True)
    enter(runner, [3, 1, 4], [5, 6, 7, 8])
    words = tuple((token,) for token in range(MAX_WORDS + 1))
    new = NewSlot(2, "r2", [1], 1, GREEDY, (), 0, bad_words_token_ids=words)
    runner.forward(StepPlan(2, (), (new,)))
    drafted, groups = Row(0, "r0", 2, 4, (), True, (), None, 3), len(runner.num_blocks)
    beside = {
        "another": (Row(1, "r1", 3, 1, (), True), 3),
        "a prompt": (Row(1, "r1", 2, 2, (), True), 0),
        "long lists": (Row(2, "r2", 0, 1, ((20,),) * groups, True), 0),
    }
    for name, (row, drafts) in beside.items():
        plan, _ = steps_of(runner).narrowed(StepPlan(3, (drafted, row)))
        assert plan.rows[0].num_drafts == drafts, name
