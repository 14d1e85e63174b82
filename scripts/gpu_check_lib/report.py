"""The results as a table for the terminal, as Markdown, as JSON, and as an entry for docs/lab.md.

Does not know: stages' contents.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.gpu_check_lib.stages import Result

SIGNS = {"ok": "✓", "failed": "✗", "missed": "↓", "skipped": "-", "note": "·"}
WORDS = {"ok": "ok", "failed": "FAILED", "missed": "below", "skipped": "skipped", "note": ""}


def as_table(results: Sequence[Result]) -> str:
    """Return aligned columns: sign, stage, name, text."""
    rows = [(SIGNS[r.verdict], r.stage, r.name, r.text) for r in results]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join("  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])) for row in rows)


def as_markdown(results: Sequence[Result], machine: Mapping[str, Any]) -> str:
    """Return a heading with the machine, then one table."""
    facts = " · ".join(f"{value}" if name == "gpu" else f"{name} {value}" for name, value in machine.items())
    lines = [f"### {facts}", "", "| stage | what | | result | expected |", "|--|--|--|--|--|"]
    lines += [
        f"| {r.stage} | {_cell(r.name)} | {WORDS[r.verdict]} | {_cell(r.text)} | {_cell(r.expected)} |" for r in results
    ]
    return "\n".join(lines) + "\n"


def as_lab_entry(
    results: Sequence[Result], machine: Mapping[str, Any], figures: Collection[str], command: str, date: str
) -> str:
    """Return an entry for docs/lab.md: the figures of the stages named in `figures` beside what was expected, and what
    failed, was below its target or did not run."""
    facts = "".join(f", {name} {value}" for name, value in machine.items() if name != "gpu")
    lines = [
        f"## {date}: figures of {machine.get('gpu', 'a GPU')}",
        "",
        f"`{command}`{facts}. {summary(results)}",
        "",
    ]
    lines += ["| stage | figure | measured | expected |", "| --- | --- | --- | --- |"]
    for r in results:
        if r.stage in figures and r.verdict != "skipped":
            bad = f"**{WORDS[r.verdict]}**: " if r.verdict in ("failed", "missed") else ""
            lines.append(f"| {r.stage} | {_cell(r.name)} | {bad}{_cell(r.text)} | {_cell(r.expected)} |")
    wrong = [r for r in results if r.verdict == "failed" and r.stage not in figures]
    lines += [""] * bool(wrong) + [f"- **{r.stage}** {r.name}: {r.text}" for r in wrong]
    left_out = [f"{r.stage} {r.name}".strip() + f" ({r.text.rstrip('.')})" for r in results if r.verdict == "skipped"]
    lines += ["", f"Not run: {'; '.join(left_out)}."] * bool(left_out)
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    """Return a summary: '31 ok, 1 failed, 2 below target, 3 skipped.'"""
    names = {"ok": "ok", "failed": "failed", "missed": "below target", "skipped": "skipped"}
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in names}
    return ", ".join(f"{counts[v]} {name}" for v, name in names.items() if counts[v] or v == "ok") + "."


def exit_code(results: Sequence[Result], *, strict: bool = False) -> int:
    """Return 1 if something failed; with `strict` also if a figure is below its target. 1 if there are no results."""
    bad = {"failed", "missed"} if strict else {"failed"}
    return int(not results or any(r.verdict in bad for r in results))


def write(out: Path, results: Sequence[Result], machine: Mapping[str, Any], figures: Collection[str] = ()) -> None:
    """Write results.json, results.md and lab.md. figures: the stages whose results are figures."""
    content = {"machine": dict(machine), "results": [asdict(result) for result in results]}
    (out / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "results.md").write_text(as_markdown(results, machine), encoding="utf-8")
    command = " ".join(["scripts/gpu_check", *sys.argv[1:]])
    entry = as_lab_entry(results, machine, figures, command, time.strftime("%Y-%m-%d"))
    (out / "lab.md").write_text(entry, encoding="utf-8")


KEPT = ("*.json", "*.jsonl", "*.log", "*.md", "*.txt")
MOST_BYTES = 1 << 20
"""Most bytes of one file in the archive: the middle of a longer log is cut out."""


def pack(work: Path, archive: Path, *also: Path) -> None:
    """Write the stages' files in `work`, and the folders `also`, to an archive, atomically."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for folder in (work, *also):
            files = sorted({path for pattern in KEPT for path in folder.rglob(pattern) if path.is_file()})
            for path in files:
                _add(tar, path, f"{folder.name}/{path.relative_to(folder)}")
    part.replace(archive)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        data = data[: MOST_BYTES // 2] + b"\n[... cut ...]\n" + data[-MOST_BYTES // 2 :]
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(path.stat().st_mtime)
    tar.addfile(info, io.BytesIO(data))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
