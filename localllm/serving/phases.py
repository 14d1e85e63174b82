"""The phases of a load, how they are reported, and the time that the end of a model may take.

Does not know: what happens in a phase, how a report is displayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DRAIN_S = 30.0
"""Seconds that running requests may take to finish before their model, their adapter or the server ends them."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a load. It is reported when it begins, as it progresses, and once with `done`."""

    name: str  # find, fit, torch, profile, tokenizer, weights, memory, engine, adapters
    detail: str = ""  # one line: what was found or decided
    seconds: float = 0.0  # since the phase began
    fraction: float | None = None  # 0 to 1; None: unknown
    done: bool = False


OnPhase = Callable[[Phase], None]


class PhaseReporter:
    """Reports one phase: call it with the detail, or with a fraction."""

    def __init__(self, name: str, on_phase: OnPhase) -> None:
        self.name, self.on_phase = name, on_phase
        self.started_s, self.detail = time.perf_counter(), ""

    def __call__(self, detail: str = "", fraction: float | None = None, *, done: bool = False) -> None:
        self.detail = detail or self.detail
        self.on_phase(Phase(self.name, self.detail, time.perf_counter() - self.started_s, fraction, done))


@contextmanager
def report_phase(name: str, on_phase: OnPhase) -> Iterator[PhaseReporter]:
    """Report a phase at its start and its end; the block reports what happens between."""
    report = PhaseReporter(name, on_phase)
    report()
    yield report
    report(fraction=1.0, done=True)
