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
from typing import TYPE_CHECKING

from localllm.cli import INTERRUPTED
from localllm.cli.hub import fetch_if_missing
from localllm.config.flags import add_engine_flags, add_model, settings_from
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.processes import set_thread_environment
from localllm.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from localllm.cli.tune_show import TuneOutput
    from localllm.tuning.goals import Goal, GoalLimits
    from localllm.tuning.profile import ProfileCheck
    from localllm.tuning.run import TuneOptions, TuningResult
    from localllm.tuning.trial import TrialRunner

UNTRUE = 1
"""Exit code of `--check` if the profile no longer holds."""


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    help = "what to optimise for: chat, agents, throughput, long-context, share or edit"
    parser.add_argument("--goal", default="chat", metavar="NAME", help=help)
    parser.add_argument("--people", type=int, metavar="N", help="share: number of concurrent users; default: 4")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-ttft", type=float, metavar="SECONDS", help="longest time to first token (p95)")
    limits.add_argument(
        "--max-tpot", type=float, metavar="SECONDS", help="longest time per output token after the first"
    )
    limits.add_argument("--min-context", metavar="N", help="shortest acceptable context, in tokens")
    help = "most memory for weights, KV cache and activations together, e.g. 12GiB"
    limits.add_argument("--max-memory", metavar="SIZE", help=help)
    effort = parser.add_argument_group("effort")
    effort.add_argument("--quick", action="store_true", help="shorter trials and a shorter soak")
    effort.add_argument(
        "--trial-seconds", type=float, metavar="X", help="approximate length of a full trial; default: 12"
    )
    effort.add_argument(
        "--soak-seconds", type=float, metavar="X", help="length of the soak at the end; 0: none; default: 20"
    )
    help = (
        "try other places of the experts (GPU, RAM, disk), each with a load of the model: auto (if the plan puts some "
        "in RAM beside a GPU or on disk), on (even if a flag does), or off"
    )
    effort.add_argument("--placements", choices=("auto", "on", "off"), default="auto", help=help)
    help = "most time for the loads that --placements takes in all; default: 600"
    effort.add_argument("--reload-seconds", type=float, metavar="X", help=help)
    effort.add_argument("--seed", type=int, metavar="N", dest="tune_seed", help="seed of the search and its prompts")
    kept = parser.add_argument_group("result")
    kept.add_argument("--apply", action="store_true", help="use the profile at every later start of this model")
    kept.add_argument("--save", metavar="NAME", help="name of the profile; default: the goal's name")
    kept.add_argument("--no-save", action="store_true", help="save no profile")
    help = "also print the settings, as a command or for config.toml"
    kept.add_argument("--export", choices=("flags", "toml"), help=help)
    help = "only measure a saved profile again, to see whether it still holds"
    kept.add_argument("--check", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    add_engine_flags(
        parser, leave_out=("seed", "lora_modules", "profile")
    )  # settings given here are fixed, not searched


def tune(options: argparse.Namespace) -> int:
    from localllm.cli.tune_show import output_for
    from localllm.tuning.goals import goal_of
    from localllm.tuning.profile import check
    from localllm.tuning.space import fixed_by
    from localllm.tuning.trial import TrialRunner

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
    from localllm.tuning.goals import GoalLimits

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
    from localllm.tuning.run import TuneOptions

    made = TuneOptions.quick(fixed=fixed) if options.quick else TuneOptions(fixed=fixed)
    asked = {
        "trial_s": options.trial_seconds, "soak_s": options.soak_seconds, "seed": options.tune_seed,
        "placements": options.placements, "reload_s": options.reload_seconds,
    }  # fmt: skip
    for flag, value, least, most in (
        ("trial", options.trial_seconds, 0.1, 3600), ("soak", options.soak_seconds, 0, 3600),
        ("reload", options.reload_seconds, 0, 86_400),
    ):  # fmt: skip
        if value is not None and not least <= value < most:
            why = f"Allowed: {least} to {most}."
            raise ConfigError(f"--{flag}-seconds {value} is out of range.", why, param=f"{flag}_seconds")
    return replace(made, **{name: value for name, value in asked.items() if value is not None})


def _run(runner: TrialRunner, goal: Goal, options: TuneOptions, output: TuneOutput) -> TuningResult:
    from localllm.tuning.run import TuningRun

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
    from localllm.cli.tune_show import summary
    from localllm.serving.profiles import save_profile
    from localllm.tuning.profile import as_flags, as_toml, profile_of
    from localllm.tuning.words import nothing_worked

    exports = {"flags": as_flags, "toml": as_toml}
    saved = None
    if result.pick is not None and not options.no_save and not result.was_cancelled:
        name = options.save or result.goal.name
        profile = profile_of(result, runner, name, applied=options.apply)
        saved = save_profile(profile, runner.bare.served.name)
    if options.json:
        facts = result.to_dict() | {"profile": str(saved) if saved else None}
        for name, export in exports.items():
            facts[name] = export(options.model, result.pick.settings) if result.pick else None
        print(json.dumps(facts, indent=2))
    else:
        summary(result, sys.stdout)
        if saved is not None:
            use = "at every start" if options.apply else f"localllm up {options.model} --profile {profile.name}"
            print(f"\nSaved   {saved}\nUse     {use}")
        if options.export and result.pick is not None:
            print("\n" + exports[options.export](options.model, result.pick.settings))
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
