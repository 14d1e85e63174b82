"""The native library, where this machine has one."""

from __future__ import annotations

from typing import Any


class Library:
    def run_step(self, operations: Any, rows: Any, num_rows: int) -> None: ...


def native() -> Library | None:
    return None


def why_none() -> str:
    return "the library has not been written yet"
