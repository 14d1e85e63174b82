"""Text for a person at a terminal: tables, messages beside a result, and questions.

Does not know: verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def print_table(rows: Sequence[Sequence[str]], out: TextIO | None = None) -> None:
    """Print a table whose columns are as wide as their widest cell; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=out)


def say(text: str) -> None:
    """Print a message on standard error, since standard output is for the result."""
    print(text, file=sys.stderr)


def confirmed(question: str, *, default: bool = False) -> bool:
    """Ask a question at the terminal. default: what an empty answer means."""
    answer = input(f"{question} [{'Y/n' if default else 'y/N'}] ").strip().lower()
    return answer in ("y", "yes") or (default and not answer)
