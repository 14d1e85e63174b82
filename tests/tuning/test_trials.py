"""Trials on a tiny model: each leaves the weights and nothing else, and whatever goes wrong is a result."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.settings import EngineConfig, Settings
from localllm.engine.client import EngineClient
from localllm.runner.runner import TorchRunner
from localllm.serving.served import ServedModel, WrongTask
from localllm.tuning import drive, run
from localllm.tuning.figures import LoadMetrics, Trial, pareto
from localllm.tuning.goals import GoalLimits, goal_of
from localllm.tuning.run import (
    BestChanged,
    PhaseBegan,
    RunEnded,
    SoakEnded,
    TrialBegan,
    TrialEnded,
    TuneOptions,
    TuningRun,
)
from localllm.tuning.soak import soak
from localllm.tuning.trial import TrialRunner
from localllm.tuning.words import drafts_gain, gain_in_words
from tests.models.pooling.checkpoints import save_bert
from tests.serving import spy_on_closing

stats = EngineClient.stats
GOAL = replace(goal_of("chat"), prompt_len=24, output_len=6, rounds=2)
QUICK = TuneOptions(
    trial_s=0.1, soak_s=0.3, fixed=frozenset({"kv_cache_memory_bytes", "max_num_seqs", "kv_cache_dtype"})
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TrialRunner:
    from tests.tiny import make_tiny_model

    path = make_tiny_model(tmp_path_factory.mktemp("tuned") / "tiny-llama", "llama")
    config = EngineConfig(
        model=str(path), device="cpu", max_model_len=256, kv_cache_memory_bytes=1 << 20, profile="none"
    )
    return TrialRunner.load(Settings(config))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TorchRunner]]:
    """Whatever a test opens on the weights is closed when it ends."""
    runners: list[TorchRunner] = []
    closed = spy_on_closing(monkeypatch)
    make = TrialRunner.open

    def spy(self: TrialRunner, settings: Any) -> ServedModel:
        model = make(self, settings)
        assert isinstance(model.loop.runner, TorchRunner)
        runners.append(model.loop.runner)
        return model

    monkeypatch.setattr(TrialRunner, "open", spy)
    yield runners
    assert {id(each) for each in runners} <= {id(each) for each in closed}


def test_a_trial_measures_what_its_goal_asks(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    seen = runner.run(1, {"max_num_seqs": 4}, GOAL)
    assert seen.fate == "measured", seen.why
    assert seen.figures is not None
    assert seen.predicted is not None
    assert seen.figures.num_requests == 2 * GOAL.streams
    assert seen.figures.context == seen.predicted.context == 256
    assert seen.score == pytest.approx(GOAL.score(seen.figures))
    assert 0 < (seen.figures.ttft_p50_s or 0) <= (seen.figures.ttft_p95_s or 0)
    assert seen.cost_s > seen.figures.duration_s
    assert len(opened) == 1


def test_the_same_weights_answer_under_other_settings(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    """What the next trial opens computes with the tensors that the last one used."""
    models = []
    for settings in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 64}):
        served = runner.open(settings)
        models.append(served.executor.model)  # type: ignore[union-attr]
        served.close_engine()
    assert models[0] is models[1] is runner.bare.executor.model
    assert len(opened) == 2


def test_what_does_not_fit_is_refused_by_arithmetic(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    seen = runner.run(1, {"kv_cache_memory_bytes": 1 << 50}, GOAL)
    assert seen.fate == "does not fit"
    assert "1024 TiB" in seen.why
    assert runner.run(2, {}, GOAL, floor=512).why == "its context of 256 is below the minimum of 512"
    tight = replace(GOAL, limits=GoalLimits(max_memory_bytes=1000))
    assert runner.run(3, {}, tight).fate == "over a limit"
    assert not opened


def test_a_trial_out_of_memory_is_a_result(
    runner: TrialRunner, opened: list[TorchRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device refuses in the middle of a step; the next trial finds everything as it was."""
    forward = runner.bare.executor.model.forward

    def greedy_forward(inputs: Any, kv_cache: Any) -> Any:
        if len(inputs.token_ids) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return forward(inputs, kv_cache)

    monkeypatch.setattr(runner.bare.executor.model, "forward", greedy_forward)
    large, small = (
        runner.run(1, {"max_num_batched_tokens": 64}, GOAL),
        runner.run(2, {"max_num_batched_tokens": 16}, GOAL),
    )
    assert (large.fate, small.fate) == ("out of memory", "measured")
    assert "ran out of memory" in large.why
    assert large.score is None


def test_memory_that_is_refused_at_the_opening_is_a_result(
    runner: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise MemoryError("no pages")

    with monkeypatch.context() as patch:
        patch.setattr(TorchRunner, "warm_up", refuse)
        assert runner.run(1, {}, GOAL).fate == "out of memory"
    assert runner.run(2, {}, GOAL).fate == "measured"


def test_a_machine_that_runs_low_ends_the_trial_before_the_kernel_does(
    runner: TrialRunner, opened: list[TorchRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "LEAST_FREE_BYTES", 1 << 60)
    assert runner.run(1, {}, GOAL).fate == "out of memory"


def test_a_hopeless_trial_is_given_up(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    long = replace(GOAL, rounds=200)
    seen = runner.run(1, {}, long, deadline_s=0.05)
    assert seen.fate == "given up"
    assert seen.cost_s < 5


def test_a_limit_that_is_broken_is_told_with_its_figures(runner: TrialRunner) -> None:
    seen = runner.run(1, {}, replace(GOAL, limits=GoalLimits(max_ttft_s=1e-9)))
    assert seen.fate == "over a limit"
    assert "to the first token" in seen.why
    assert seen.figures is not None
    assert not seen.was_measured


def test_a_cache_that_says_the_same_agrees_wholly(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    same = runner.agreement({}, {"max_num_batched_tokens": 64})
    assert same.share == 1.0
    assert same.is_enough
    assert 0.0 <= runner.agreement({}, {"kv_cache_dtype": "fp8"}).share <= 1.0


def test_a_soak_fills_the_context_and_loses_nothing(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    report = soak(runner, {"max_num_seqs": 4, "max_num_batched_tokens": 64}, 0.5)
    assert report.passed, report.why
    assert report.cancelled > 0
    assert report.longest_tokens == 256


def test_a_soak_passes_on_a_machine_that_is_slow(runner: TrialRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes a third of the time there is: somebody is answered, and what runs may end."""
    forward = runner.bare.executor.model.forward

    def slow(inputs: Any, kv_cache: Any) -> Any:
        time.sleep(0.1)
        return forward(inputs, kv_cache)

    monkeypatch.setattr(runner.bare.executor.model, "forward", slow)
    monkeypatch.setattr("localllm.tuning.soak.SETTLE_S", 0.01)
    report = soak(runner, {"max_num_seqs": 2, "max_num_batched_tokens": 16}, 0.3)
    assert report.passed, report
    assert report.finished <= 3


def test_a_soak_sees_blocks_that_are_not_given_back(runner: TrialRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "stats", lambda self: replace(stats(self), used_blocks=7))
    monkeypatch.setattr("localllm.tuning.soak.SETTLE_S", 0.05)
    report = soak(runner, {"max_num_seqs": 2}, 0.2)
    assert not report.passed
    assert report.why == "7 KV blocks were not freed, 0 requests are still running"


def test_a_soak_sees_a_step_that_fails(runner: TrialRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the longest context runs out of memory: no trial would have found it."""
    forward = runner.bare.executor.model.forward

    def fails_late(inputs: Any, kv_cache: Any) -> Any:
        if int(inputs.positions.max()) > 200:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(inputs, kv_cache)

    monkeypatch.setattr(runner.bare.executor.model, "forward", fails_late)
    report = soak(runner, {"max_num_seqs": 2}, 0.3)
    assert not report.passed
    assert "out of memory" in report.why


def test_a_run_goes_from_a_goal_to_a_pick_that_was_soaked(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    told: list[Any] = []
    tuning = TuningRun(runner, GOAL, QUICK, told.append)
    result = tuning.start()
    assert result is tuning.result
    assert told == tuning.events
    assert isinstance(told[-1], RunEnded)
    assert [event.name for event in told if isinstance(event, PhaseBegan)] == ["calibrate", "search", "soak"]
    began, ended = ([e for e in told if isinstance(e, kind)] for kind in (TrialBegan, TrialEnded))
    assert [event.number for event in began] == [event.trial.number for event in ended]
    assert any(isinstance(event, BestChanged) for event in told)
    assert any(isinstance(event, SoakEnded) for event in told)
    assert result.pick is not None
    assert result.soak is not None
    assert result.soak.failures == 0
    assert set(result.pick.settings) == {"max_num_batched_tokens"}  # the others were set
    assert result.pareto
    assert not result.was_cancelled


def test_the_next_best_is_taken_where_the_soak_fails(runner: TrialRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    soaked: list[Any] = []

    def fails_once(runner: TrialRunner, settings: Any, *args: Any, **options: Any) -> Any:
        soaked.append(settings)
        return replace(soak(runner, settings, 0.2), failures=int(len(soaked) == 1))

    monkeypatch.setattr(run, "soak", fails_once)
    result = TuningRun(runner, GOAL, QUICK).start()
    assert len(soaked) == 2
    assert result.pick is not None
    assert result.pick.settings == soaked[1] != soaked[0]


def test_a_run_for_edits_says_what_drafts_bring(runner: TrialRunner) -> None:
    goal = replace(goal_of("edit"), prompt_len=48, output_len=12, rounds=2)
    fixed = QUICK.fixed | {"max_num_batched_tokens"}
    result = TuningRun(runner, goal, replace(QUICK, soak_s=0.0, fixed=fixed)).start()
    assert {trial.settings["speculative"] for trial in result.trials} == {"auto", "off"}
    assert result.pick is not None
    on = replace(result, pick=replace(result.pick, settings={"speculative": "auto"}))
    assert drafts_gain(on) is not None
    assert " compared with the same settings without drafts" in gain_in_words(on)
    off = replace(result, pick=replace(result.pick, settings={"speculative": "off"}))
    assert drafts_gain(off) is None
    scores = [Trial(0, {"speculative": each}, 0.25, "measured", score=n) for each, n in (("auto", 30.0), ("off", 20.0))]
    told = replace(on, trials=tuple(scores), noise=0.1)
    assert drafts_gain(told) == pytest.approx(0.5)
    assert "; drafts: +50% compared with" in gain_in_words(told)
    assert "; drafts: no clear gain compared with" in gain_in_words(replace(told, noise=0.6))
    assert drafts_gain(replace(on, trials=(scores[0], replace(scores[1], effort=1.0)))) is None


def test_a_trial_has_drafts_or_none_as_its_settings_say(runner: TrialRunner) -> None:
    for asked, is_on in (("auto", True), ("off", False)):
        model = runner.open({"speculative": asked})
        try:
            assert model.loop.scheduler.speculation is not None
            assert model.loop.scheduler.speculation.stats().is_on == is_on
        finally:
            model.close_engine()


def test_a_cancelled_run_keeps_what_was_measured(runner: TrialRunner, opened: list[TorchRunner]) -> None:
    tuning = TuningRun(runner, GOAL, QUICK)

    def cancel_after_two(event: Any) -> None:
        if isinstance(event, TrialBegan) and event.number == 3:
            tuning.cancel()

    tuning.on_event = cancel_after_two
    result = tuning.start()
    assert result.was_cancelled
    assert len(result.trials) == 2
    assert result.pick in result.trials
    assert result.soak is None


def test_where_nothing_keeps_the_limits_there_is_no_pick(runner: TrialRunner) -> None:
    result = TuningRun(runner, replace(GOAL, limits=GoalLimits(min_context=100_000)), QUICK).start()
    assert result.pick is None
    assert {each.fate for each in result.trials} == {"over a limit"}


def test_a_model_that_writes_nothing_is_not_tuned(tmp_path: Path) -> None:
    path = save_bert(tmp_path / "bert")
    with pytest.raises(WrongTask):
        TrialRunner.load(Settings(EngineConfig(model=str(path), device="cpu", profile="none")))


def figures(tokens_per_s: float, ttft_s: float, context: int) -> LoadMetrics:
    return LoadMetrics(1.0, 1, ttft_s, ttft_s, 0.01, 0.01, 1.0, tokens_per_s, 1.0, 0.0, 0, 0, context)


def test_the_pareto_set_holds_what_nothing_beats() -> None:
    shown = [(100, 0.5, 2048), (80, 0.1, 2048), (70, 0.2, 2048), (60, 0.9, 4096), (100, 0.5, 1024)]
    trials = [
        Trial(i, {"max_num_seqs": i + 1}, 1.0, "measured", figures=figures(*each), score=1.0)
        for i, each in enumerate(shown)
    ]
    failed = Trial(9, {"max_num_seqs": 99}, 1.0, "out of memory")
    assert [each.number for each in pareto([*trials, failed])] == [0, 1, 3]
