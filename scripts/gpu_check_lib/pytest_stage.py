"""pytest as a stage: each failure is reported immediately, and the counts even if time runs out.

This module is also the pytest plugin: it appends a JSON object per finished test to the file in LINES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check_lib.stages import Context, Found, end_group

LINES = "GPU_CHECK_LINES"
RESERVE_S = 5.0
"""Time at the end of a stage's limit to write the results after ending its tests."""


def run_tests(context: Context, name: str, arguments: Sequence[str]) -> Iterator[Found]:
    """Run pytest within the stage's time; yield each failed test, then the counts and the slowest three."""
    import pytest  # noqa: F401  its absence skips the stage

    lines, log = context.out / f"{name}.tests.jsonl", context.out / f"{name}.txt"
    lines.write_text("")
    # Other versions of torch have other warnings, and a plugin that pyproject.toml configures may be missing.
    lenient = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-p", __name__]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", *lenient, *arguments]
    deadline = time.monotonic() + context.limit_s - RESERVE_S
    seen: list[dict[str, Any]] = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**_outside_of_workers(), LINES: str(lines)}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < deadline:
                yield from _failures(lines, seen)
                time.sleep(0.2)
            code = process.poll()
        finally:
            end_group(process)
    yield from _failures(lines, seen)
    yield summary(seen, code, context.limit_s, log)


def _outside_of_workers() -> dict[str, str]:
    """Return the environment without what marks a worker of pytest-xdist, whose reports are not written."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


def _failures(lines: Path, seen: list[dict[str, Any]]) -> Iterator[Found]:
    """Yield failures written since the last call, and append all tests to `seen`. An incomplete last line waits."""
    for line in lines.read_text().split("\n")[len(seen) : -1]:
        seen.append(test := json.loads(line))
        if test["outcome"] == "failed":
            yield test["test"], "failed", test["message"]


def summary(tests: Sequence[dict[str, Any]], code: int | None, limit_s: float, log: Path) -> Found:
    """Count the finished tests. code: pytest's exit code; None if it was stopped."""
    counts = Counter(test["outcome"] for test in tests)
    slowest = sorted(tests, key=lambda test: -test["seconds"])[:3]
    text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])
    text = text or "no test finished"
    if slowest:
        text += "; slowest: " + ", ".join(f"{test['test'].split('::')[-1]} {test['seconds']:.0f} s" for test in slowest)
    data = {**counts, "seconds": sum(test["seconds"] for test in tests)}
    if code is None:
        return "pytest", "failed", f"Not done after {limit_s:.0f} s: {text}", data
    if code != 0 and not counts["failed"]:  # for example, it could not collect the tests
        return "pytest", "failed", f"Ended with code {code}: {text}. {_last(log)}", data
    return "pytest", "failed" if code else "ok", text, data


def _last(log: Path) -> str:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"Last line: {said[-1][:200]}" if said else "It printed nothing."


# ---- the plugin ------------------------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: Any) -> None:
    """Write a test's report. With xdist only the controller writes, as it gets every report."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (path := os.environ.get(LINES)):
        return
    if report.when != "call" and report.outcome == "passed":  # setup and teardown only count if they fail or skip
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": _reason(report)}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _reason(report: Any) -> str:
    if report.outcome != "failed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).split("\n")[0][:300]
