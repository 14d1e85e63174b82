"""`localllm doctor`: check what localllm needs on this machine; each finding comes with a remedy.

`--brief` prints the problems, the best model that fits and the next command. `--report` prints the findings as text for
an issue, without user name, host name or keys. `--gpu` compares the kernels with PyTorch. `--network` also asks the
hub. `--server` checks a running server and its parts instead.
Does not know: the checks (doctor_machine.py, doctor_gpu.py, doctor_files.py, doctor_fit.py, doctor_server.py), how to
repair anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from localllm.cli.doctor_files import (
    check_crash,
    check_data_folder,
    check_disk,
    check_models,
    check_network,
    check_settings,
)
from localllm.cli.doctor_fit import check_fit
from localllm.cli.doctor_gpu import check_kernels, check_recorded
from localllm.cli.doctor_machine import check_gpu_use, check_hardware, check_native, check_packages, check_python
from localllm.cli.doctor_server import check_server
from localllm.cli.findings import Finding, finding_lines, redacted, report
from localllm.config.flags import add_json
from localllm.errors import LocalLLMError
from localllm.machine.threads import set_thread_environment

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
