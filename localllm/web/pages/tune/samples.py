"""Invented samples of the wizard's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.serving.profiles import Profile, ProfileKey
from localllm.tuning.figures import LoadMetrics, Predicted, Trial
from localllm.tuning.goals import goal_of
from localllm.tuning.run import PhaseBegan, TrialBegan, TuneOptions, TuningResult
from localllm.tuning.soak import SoakReport
from localllm.web.pages.frame import views
from localllm.web.pages.tune import forms, saved_profiles
from localllm.web.pages.tune import views as v
from localllm.web.pages.tune.wizard import Job

GIB = 1 << 30
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_dtype": "auto"}


def samples(shell: views.Shell) -> list[views.View]:
    running, ended, failed, kept = job(), job(), job(with_pick=False), job()
    running.result = None
    ended.stage = failed.stage = kept.stage = "ended"
    assert kept.result is not None
    kept.result = replace(kept.result, pick=kept.result.start, gain=0.0, is_clear=False)
    ended.saved_as, ended.is_applied = "chat", True
    card = v.goal_card(goal_of("chat"), "demo")
    rows = (_plan("matches", "Every start uses it."), _plan("differs", "Not used: torch was 2.8.0 and is 2.9.0."))
    steps = v.steps("run")
    empty = Job("demo", "demo", goal_of("chat"), TuneOptions(), 0.0)
    limits = v.LimitsPage(
        shell, v.steps("limits"), "demo", card, forms.LimitFields(max_ttft="2"),
        (v.Effort("quick", "Quick", "trials of about 3 s", True), v.Effort("full", "Full", "trials of about 12 s")),
        True, "60 s unless you set another", v.context_note(goal_of("chat"), 40960), 2, "30 s",
        v.PlacesOffer("Layers in RAM 26; layers in RAM all", "Each loads demo again, which took 41 s last time.", True),
    )  # fmt: skip
    return [
        steps,
        card,
        saved_profiles.ProfileTable(()),
        saved_profiles.ProfileTable(rows),
        v.progress(empty),
        v.progress(running),
        v.best(empty),
        v.best(running),
        v.plot(empty),
        v.plot(running),
        v.trials(empty),
        v.trials(running),
        v.GoalPage(
            shell,
            v.steps("goal"),
            "demo",
            ("demo", "other"),
            (card,),
            saved_profiles.ProfileTable(rows),
            "chat",
        ),
        v.GoalPage(shell, v.steps("goal"), "", (), (card,), saved_profiles.ProfileTable(()), has_result=True),
        limits,
        replace(
            limits,
            open_requests=0,
            context_note="",
            places=None,
            error=views.ErrorNotice("It is not understood.", "Got 'x'."),
        ),
        v.RunPage(
            shell,
            steps,
            v.progress(running),
            v.best(running),
            v.plot(running),
            v.trials(running),
        ),
        _result(shell, ended),
        _result(shell, kept),
        replace(_result(shell, failed), error=views.ErrorNotice("demo is busy.", "2 requests run.", "Try later.")),
    ]


def _result(shell: views.Shell, job: Job) -> v.ResultPage:
    return v.ResultPage(
        shell, v.steps("result", goal="chat"), job.model, job.goal.name, v.verdict(job),
        v.notes(job), v.recommendation(job), v.plot(job), v.trials(job),
        v.failure(job),
    )  # fmt: skip


def _plan(state: saved_profiles.ProfileState, fits: str) -> saved_profiles.ProfileRow:
    key = (views.Fact("Device", "NVIDIA RTX 4090"), views.Fact("Driver", "580.65"), views.Fact("torch", "2.9.0"))
    flags = "--max-num-seqs 8 --max-num-batched-tokens 512"
    return saved_profiles.ProfileRow(
        f"demo--{state}.toml", "demo", "chat", "chat", "2026-11-21", "41.3 answers/min", flags, state, fits,
        state == "differs", state == "matches", key,
    )  # fmt: skip


def job(*, with_pick: bool = True) -> Job:
    """Return a run in progress, which already has its later result."""
    goal = goal_of("chat")
    trials = [_trial(i) for i in range(1, 14)]
    trials[4] = replace(trials[4], fate="out of memory", why="The step ran out of memory.", figures=None, score=None)
    trials[8] = replace(trials[8], fate="over a limit", why="2.4 s to the first token, the limit is 2.0 s", score=None)
    made = Job("demo", "demo", goal, forms.EFFORTS["quick"], 0.0, stage="running", ended_s=83.0)
    made.phases = [
        (PhaseBegan("calibrate", "chat: one or two people"), 0.0),
        (PhaseBegan("search", "96 settings"), 4.0),
    ]
    made.trials, made.best = trials, trials[11]
    made.under_way = TrialBegan(
        14, {**SETTINGS, "max_num_seqs": 32}, 1.0, Predicted(6 * GIB, 2 * GIB, 8192, 65536, (19.0, 31.0))
    )
    soaked = SoakReport(20.0, 61, 12, 0, 40960, 6 * GIB, 3)
    pick = trials[11] if with_pick else None
    made.result = TuningResult(
        goal, pick, trials[0], tuple(trials), (), 0.02, 0.31, True, soaked, {}, 96, 83.0, was_cancelled=False
    )
    if with_pick:
        key = ProfileKey("GPU", "580.65", "2.9.0", "3.5.0", "0.1", "abc", "dtype=auto")
        made.profile = Profile("chat", "chat", SETTINGS, key, "2026-11-21T10:00:00Z")
    return made


def _trial(number: int) -> Trial:
    """Return a trial on a wave: more tokens per second, longer time to first token."""
    ttft_s = 0.12 + 0.03 * number + 0.05 * math.sin(3 * number)
    rate = 40 + 9 * number - 12 * math.cos(2 * number)
    figures = LoadMetrics(
        3.0, 8, ttft_s, 1.4 * ttft_s, 0.02, 0.03, 2.0, rate, 900.0, 0.1, 5 * GIB + number * (GIB >> 4), 0, 8192
    )
    settings = {**SETTINGS, "max_num_seqs": 2**number if number < 8 else number}
    planned = Predicted(5 * GIB + number * (GIB >> 3), GIB, 8192, 32768, (28.0, 62.0))
    return Trial(number, settings, 1.0 if number > 9 else 0.25, "measured", "", planned, figures, 30.0 + number, 3.2)
