"""Several processes and several versions of localllm at one file of chats: who may read it, copy it and rename it.

    chats.db.lock      every process that has the file open holds a shared lock on it; renaming needs the lock alone
    chats.db.v5        the file as it was before a migration from version 5 of its tables, kept for `update --back`
    chats.db.newer-DATE     what `update --back` replaced by such a copy

The table `written` says which localllm wrote the file last, and the oldest version of the tables whose code can read
and write it: code of that version and later ones uses the file, older code leaves it alone.
Does not know: the tables of the chats, what a migration does (database.py).
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from localllm.files.folders import open_private
from localllm.version import __version__

KEEP_COPY_S = 30 * 24 * 3600
"""How long a copy is kept: deleted chats are still in it."""


class Written(NamedTuple):
    """The facts that a file records about itself."""

    version: int  # of its tables
    oldest_reader: int  # the oldest version of the tables whose code can read and write the file
    localllm: str  # the release that wrote it last; empty: a release before this was recorded


def read_written(db: sqlite3.Connection) -> Written:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    is_recorded = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'written'").fetchone()
    row = db.execute("SELECT oldest_reader, localllm FROM written").fetchone() if is_recorded else None
    return Written(version, *(row or (version, "")))


def record_written(db: sqlite3.Connection, oldest_reader: int) -> None:
    """Record that this release writes the file. The table needs no migration: code that does not know it ignores it."""
    if read_written(db)[1:] != (oldest_reader, __version__):
        db.execute(
            "CREATE TABLE IF NOT EXISTS written "
            "(id INTEGER PRIMARY KEY CHECK (id = 0), oldest_reader INTEGER NOT NULL, localllm TEXT NOT NULL)"
        )
        db.execute("INSERT OR REPLACE INTO written VALUES (0, ?, ?)", (oldest_reader, __version__))


# The lock of the processes -------------------------------------------------------------------------------------------


def hold(path: Path) -> IO[str] | None:
    """Return the lock that says that this process has the file open; closing it gives the lock back. None on Windows,
    which renames no open file, and on disks without locks."""
    return _locked(path, alone=False)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Lock the file against all processes that respect the lock. Yield False if another process has the file open."""
    try:
        lock = _locked(path, alone=True)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        if lock is not None:
            lock.close()


def _locked(path: Path, *, alone: bool) -> IO[str] | None:
    if sys.platform == "win32":
        return None
    import fcntl

    lock = os.fdopen(open_private(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        lock.close()
        raise
    except OSError:  # a disk without locks
        lock.close()
        return None
    return lock


def move(path: Path, to: Path) -> None:
    """Rename the file with its journal. Raises `OSError`."""
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(to.with_name(to.name + suffix))


# Copies before migrations --------------------------------------------------------------------------------------------


def copy_before_migration(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy the file whose tables have `version` to its copy's name. Raises `sqlite3.Error` and `OSError`."""
    copy = path.with_name(f"{path.name}.v{version}")
    new = copy.with_name(f"{copy.name}.{os.getpid()}.new")
    try:
        os.close(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # SQLite fills an empty file
        db.execute("VACUUM INTO ?", (str(new),))
        with closing(sqlite3.connect(new)) as made:
            is_of_version = made.execute("PRAGMA user_version").fetchone()[0] == version
        if is_of_version:  # else another process has migrated meanwhile, and made the copy
            new.replace(copy)
    finally:
        new.unlink(missing_ok=True)


def delete_copies(db: sqlite3.Connection, older_than_s: float = 0.0) -> None:
    """Delete the copies of the file, for example because somebody deletes their chats for good."""
    name = db.execute("PRAGMA database_list").fetchone()[2]
    for copy in _copies(Path(name)) if name else ():
        with suppress(OSError):
            if copy.stat().st_mtime <= time.time() - older_than_s:
                copy.unlink()


def put_back(path: Path, release: str) -> Path | None:
    """Put back the copy that `release` wrote last, if that release cannot read the file. Return the new name of the
    file; None: nothing was changed. Raises `OSError` and `sqlite3.Error`."""
    if not path.exists():
        return None
    now = _written_in(path)
    for copy in _copies(path):
        if (was := _written_in(copy)).localllm == release and was.version < now.oldest_reader:
            with alone(path) as free:
                if not free:
                    raise BlockingIOError(f"another process has {path} open")
                newer = path.with_name(f"{path.name}.newer-{time.strftime('%Y-%m-%dT%H%M%S')}")
                move(path, newer)
                move(copy, path)
            return newer
    return None


def _written_in(path: Path) -> Written:
    with closing(sqlite3.connect(path)) as db:
        return read_written(db)


def _copies(path: Path) -> list[Path]:
    """Return the copies, the newest version of the tables first."""
    found = {int(made[1]): each for each in path.parent.glob(f"{path.name}.v*")
             if (made := re.search(r"\.v(\d+)$", each.name))}  # fmt: skip
    return [found[version] for version in sorted(found, reverse=True)]
