"""What was found, as a table for people, as Markdown for docs/lab.md, as JSON for programs.

Does not know: stages' contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.gpu_check_lib.stages import Result

SIGNS = {"ok": "✓", "failed": "✗", "missed": "↓", "skipped": "-", "note": "·"}
WORDS = {"ok": "ok", "failed": "FAILED", "missed": "below", "skipped": "skipped", "note": ""}


def as_table(results: Sequence[Result]) -> str:
    """Aligned columns: sign, stage, name, text."""
    rows = [(SIGNS[r.verdict], r.stage, r.name, r.text) for r in results]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join("  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])) for row in rows)


def as_markdown(results: Sequence[Result], machine: Mapping[str, Any]) -> str:
    """A heading with the machine, then one table."""
    facts = " · ".join(f"{value}" if name == "gpu" else f"{name} {value}" for name, value in machine.items())
    lines = [f"### {facts}", "", "| stage | what | | result |", "|--|--|--|--|"]
    lines += [f"| {r.stage} | {_cell(r.name)} | {WORDS[r.verdict]} | {_cell(r.text)} |" for r in results]
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """'31 ok, 1 failed, 2 below what is asked, 3 skipped.'"""
    names = {"ok": "ok", "failed": "failed", "missed": "below what is asked", "skipped": "skipped"}
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in names}
    return ", ".join(f"{counts[v]} {name}" for v, name in names.items() if counts[v] or v == "ok") + "."


def exit_code(results: Sequence[Result], *, strict: bool = False) -> int:
    """1 where something failed; with `strict` also where a figure is below what is asked, or nothing was found."""
    bad = {"failed", "missed"} if strict else {"failed"}
    return int(not results or any(r.verdict in bad for r in results))


def write(out: Path, results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    content = {"machine": dict(machine), "results": [asdict(result) for result in results]}
    (out / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "results.md").write_text(as_markdown(results, machine), encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
