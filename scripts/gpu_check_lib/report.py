"""What was found, as a table for people, as Markdown for docs/lab.md, as JSON for programs.

Does not know: stages' contents.
"""

from __future__ import annotations

import io
import json
import tarfile
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


KEPT = ("*.json", "*.jsonl", "*.log", "*.md", "*.txt")
MOST_BYTES = 1 << 20
"""Of one file in the archive: a longer log is cut, and says so."""


def pack(work: Path, archive: Path, *also: Path) -> None:
    """Write what the stages left in `work`, and the folders `also`, as one archive; whole or not at all."""
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
