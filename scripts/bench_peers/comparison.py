"""Rounds of A, B, C, A, B, C, ...; medians, spreads and ratios as a Markdown table, with the machine beside them.

Only one engine lives at a time, so that none disturbs another, and a slow hour of the machine hits all alike.
Does not know: how an engine is launched or what a scenario asks.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from localllm.units import format_bytes
from scripts.bench_peers.engines import EngineSpec, launch
from scripts.bench_peers.scenarios import SCENARIOS, Load, greedy_texts, warm


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one engine in one round."""

    engine: str
    round_index: int
    scenario: str
    figure: str
    value: float
    load_average: float  # just before: what else the machine was doing


class Comparison:
    def __init__(self, specs: Sequence[EngineSpec], model: Path, load: Load, folder: Path) -> None:
        self.specs, self.model, self.load, self.folder = specs, model, load, folder
        self.rows: list[Row] = []
        self.texts: dict[str, list[str]] = {}

    def run(self, scenarios: Sequence[str], rounds: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "rows.jsonl").open("w", encoding="utf-8") as out:
            for round_index in range(rounds):
                for spec in self.specs:
                    self._visit(spec, scenarios, round_index, out)

    def _visit(self, spec: EngineSpec, scenarios: Sequence[str], round_index: int, out: TextIO) -> None:
        """Launch, warm, measure, stop."""
        _say(f"round {round_index + 1}: {spec.name} starts")
        started_s = time.perf_counter()
        engine = launch(spec, self.model, self.folder / f"{spec.name}-{round_index}.log")
        try:
            self._note(out, spec, round_index, "process", {"ready after s": time.perf_counter() - started_s})
            if spec.name not in self.texts:
                self.texts[spec.name] = greedy_texts(engine, self.load)
            warm(engine, self.load)
            cpu_s = engine.cpu_s()
            for name in scenarios:
                figures = SCENARIOS[name](engine, self.load, round_index)
                self._note(out, spec, round_index, name, figures)
                _say(f"round {round_index + 1}: {spec.name} {name}: {_in_words(figures)}")
            used = {"CPU s": engine.cpu_s() - cpu_s, "memory MiB": engine.memory_bytes() / 2**20}
            self._note(out, spec, round_index, "process", used)
        finally:
            engine.stop()

    def _note(self, out: TextIO, spec: EngineSpec, round_index: int, scenario: str, figures: dict[str, float]) -> None:
        for figure, value in figures.items():
            row = Row(spec.name, round_index, scenario, figure, value, os.getloadavg()[0])
            self.rows.append(row)
            out.write(json.dumps(asdict(row)) + "\n")
        out.flush()

    def table(self) -> str:
        """Medians over the rounds (smallest to largest), and each median as a multiple of the first engine's."""
        names = [spec.name for spec in self.specs]
        heads = ("scenario", "figure", *names, *(f"{name} / {names[0]}" for name in names[1:]))
        lines = ["| " + " | ".join(heads) + " |", "|--|--|" + "--:|" * (len(heads) - 2)]
        for scenario, figure in dict.fromkeys((row.scenario, row.figure) for row in self.rows):
            values = [self._values(name, scenario, figure) for name in names]
            cells = [_cell(each) for each in values]
            ratios = [_ratio(each, values[0]) for each in values[1:]]
            lines.append("| " + " | ".join((scenario, figure, *cells, *ratios)) + " |")
        return "\n".join(lines)

    def _values(self, engine: str, scenario: str, figure: str) -> list[float]:
        return [r.value for r in self.rows if (r.engine, r.scenario, r.figure) == (engine, scenario, figure)]

    def agreement(self) -> str:
        """Whether the engines said the same: greedy answers on equal weights."""
        first, *others = [spec.name for spec in self.specs if spec.name in self.texts]
        total = len(self.texts[first])
        lines = []
        for other in others:
            same = sum(a.strip() == b.strip() for a, b in zip(self.texts[first], self.texts[other], strict=True))
            lines.append(f"Greedy answers of {other} equal to {first}'s: {same} of {total}.")
        return "\n".join(lines)


def machine_facts() -> dict[str, Any]:
    """What a reader needs to know of the machine to judge a figure."""
    import psutil

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": format_bytes(psutil.virtual_memory().total),
        "load average": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("localllm", "torch", "transformers")},
    }


def facts_in_words(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    averages = " ".join(f"{value:.2f}" for value in facts["load average"])
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']}; {facts['system']}; "
        f"Python {facts['python']}; {versions}; load average at the start {averages}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    if name == "localllm":
        from localllm import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"


def _ratio(values: Sequence[float], base: Sequence[float]) -> str:
    if not values or not base or not statistics.median(base):
        return ""
    return f"{statistics.median(values) / statistics.median(base):.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _in_words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
