"""A comparison as a Markdown table and as JSON: medians, spreads, ratios, equal and different settings.

Does not know: how values were measured.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm.units import format_bytes
from scripts.bench_peers.comparison import Comparison
from scripts.bench_peers.known import Room


def table(comparison: Comparison) -> str:
    """Return a table of medians over the rounds (smallest to largest), and the median of ratios to the first engine."""
    names = _measured(comparison)
    heads = ("load", "figure", *names, *(f"{name} / {names[0]}" for name in names[1:]))
    lines = ["| " + " | ".join(heads) + " |", "|--|--|" + "--:|" * (len(heads) - 2)]
    for load, figure in dict.fromkeys((row.load, row.figure) for row in comparison.rows):
        values = [_values(comparison, name, load, figure) for name in names]
        cells = [_cell(list(each.values())) for each in values]
        ratios = [_ratio(each, values[0]) for each in values[1:]]
        lines.append("| " + " | ".join((load, figure, *cells, *ratios)) + " |")
    return "\n".join(lines)


def equal_and_not(comparison: Comparison, room: Room) -> str:
    """Describe which settings were equal and which were not."""
    equal = (
        "the weights, prompts (the same tokens in the same order), lengths of prompts and answers, requests open at a "
        f"time, greedy sampling, token counts from each server's usage; {room.dtype} for weights and KV cache, "
        f"{room.threads} threads, room for {room.streams} requests of {room.context:,} tokens at a time"
    )
    lines = [
        f"Equal: {equal}.",
        *(f"Not equal: {spec.name} {', '.join(spec.differs)}." for spec in comparison.specs if spec.differs),
        "Memory is that of processes: shared pages count for each of them, GPU memory does not count.",
    ]
    if len(set(comparison.prompt_tokens.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in comparison.prompt_tokens.items())
        lines.append(f"Not equal: prompt tokens as the servers counted them: {counts}.")
    return "\n".join((*lines, *_agreement(comparison), *_failures(comparison)))


def to_dict(comparison: Comparison, room: Room, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything except the values of single rounds, which are in rows.jsonl."""
    names = _measured(comparison)
    figures = []
    for load, figure in dict.fromkeys((row.load, row.figure) for row in comparison.rows):
        values = {name: _values(comparison, name, load, figure) for name in names}
        for name in names:
            numbers = list(values[name].values())
            figures.append({
                "load": load, "figure": figure, "engine": name, "values": numbers,
                "median": statistics.median(numbers) if numbers else None,
                "ratio": _median_ratio(values[name], values[names[0]]),
            })  # fmt: skip
    return {
        "machine": facts,
        "model": str(comparison.files.folder),
        "room": asdict(room),
        "seed": comparison.seed,
        "loads": [
            {
                "name": load.name,
                "workload": load.workload(0).name,
                "streams": load.streams,
                "requests": len(load.requests(0)),
                "prompt_tokens": load.workload(0).prompt_tokens,
                "output_tokens": load.workload(0).output_tokens,
            }
            for load in comparison.loads
        ],
        "engines": [asdict(spec) for spec in comparison.specs],
        "prompt_tokens_counted": comparison.prompt_tokens,
        "failures": comparison.failures,
        "figures": figures,
    }


def commands(comparison: Comparison) -> str:
    """Return the command of each engine."""
    return "\n".join(f"{spec.name}: {shlex.join(spec.command)}" for spec in comparison.specs)


def machine_facts() -> dict[str, Any]:
    """Return the facts about the machine that a reader needs to judge the results."""
    import psutil

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": format_bytes(psutil.virtual_memory().total),
        "load average": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("localllm", "torch")},
    }


def facts_in_words(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    averages = " ".join(f"{value:.2f}" for value in facts["load average"])
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory']}; {facts['system']}; "
        f"Python {facts['python']}; {versions}; load average at the start {averages}"
    )


def _measured(comparison: Comparison) -> list[str]:
    seen = {row.engine for row in comparison.rows}
    return [spec.name for spec in comparison.specs if spec.name in seen]


def _values(comparison: Comparison, engine: str, load: str, figure: str) -> dict[int, float]:
    """Return round -> value."""
    rows = (row for row in comparison.rows if (row.engine, row.load, row.figure) == (engine, load, figure))
    return {row.round_index: row.value for row in rows}


def _agreement(comparison: Comparison) -> list[str]:
    """Count equal greedy answers of the engines on equal weights."""
    if len(comparison.answers) < 2:
        return []
    first, *others = comparison.answers
    own = comparison.answers[first]
    lines = []
    for other in others:
        same = sum(a.strip() == b.strip() for a, b in zip(own, comparison.answers[other], strict=True))
        lines.append(f"Greedy answers of {other} equal to those of {first}: {same} of {len(own)}.")
    return lines


def _failures(comparison: Comparison) -> list[str]:
    ends = {name: (why.splitlines()[0], why.splitlines()[-1]) for name, why in comparison.failures.items()}
    return [f"{name} failed: {' '.join(dict.fromkeys(each))}" for name, each in ends.items()]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"


def _median_ratio(values: dict[int, float], base: dict[int, float]) -> float | None:
    ratios = [value / base[index] for index, value in values.items() if base.get(index)]
    return statistics.median(ratios) if ratios else None


def _ratio(values: dict[int, float], base: dict[int, float]) -> str:
    ratio = _median_ratio(values, base)
    return "" if ratio is None else f"{ratio:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


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
