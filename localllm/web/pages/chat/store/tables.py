"""The base of every group of operations: one database, transactions, and deletions that can be undone.

Does not know: chats, prompts, projects.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

GONE_HINT = "Reload the page, or start a new chat."


class Tables:
    """A database, whose rows are marked with a deletion before they are purged."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @property
    def num_changes(self) -> int:
        """Rows that were changed since the database was opened."""
        return self._db.total_changes

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Run the block as one transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _new_deletion(self, leaf: str | None = None) -> str:
        deletion = new_id()
        self._db.execute("INSERT INTO deletion (id, at_s, leaf) VALUES (?, ?, ?)", (deletion, time.time(), leaf))
        return deletion


def new_id() -> str:
    """Return an unguessable id."""
    return secrets.token_urlsafe(12)


def as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values))
