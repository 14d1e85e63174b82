"""Places of experts in a tuning run: which are tried, the loads that they take, and what is loaded afterwards.

The simulated device is the CPU with the experts of some layers in an arena, as they are in RAM beside a GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import DoesNotFit, UnsupportedOption
from localllm.models import fit
from localllm.models.fit import MemoryPlan, plan_memory
from localllm.models.fit.far import LookupTables, far_plan, last_layers
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.model_spec import ModelSpec
from localllm.serving import reopen
from localllm.tuning import trial as trial_module
from localllm.tuning.figures import Trial
from localllm.tuning.goals import Goal, goal_of
from localllm.tuning.profile import profile_of
from localllm.tuning.run import Event, PhaseBegan, TrialBegan, TuneOptions, TuningResult, TuningRun, remaining_time
from localllm.tuning.space import Placements, placements_of
from localllm.tuning.trial import TrialRunner
from localllm.tuning.words import load_in_words, settings_in_short, settings_in_words
from tests.marks import needs_library
from tests.models.harness import GIB
from tests.models.large_models import GPT_OSS_120B, G, desk, sized
from tests.serving import answer
from tests.tiny import make_tiny_model

pytestmark = needs_library

GOAL = replace(goal_of("chat"), prompt_len=24, output_len=6, rounds=2)
SEARCHED = frozenset({"kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype"})
OPTIONS = TuneOptions(trial_s=0.1, soak_s=0.0, fixed=SEARCHED, placements="on")


# ---- the places to try -----------------------------------------------------------------------------------------------


def on_a_desk(**asked: Any) -> tuple[MemoryPlan, EngineConfig]:
    spec, config = spec_of_config(GPT_OSS_120B), EngineConfig(**asked)
    return plan_memory(config, spec, 10 * GIB, desk(96), resident_bytes=sized(spec, 4.25, 3.07 * G)), config


def places(made: tuple[MemoryPlan, EngineConfig], *fixed: str, asked: Any = "auto", **running: Any) -> Placements:
    return placements_of(*made, fixed, running, asked, is_mixture=True)


def test_layers_on_both_sides_of_the_plan_and_all_of_them_are_tried() -> None:
    plan, config = made = on_a_desk()
    assert plan.far is not None
    count = len(plan.far.layers)
    found = places(made)
    assert found.loaded == {"n_cpu_moe": "auto"}
    numbers = [each["n_cpu_moe"] for each in found.others]
    assert numbers == [f"{count + more}" for more in (-2, -1, 1, 2) if count + more < 36] + ["all"]
    for each in found.others:
        assert replace(config, **each).placement != config.placement
    assert places(on_a_desk(n_cpu_moe="all")).others[-1] == {"n_cpu_moe": "35"}


def test_a_place_that_a_flag_says_is_left_alone_unless_it_is_asked_for() -> None:
    made = on_a_desk(n_cpu_moe="30")
    assert places(made, "n_cpu_moe") == Placements({})
    assert len(places(made, "n_cpu_moe", asked="on").others) == 5
    assert places(made, "n_cpu_moe", asked="off") == Placements({})
    with pytest.raises(UnsupportedOption, match="--placements on is not supported here"):
        places(on_a_desk(cpu_moe=True), "cpu_moe", asked="on")


def test_every_trial_has_the_place_of_the_profile_in_use() -> None:
    assert places(on_a_desk(n_cpu_moe="30"), asked="off", n_cpu_moe="30").loaded == {"n_cpu_moe": "30"}


def test_experts_on_disk_may_be_in_ram_or_have_another_cache() -> None:
    spec, config = spec_of_config(GPT_OSS_120B), EngineConfig(device="cpu", weights_on="disk")
    plan = plan_memory(config, spec, 10 * GIB, desk(48), resident_bytes=sized(spec, 4.25, 3.07 * G))
    assert plan.far is not None
    assert plan.far.disk is not None
    found = places((plan, config), asked="on")
    assert found.loaded == {"weights_on": "disk", "expert_cache_gib": 0.0}
    ram, small, large = found.others
    assert ram == {"weights_on": "ram", "expert_cache_gib": 0.0}
    gib = plan.far.disk.cache_bytes / GIB
    assert small["expert_cache_gib"] == pytest.approx(gib / 2, abs=1e-3)
    assert large["expert_cache_gib"] == pytest.approx(1.25 * gib, abs=1e-3)
    assert places((plan, config), "weights_on").others == (small, large)
    assert settings_in_words(ram) == "experts in RAM, expert cache automatic"
    assert settings_in_short(small) == f"experts on disk expert cache {small['expert_cache_gib']}"


def test_a_model_without_experts_elsewhere_has_one_place() -> None:
    assert places(on_a_desk(device="cpu")) == Placements({})
    assert places(on_a_desk(device="cpu"), asked="on").others == ({"weights_on": "disk"},)
    with pytest.raises(UnsupportedOption, match="none of its experts can be elsewhere"):
        placements_of(*on_a_desk(device="cpu"), (), {}, "on", is_mixture=False)


# ---- disk and RAM on a CPU -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("placed") / "model", "qwen3_moe", num_hidden_layers=5,
                           mlp_only_layers=[], num_experts=8)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def loaded(path: Path, **asked: Any) -> TrialRunner:
    config = EngineConfig(
        model=str(path), device="cpu", max_model_len=256, kv_cache_memory_bytes=1 << 20, profile="none", **asked
    )
    return TrialRunner.load(Settings(config))


def is_on_disk(runner: TrialRunner) -> bool:
    far = runner.bare.served.plan.far
    return far is not None and far.disk is not None


def tuned(runner: TrialRunner, options: TuneOptions = OPTIONS, goal: Goal = GOAL) -> tuple[TuningResult, list[Event]]:
    run = TuningRun(runner, goal, options)
    return run.start(), run.events


def trials_of(result: TuningResult, **settings: Any) -> list[Trial]:
    return [each for each in result.trials if settings.items() <= dict(each.settings).items()]


def scored_by(favourite: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one value of a setting ten times as good as the others. Everything else runs as always, without haste."""
    measured = TrialRunner._measured

    def rigged(self: TrialRunner, trial: Trial, goal: Goal, seed: int, deadline_s: Any, should_stop: Any) -> Trial:
        found = measured(self, trial, goal, seed, None, should_stop)
        return replace(found, score=100.0 if found.settings[name] == favourite else 10.0) if found.figures else found

    monkeypatch.setattr(TrialRunner, "_measured", rigged)


def test_experts_on_disk_are_tried_in_ram_and_recommended_there(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_by("ram", "weights_on", monkeypatch)
    runner = loaded(path, weights_on="disk")
    result, events = tuned(runner, replace(OPTIONS, soak_s=0.2))
    in_ram, on_disk = trials_of(result, weights_on="ram"), trials_of(result, weights_on="disk")
    assert [each.fate for each in in_ram] == ["measured"] * 2
    assert in_ram[0].reload_s > 0 == in_ram[1].reload_s
    assert result.pick is not None
    assert (result.pick.settings["weights_on"], result.gain, result.is_clear) == ("ram", 9.0, True)
    assert result.soak is not None
    assert result.soak.passed
    assert on_disk[-1].number > in_ram[-1].number, "the former place is measured again at the end"
    assert on_disk[-1].reload_s > 0
    assert is_on_disk(runner)
    assert result.reload_s == sum(each.reload_s for each in result.trials) < result.seconds
    assert result.grid_size == 3, "in RAM, and with a smaller cache"
    phases = [each.name for each in events if isinstance(each, PhaseBegan)]
    assert phases[-2:] == ["placement", "soak"]
    loads = [load_in_words(each) for each in events if isinstance(each, TrialBegan) if each.reload_s]
    assert len(loads) == 3
    assert all(words.startswith("the model is loaded again, about ") for words in loads)
    profile = profile_of(result, runner, "mine", applied=True)
    assert profile.settings == {"weights_on": "ram"}


def test_another_place_that_is_not_clearly_better_is_not_recommended(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_by("disk", "weights_on", monkeypatch)
    result, _ = tuned(loaded(path, weights_on="disk"))
    assert result.pick is not None
    assert result.pick.settings["weights_on"] == "disk"
    assert len(trials_of(result, weights_on="ram")) == 1, "a place that is worse is measured once"


def test_loads_have_a_budget_and_what_is_left_out_is_named(path: Path, cache: None) -> None:
    runner = loaded(path, weights_on="disk")
    before = runner.bare.executor
    run = TuningRun(runner, GOAL, replace(OPTIONS, reload_s=runner.reload_s))
    result = run.start()
    left_out, *others = result.trials[-len(run.places.others) :]
    assert all(each.fate == "not tried" for each in others)
    assert (left_out.fate, left_out.score) == ("not tried", None)
    assert "loading the model so and back takes about" in left_out.why
    assert runner.bare.executor is before
    assert result.reload_s == 0


def test_a_later_run_leaves_out_what_an_earlier_one_found_hopeless(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_by("disk", "weights_on", monkeypatch)
    runner = loaded(path, weights_on="disk")
    first, _ = tuned(runner)
    [measured] = trials_of(first, weights_on="ram")
    free = replace(OPTIONS, placements="auto")
    run = TuningRun(runner, GOAL, free)
    again = run.start()
    [left_out] = trials_of(again, weights_on="ram")
    assert left_out.fate == "not tried"
    assert "it reached 10% of the score; --placements on measures it again" in left_out.why
    assert run.kept is not None
    known = run.kept.get(measured.settings)
    assert known is not None
    assert known.load_s == pytest.approx(measured.reload_s, abs=0.001)
    other = TuningRun(runner, replace(GOAL, name="share"), free)
    assert trials_of(other.start(), weights_on="ram")[0].fate == "measured", "for another goal nothing is known"
    run.kept.path.write_text("{")
    assert trials_of(TuningRun(runner, GOAL, free).start(), weights_on="ram")[0].fate == "measured"


def test_the_remaining_time_counts_loads(path: Path, cache: None) -> None:
    runner = loaded(path, weights_on="disk")
    run, without = (TuningRun(runner, GOAL, replace(OPTIONS, placements=each)) for each in ("on", "off"))
    for each in (run, without):
        each.searched = each.space()[0]
    with_loads, plain = remaining_time(run), remaining_time(without)
    assert with_loads is not None
    assert plain is not None
    assert with_loads.left_s - plain.left_s >= 2 * runner.reload_s


def test_a_place_that_does_not_fit_is_refused_by_name_and_not_loaded(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(path, weights_on="disk", expert_cache_gib=0.0005)
    places, build = list[str](), reopen.build_engine

    def spy(settings: Settings, *args: Any) -> Any:
        places.append(settings.engine.weights_on)
        return build(settings, *args)

    monkeypatch.setattr(reopen, "build_engine", spy)
    low, high = 0, 1 << 44
    while high - low > 1024:  # of RAM, with which the experts just fit
        middle = (low + high) // 2
        runner.hardware = replace(runner.hardware, ram_available_bytes=middle)
        try:
            runner.plan({"weights_on": "ram", "expert_cache_gib": 0.0})
            high = middle
        except DoesNotFit:
            low = middle
    runner.hardware = replace(runner.hardware, ram_available_bytes=low - 1024)
    result, _ = tuned(runner)
    [refused] = trials_of(result, weights_on="ram")
    assert refused.fate == "does not fit"
    assert "does not fit" in refused.why
    assert (refused.reload_s, refused.figures) == (0.0, None)
    assert "ram" not in places


def test_a_load_that_fails_is_a_result_and_the_model_is_loaded_as_before(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(path, weights_on="disk")
    before = answer_of(runner, {})
    build = reopen.build_engine

    def greedy(settings: Settings, *args: Any) -> Any:
        if settings.engine.weights_on == "ram":
            raise MemoryError("no pages")
        return build(settings, *args)

    monkeypatch.setattr(reopen, "build_engine", greedy)
    seen = runner.run(1, {"weights_on": "ram"}, GOAL)
    assert (seen.fate, seen.why) == ("out of memory", "no pages")
    assert not runner.is_placed({"weights_on": "ram"})
    assert not runner.is_placed({}), "its weights were freed before"
    again = runner.run(2, {}, GOAL)
    assert again.fate == "measured"
    assert again.reload_s > 0
    assert answer_of(runner, {}) == before


def test_a_run_that_is_cancelled_during_a_load_ends_with_what_was_measured(
    path: Path, cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(path, weights_on="disk")
    run = TuningRun(runner, GOAL, OPTIONS, lambda event: run.cancel() if _loads(event) else None)
    result = run.start()
    assert result.was_cancelled
    assert result.pick is not None
    assert result.pick.settings["weights_on"] == "disk"
    assert not trials_of(result, weights_on="ram")
    assert runner.run(1, {}, GOAL).fate == "measured"


def _loads(event: Event) -> bool:
    return isinstance(event, TrialBegan) and event.reload_s > 0


def answer_of(runner: TrialRunner, settings: dict[str, Any]) -> list[int]:
    model = runner.open(settings)
    try:
        return answer(model, 12)
    finally:
        model.close_engine()


# ---- the simulated device --------------------------------------------------------------------------------------------


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds the experts of three of five layers, and of no more."""

    def plan(
        config: EngineConfig, spec: ModelSpec, *args: Any, resident_bytes: Any, far: Any = None, **more: Any
    ) -> Any:
        made = plan_memory(
            replace(config, n_cpu_moe="auto"), spec, *args, resident_bytes=resident_bytes, far=far, **more
        )
        if far is None:
            experts = resident_bytes.experts("cpu", made.dtype, None)
            count = min(len(experts), config.far_layers if config.far_layers is not None else 2)
            if count < 2:
                why = f"The experts of {len(experts) - count} layers are more than it holds."
                raise DoesNotFit("The model does not fit on this GPU.", why, "--n-cpu-moe 2")
            far = far_plan(experts, last_layers(experts, count), spec, LookupTables())
            far = replace(far, num_layers=len(experts))
            made = replace(made, weights_bytes=made.weights_bytes - far.gpu_bytes)
        return replace(made, far=far)

    monkeypatch.setattr(fit, "plan_memory", plan)
    monkeypatch.setattr(trial_module, "plan_memory", plan)


def test_layers_move_between_the_device_and_ram(path: Path, simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_by("3", "n_cpu_moe", monkeypatch)
    runner = loaded(path)
    before = answer_of(runner, {})
    far = runner.bare.served.plan.far
    assert far is not None
    assert far.layers == (3, 4)
    result, _ = tuned(runner, replace(OPTIONS, placements="auto"))
    fates = {each.settings["n_cpu_moe"]: (each.fate, each.reload_s > 0) for each in reversed(result.trials)}
    assert fates == {
        "auto": ("measured", False), "0": ("does not fit", False), "1": ("does not fit", False),
        "3": ("measured", True), "4": ("measured", True), "all": ("measured", True),
    }  # fmt: skip
    assert result.pick is not None
    assert (result.pick.settings["n_cpu_moe"], result.is_clear) == ("3", True)
    assert "does not fit on this GPU" in trials_of(result, n_cpu_moe="1")[0].why
    moved = answer_of(runner, {"n_cpu_moe": "4"})
    far = runner.bare.served.plan.far
    assert far is not None
    assert far.layers == (1, 2, 3, 4)
    assert moved == before == answer_of(runner, {"n_cpu_moe": "auto"})
