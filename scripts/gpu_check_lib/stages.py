"""Stages that run one after another, each in its own process, so that none can break or delay the next.

A CUDA error makes its process unusable, a hang would delay everything, and memory is only certainly freed when a
process ends. A stage writes each result at once, so a stage that runs out of time has reported what it measured.
Does not know: what the stages do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "failed", "missed", "skipped", "note"]
"""failed: something is wrong. missed: a figure is below its target. note: reported without a verdict."""
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    stage: str
    name: str
    verdict: Verdict
    text: str  # the result, in words
    data: dict[str, Any] = field(default_factory=dict)  # numbers, with units in their names
    expected: str = ""  # the result that was expected, in words


@dataclass(frozen=True, slots=True)
class Context:
    """A stage's environment. `out` is shared by all stages of a run: logs, data for later stages, model folders."""

    out: Path
    device: str = "cuda"
    gpu: str = ""
    limit_s: float = 600.0  # after this time the stage is stopped

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the data that an earlier stage stored under `name`; None if it did not get that far."""
        path = self.out / f"{name}.json"
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return value if isinstance(value, dict) else None

    def leave(self, name: str, value: dict[str, Any]) -> None:
        (self.out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


Found = (
    tuple[str, Verdict, str] | tuple[str, Verdict, str, dict[str, Any]] | tuple[str, Verdict, str, dict[str, Any], str]
)
"""(name, verdict, text[, data[, expected]]): what a stage's function yields."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    what: str
    limit_s: float
    run: Callable[[Context], Iterator[Found]]
    needs: tuple[str, ...] = ()  # packages beyond torch
    guards: bool = False  # if it fails, figures of this run cannot be trusted and are not measured
    measures: bool = False  # its results are figures


class Skip(Exception):
    """A stage, or the rest of it, cannot run here; the message is the reason."""


def run_inside(stage: Stage, context: Context) -> int:
    """Run a stage in its own process and write its results, one JSON object per line; return the exit code."""
    with (context.out / f"{stage.name}.jsonl").open("w", encoding="utf-8", buffering=1) as file:

        def tell(
            name: str, verdict: Verdict, text: str, data: dict[str, Any] | None = None, expected: str = ""
        ) -> None:
            file.write(json.dumps(asdict(Result(stage.name, name, verdict, text, data or {}, expected))) + "\n")

        try:
            for found in stage.run(context):
                tell(*found)
        except Skip as reason:
            tell("", "skipped", str(reason))
        except ImportError as error:
            if error.name not in stage.needs:
                raise
            tell("", "skipped", f"Needs the package {error.name}.")
    return 0


def run_stages(
    stages: Sequence[Stage],
    context: Context,
    command: Callable[[Stage, float], list[str]],
    *,
    total_s: float,
    tell: Callable[[Stage, list[Result], float], None],
) -> list[Result]:
    """Run all stages within `total_s`. `command(stage, limit_s)` is a process that calls `run_inside`.

    `tell` is called with each stage's results when the stage has ended, so that they can be saved at once.
    """
    deadline = time.monotonic() + total_s
    results = []
    wrong = ""  # the guarding stage that failed
    for stage in stages:
        started = time.monotonic()
        left = deadline - started
        if wrong and stage.measures:
            found = [Result(stage.name, "", "skipped", f"The stage {wrong} failed, so figures would be meaningless.")]
        elif left < min(5.0, stage.limit_s):
            found = [Result(stage.name, "", "skipped", f"No time was left of {total_s:.0f} s.")]
        else:
            limit_s = min(stage.limit_s, left)
            found = _run_outside(stage, context, command(stage, limit_s), limit_s)
        if stage.guards and any(result.verdict == "failed" for result in found):
            wrong = stage.name
        tell(stage, found, time.monotonic() - started)
        results += found
    return results


def _run_outside(stage: Stage, context: Context, command: list[str], limit_s: float) -> list[Result]:
    log = context.out / f"{stage.name}.log"
    results = context.out / f"{stage.name}.jsonl"
    results.unlink(missing_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    found = read_results(results)
    if code is None:
        found.append(Result(stage.name, "", "failed", f"Not done after {limit_s:.0f} s. {_last_words(log)}"))
    elif code != 0:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        found.append(Result(stage.name, "", "failed", f"Ended {how}. {_last_words(log)}"))
    elif not found:
        found.append(Result(stage.name, "", "failed", "It reported nothing."))
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process and everything it started. It has its own session, so no other process is affected."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break


def read_results(path: Path) -> list[Result]:
    """Return the results that a stage has written; an incomplete last line is ignored."""
    results = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            results.append(Result(**json.loads(line)))
    return results


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"Last line: {lines[-1][:200]} ({log})" if lines else f"It printed nothing ({log})."
