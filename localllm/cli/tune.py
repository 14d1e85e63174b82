"""`tune`: find settings for a goal by trying them on this machine, and save the best ones as a profile.

The run has its own thread, so that Ctrl-C ends it in order and the results so far are shown.
Does not know: how trials are measured and searched (tuning/), how they are shown (tune_show.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

from localllm.cli import INTERRUPTED
from localllm.cli.flags import settings_from
from localllm.cli.hub import fetch_if_missing
from localllm.cli.tune_show import TuneOutput, output_for, summary
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.threads import set_thread_environment
from localllm.serving.profiles import save_profile
from localllm.tuning.goals import Goal, GoalLimits, goal_of
from localllm.tuning.profile import ProfileCheck, as_flags, as_toml, check, profile_of
from localllm.tuning.run import TuneOptions, TuningResult, TuningRun
from localllm.tuning.space import fixed_by
from localllm.tuning.trial import TrialRunner
from localllm.tuning.words import nothing_worked
from localllm.units import parse_bytes, parse_count

EXPORTS = {"flags": as_flags, "toml": as_toml}
UNTRUE = 1
"""Exit code of `--check` if the profile no longer holds."""


def tune(options: argparse.Namespace) -> int:
    asked = settings_from(options)
    goal = goal_of(options.goal, _limits(options), options.people)
    effort = _effort(options, fixed_by(asked))
    set_thread_environment()
    fetch_if_missing(asked.engine)
    settings = asked.of_first_model()
    settings = replace(settings, engine=replace(settings.engine, profile="none"))
    with output_for(options.json) as output:
        runner = TrialRunner.load(settings, output.phase)
        if options.check:
            return _tell_check(check(runner, options.save or goal.name), options.json)
        result = _run(runner, goal, effort, output)
    return _tell(result, runner, options)


def _limits(options: argparse.Namespace) -> GoalLimits:
    return GoalLimits(
        max_ttft_s=options.max_ttft,
        max_tpot_s=options.max_tpot,
        min_context=_read(options, "min_context", parse_count),
        max_memory_bytes=_read(options, "max_memory", parse_bytes),
    )


def _read(options: argparse.Namespace, name: str, parse: Callable[[str], int]) -> int | None:
    given = getattr(options, name)
    try:
        return None if given is None else parse(given)
    except ValueError as error:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {given!r} is not valid.", f"{error}.", param=name) from error


def _effort(options: argparse.Namespace, fixed: frozenset[str]) -> TuneOptions:
    made = TuneOptions.quick(fixed=fixed) if options.quick else TuneOptions(fixed=fixed)
    asked = {"trial_s": options.trial_seconds, "soak_s": options.soak_seconds, "seed": options.tune_seed}
    for flag, value, least in (("trial", options.trial_seconds, 0.1), ("soak", options.soak_seconds, 0)):
        if value is not None and not least <= value < 3600:
            why = f"Allowed: {least} to 3600."
            raise ConfigError(f"--{flag}-seconds {value} is out of range.", why, param=f"{flag}_seconds")
    return replace(made, **{name: value for name, value in asked.items() if value is not None})


def _run(runner: TrialRunner, goal: Goal, options: TuneOptions, output: TuneOutput) -> TuningResult:
    run = TuningRun(runner, goal, options, output.event)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run.start()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="localllm-tune")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        run.cancel()
        thread.join()
    if failed:
        raise failed[0]
    assert run.result is not None
    return run.result


def _tell(result: TuningResult, runner: TrialRunner, options: argparse.Namespace) -> int:
    saved = None
    if result.pick is not None and not options.no_save and not result.was_cancelled:
        name = options.save or result.goal.name
        profile = profile_of(result, runner, name, applied=options.apply)
        saved = save_profile(profile, runner.bare.served.name)
    if options.json:
        facts = result.to_dict() | {"profile": str(saved) if saved else None}
        for name, export in EXPORTS.items():
            facts[name] = export(options.model, result.pick.settings) if result.pick else None
        print(json.dumps(facts, indent=2))
    else:
        summary(result, sys.stdout)
        if saved is not None:
            use = "at every start" if options.apply else f"localllm up {options.model} --profile {profile.name}"
            print(f"\nSaved   {saved}\nUse     {use}")
        if options.export and result.pick is not None:
            print("\n" + EXPORTS[options.export](options.model, result.pick.settings))
    if result.was_cancelled:
        return INTERRUPTED
    if result.pick is None:
        raise LocalLLMError("No settings reached the goal.", nothing_worked(result), "wider limits, or another --goal")
    return 0


def _tell_check(checked: ProfileCheck, as_json: bool) -> int:
    profile, change = checked.profile, checked.change
    if as_json:
        print(json.dumps({**asdict(checked), "change": change, "is_true": checked.still_holds}, indent=2))
        return 0 if checked.still_holds else UNTRUE
    print(f"{profile.name}, tuned {profile.date}: {profile.score:.1f} {profile.unit} then", end="")
    print(f", {checked.trial.score:.1f} now ({change:+.0%})" if change is not None else f"; now {checked.trial.why}")
    if checked.difference:
        print(f"It is not used at start: {checked.difference}.")
    print("It still holds." if checked.still_holds else f"Tune again: localllm tune MODEL --goal {profile.goal}")
    return 0 if checked.still_holds else UNTRUE
