"""Stages that run one after the other, each in a process of its own, so that none can spoil or hold up the next.

A CUDA error poisons its process for good, a hang would hold everything up, and memory is only surely given back by a
process that ends. A stage writes each result as soon as it has it: one that runs out of time has told what it had.
Does not know: what the stages do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "failed", "missed", "skipped", "note"]
"""failed: something is wrong. missed: a figure is below what is asked. note: told, not judged."""
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    stage: str
    name: str
    verdict: Verdict
    text: str  # what was found
    data: dict[str, Any] = field(default_factory=dict)  # numbers, with their units in their names


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage may know. `out` is shared by all of a run."""

    out: Path
    device: str = "cuda"
    gpu: str = ""

    def read(self, name: str) -> dict[str, Any] | None:
        """What an earlier stage left under `name`; None where it did not come to that."""
        path = self.out / f"{name}.json"
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return value if isinstance(value, dict) else None

    def leave(self, name: str, value: dict[str, Any]) -> None:
        (self.out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


Found = tuple[str, Verdict, str] | tuple[str, Verdict, str, dict[str, Any]]
"""(name, verdict, text[, data]): what a stage's function yields."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    what: str
    limit_s: float
    run: Callable[[Context], Iterator[Found]]
    needs: tuple[str, ...] = ()  # packages beyond torch


class Skip(Exception):
    """A stage, or what is left of it, cannot run here: the reason."""


def run_inside(stage: Stage, context: Context) -> int:
    """In the stage's own process: run it and write its results, one JSON object a line. The exit code."""
    with (context.out / f"{stage.name}.jsonl").open("w", encoding="utf-8", buffering=1) as file:

        def tell(name: str, verdict: Verdict, text: str, data: dict[str, Any] | None = None) -> None:
            file.write(json.dumps(asdict(Result(stage.name, name, verdict, text, data or {}))) + "\n")

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
    command: Callable[[Stage], list[str]],
    *,
    total_s: float,
    tell: Callable[[Stage, list[Result], float], None],
) -> list[Result]:
    """All of them, within `total_s` together. `command(stage)` starts one, which calls `run_inside`."""
    deadline = time.monotonic() + total_s
    results = []
    for stage in stages:
        started = time.monotonic()
        left = deadline - started
        if left < min(5.0, stage.limit_s):
            found = [Result(stage.name, "", "skipped", f"No time was left of {total_s:.0f} s.")]
        else:
            found = _run_outside(stage, context, command(stage), min(stage.limit_s, left))
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
    """The process and everything it started. Its session is its own, so nobody else is hit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            break


def read_results(path: Path) -> list[Result]:
    """What a stage has written; the last line may be torn."""
    results = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            results.append(Result(**json.loads(line)))
    return results


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"Last line: {lines[-1][:200]} ({log})" if lines else f"It printed nothing ({log})."


def run_tests(context: Context, name: str, arguments: Sequence[str], environment: dict[str, str]) -> Iterator[Found]:
    """pytest as a stage: what failed by name, then the counts."""
    import pytest  # noqa: F401  its absence skips the stage

    # Other versions of torch bring other warnings, and the machine may lack a plugin that pyproject.toml sets up.
    lenient = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", *lenient, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    (context.out / f"{name}.txt").write_text(done.stdout + done.stderr)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield line.split(" - ")[0].split(maxsplit=1)[-1], "failed", line.partition(" - ")[2][:300]
    counts = lines[-1] if lines else done.stderr.strip()[-300:]
    yield "pytest", "ok" if done.returncode == 0 else "failed", counts.strip("= ")
