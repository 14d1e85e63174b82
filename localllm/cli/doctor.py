"""`localllm doctor`: check what localllm needs on this machine; each finding comes with a remedy.

`--brief` prints the problems, the best model that fits and the next command. `--report` prints the findings as text for
an issue, without user name, host name or keys. `--gpu` compares the kernels with PyTorch. `--network` also asks the
hub. `--server` checks a running server and its parts instead.
Does not know: the checks of the machine (doctor_machine.py, doctor_files.py, suggestion.py), how to repair anything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from localllm.cli.doctor_files import (
    check_crash,
    check_data_folder,
    check_disk,
    check_models,
    check_network,
    check_settings,
)
from localllm.cli.doctor_machine import (
    check_gpu_use,
    check_hardware,
    check_kernels,
    check_native,
    check_packages,
    check_python,
    check_recorded,
)
from localllm.cli.findings import Finding, Verdict, finding_lines, redacted, report
from localllm.cli.suggestion import check_fit, check_speech
from localllm.config.flags import add_json
from localllm.errors import LocalLLMError
from localllm.machine.processes import set_thread_environment
from localllm.units import format_bytes, format_seconds

ANSWER_S = 15.0
"""A server that takes longer to answer is stuck."""
LAG_S = 1.0


def check_server(options: argparse.Namespace) -> Iterator[Finding]:
    """Report a running server's parts, models, memory and last fault."""
    from localllm.cli.running import state_of
    from localllm.cli.server import ServerClient
    from localllm.engine.step import RunnerStats

    server = ServerClient.of(options)
    began_s = time.perf_counter()
    told = server.ask("GET", "/localllm/v1/server", timeout_s=ANSWER_S)
    took_s = time.perf_counter() - began_s
    text = f"localllm {told['version']} answered at {server.url} in {format_seconds(took_s)}"
    yield Finding("server", "ok", f"{text}, pid {told['pid']}, up for {format_seconds(told['uptime_s'])}")
    verdicts: Mapping[str, Verdict] = {"ok": "ok", "slow": "note"}
    for part in told["parts"]:
        yield Finding(part["part"], verdicts.get(part["state"], "problem"), part["why"] or "works")
    for model in server.ask("GET", "/localllm/v1/models/stats", timeout_s=ANSWER_S)["data"]:
        engine = told["engines"].get(model["name"])
        verdict: Verdict = "problem" if model["state"] == "failed" else "ok"
        yield Finding(f"model {model['name']}", verdict, f"{state_of(model)}{_step(engine)}")
        if model["stats"] and (decodes := RunnerStats(*model["stats"]["runner"]).decode_steps):
            yield Finding(f"model {model['name']}", "ok", decodes)
    lag_s, longest_s = told["loop_lag_s"], told["longest_loop_lag_s"]
    lag = f"event loop delayed by {format_seconds(lag_s)}, at most {format_seconds(longest_s)} in the last minute"
    yield Finding("lag", "note" if longest_s > LAG_S else "ok", lag)
    yield Finding("memory", "ok", f"{format_bytes(told['rss_bytes'])} resident, {told['num_threads']} threads")
    yield Finding("requests", "ok", f"{told['open_requests']} open")
    last = told["last_fault"]
    if last is None:
        yield Finding("faults", "ok", "none since the start")
    else:
        ago = format_seconds(max(0.0, time.time() - last["at_s"]))
        text = f"{told['num_faults']} since the start, the last one {ago} ago in {last['where']}: {last['what']}"
        remedy = (
            f"report it, with localllm doctor --report and the content of {told['fault_file']}"
            if told["fault_file"]
            else ""
        )
        yield Finding("faults", "note", text, remedy)


def _step(engine: Mapping[str, Any] | None) -> str:
    if engine is None:
        return ""
    if engine["step_age_s"] is not None:
        return f", its current step began {format_seconds(engine['step_age_s'])} ago"
    return f", idle for {format_seconds(engine['rests_s'])}"


Check = Callable[[], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_hardware,
    check_native,
    check_gpu_use,
    check_recorded,
    check_settings,
    check_models,
    check_disk,
    check_data_folder,
    check_crash,
    check_fit,
    check_speech,
)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", action="store_true", help="print a report to paste into an issue, without user names or keys"
    )
    help = "only the problems, the best model that fits, and the next command"
    parser.add_argument("--brief", action="store_true", help=help)
    parser.add_argument("--gpu", action="store_true", help="compare the kernels with PyTorch on the GPU")
    parser.add_argument("--network", action="store_true", help="also check that the hub can be reached")
    parser.add_argument("--server", action="store_true", help="check a running server and its parts")
    parser.add_argument(
        "--url", metavar="URL", help="with --server: the server; default: the one running on this machine"
    )
    parser.add_argument("--api-key", metavar="KEY", help="with --server: a key with the scope admin")
    add_json(parser)


def doctor(options: argparse.Namespace) -> int:
    """Run the checks and print the findings. Return 1 if there is a problem, else 0."""
    set_thread_environment()
    checks: Sequence[Check] = (partial(check_server, options),) if options.server else CHECKS
    if options.gpu and not options.server:
        checks = (*checks, check_kernels)
    if options.network and not options.server:
        checks = (*checks, check_network)
    findings = [finding for check in checks for finding in _guarded(check)]
    if options.json:
        print(redacted(json.dumps([asdict(finding) for finding in findings], indent=2)))
    elif options.report:
        print(redacted(report(findings)))
    elif options.brief:
        print("\n".join(brief_lines(findings)))
    else:
        print("\n".join(finding_lines(findings, "" if options.server else next_command(findings))))
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def next_command(findings: Sequence[Finding]) -> str:
    """Return the command to type next: serve the best model that fits, else the demo."""
    return next((finding.remedy for finding in findings if (finding.subject, finding.verdict) == FITS), "localllm up")


def brief_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the problems with their remedies, the machine, the best model that fits, and the next command."""
    for finding in findings:
        if finding.verdict == "problem":
            yield f"Problem: {finding.text}"
            if finding.remedy:
                yield f"  Try: {finding.remedy}"
    shown = [finding for finding in findings if finding.verdict == "ok"]
    gpus = [finding for finding in shown if finding.subject.startswith("gpu ")]
    machine = gpus or [finding for finding in shown if finding.subject in ("cpu", "memory")]
    yield f"This machine: {'; '.join(finding.text for finding in machine)}"
    best = next((finding.text for finding in shown if finding.subject == FITS[0]), None)
    if best is not None:
        yield f"A model that fits: {best}"
    yield f"Next: {next_command(findings)}"


FITS = ("fits", "ok")
"""Subject and verdict of a finding that names a model that fits."""


def _guarded(check: Check) -> Iterator[Finding]:
    """Run one check. An exception in it becomes a finding, and the other checks still run."""
    try:
        yield from check()
    except LocalLLMError as error:
        yield Finding(_subject(check), "problem", str(error), error.hint)
    except Exception as error:
        yield Finding(_subject(check), "problem", f"{type(error).__name__}: {error}")


def _subject(check: Check) -> str:
    function = check.func if isinstance(check, partial) else check
    return function.__name__.removeprefix("check_")
