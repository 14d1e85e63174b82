"""The file of the chats: create, migrate and check it. A damaged file is renamed, never deleted; a file of a newer
version is left as it is.

    chats.db                     mode 0600, with chats.db-wal and chats.db-shm beside it while it is in use
    chats.db.broken-DATE         a file that was damaged

Does not know: the queries on the tables (chats.py), the lock and the copies beside the file (file_versions.py).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from localllm.files.folders import data_folder, make_private, open_private
from localllm.web.pages.chat.store import file_versions
from localllm.web.pages.chat.store.records import ChatsUnavailable

log = logging.getLogger(__name__)

BUSY_S = 1.0
"""How long to wait for another program that has locked the file."""

MIGRATIONS = (
    """
    CREATE TABLE deletion (id TEXT PRIMARY KEY, at_s REAL NOT NULL, leaf TEXT);
    CREATE TABLE chat (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, title TEXT NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0, leaf TEXT, settings TEXT NOT NULL DEFAULT '{}', updated_s REAL NOT NULL,
        deletion TEXT REFERENCES deletion (id) ON DELETE CASCADE
    );
    CREATE INDEX chat_by_date ON chat (owner, pinned DESC, updated_s DESC);
    CREATE TABLE message (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        chat_id TEXT NOT NULL REFERENCES chat (id) ON DELETE CASCADE, parent_id TEXT, role TEXT NOT NULL,
        deletion TEXT REFERENCES deletion (id) ON DELETE CASCADE, created_s REAL NOT NULL,
        details TEXT NOT NULL DEFAULT '{}', text TEXT NOT NULL
    );
    CREATE INDEX message_by_chat ON message (chat_id);
    CREATE INDEX chat_deleted ON chat (deletion) WHERE deletion IS NOT NULL;
    CREATE INDEX message_deleted ON message (deletion) WHERE deletion IS NOT NULL;
    CREATE TABLE preset (
        owner TEXT NOT NULL, name TEXT NOT NULL, settings TEXT NOT NULL, PRIMARY KEY (owner, name)
    );
    CREATE VIRTUAL TABLE message_words USING fts5 (
        text, content = 'message', content_rowid = 'number', tokenize = 'unicode61 remove_diacritics 2'
    );
    CREATE TRIGGER message_added AFTER INSERT ON message BEGIN
        INSERT INTO message_words (rowid, text) VALUES (new.number, new.text);
    END;
    CREATE TRIGGER message_removed AFTER DELETE ON message BEGIN
        INSERT INTO message_words (message_words, rowid, text) VALUES ('delete', old.number, old.text);
    END;
    CREATE TRIGGER message_changed AFTER UPDATE OF text ON message BEGIN
        INSERT INTO message_words (message_words, rowid, text) VALUES ('delete', old.number, old.text);
        INSERT INTO message_words (rowid, text) VALUES (new.number, new.text);
    END;
    CREATE VIRTUAL TABLE title_words USING fts5 (
        title, content = 'chat', content_rowid = 'number', tokenize = 'unicode61 remove_diacritics 2'
    );
    CREATE TRIGGER chat_added AFTER INSERT ON chat BEGIN
        INSERT INTO title_words (rowid, title) VALUES (new.number, new.title);
    END;
    CREATE TRIGGER chat_removed AFTER DELETE ON chat BEGIN
        INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.number, old.title);
    END;
    CREATE TRIGGER chat_renamed AFTER UPDATE OF title ON chat BEGIN
        INSERT INTO title_words (title_words, rowid, title) VALUES ('delete', old.number, old.title);
        INSERT INTO title_words (rowid, title) VALUES (new.number, new.title);
    END;
    """,
    """
    ALTER TABLE message ADD COLUMN writer TEXT NOT NULL DEFAULT '';
    """,  # the process that wrote it last; tells whether an unfinished reply may still be finished
    """
    CREATE TABLE prompt (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, name TEXT NOT NULL,
        text TEXT NOT NULL DEFAULT '', settings TEXT NOT NULL DEFAULT '{}',
        deletion TEXT REFERENCES deletion (id) ON DELETE CASCADE
    );
    CREATE INDEX prompt_by_name ON prompt (owner, name);
    CREATE INDEX prompt_deleted ON prompt (deletion) WHERE deletion IS NOT NULL;
    INSERT INTO prompt (id, owner, name, settings)
        SELECT lower(hex(randomblob(8))), owner, name, settings FROM preset ORDER BY rowid;
    DROP TABLE preset;
    CREATE TABLE project (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, name TEXT NOT NULL,
        settings TEXT NOT NULL DEFAULT '{}', deletion TEXT REFERENCES deletion (id) ON DELETE CASCADE
    );
    CREATE INDEX project_by_owner ON project (owner);
    CREATE INDEX project_deleted ON project (deletion) WHERE deletion IS NOT NULL;
    CREATE TABLE project_file (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        project_id TEXT NOT NULL REFERENCES project (id) ON DELETE CASCADE, name TEXT NOT NULL, text TEXT NOT NULL
    );
    CREATE INDEX project_file_by_project ON project_file (project_id);
    ALTER TABLE chat ADD COLUMN project_id TEXT REFERENCES project (id) ON DELETE SET NULL;
    ALTER TABLE chat ADD COLUMN archived INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX chat_by_project ON chat (project_id) WHERE project_id IS NOT NULL;
    """,  # prompts, which the presets become; projects; archived chats
    """
    ALTER TABLE chat ADD COLUMN left_out TEXT NOT NULL DEFAULT '[]';
    """,  # a list of message ids: on a branch, the model reads only what follows the last of them
    """
    CREATE TABLE file (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        chat_id TEXT NOT NULL REFERENCES chat (id) ON DELETE CASCADE, name TEXT NOT NULL, paged INTEGER NOT NULL,
        created_s REAL NOT NULL
    );
    CREATE INDEX file_by_chat ON file (chat_id);
    CREATE TABLE passage (
        number INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES file (number) ON DELETE CASCADE,
        first INTEGER NOT NULL, last INTEGER NOT NULL, text TEXT NOT NULL
    );
    CREATE INDEX passage_by_file ON passage (file, number);
    CREATE VIRTUAL TABLE passage_words USING fts5 (text, tokenize = 'porter unicode61 remove_diacritics 2');
    CREATE TRIGGER passage_removed AFTER DELETE ON passage BEGIN
        DELETE FROM passage_words WHERE rowid = old.number;
    END;
    CREATE TABLE passage_vector (
        passage INTEGER NOT NULL REFERENCES passage (number) ON DELETE CASCADE, model TEXT NOT NULL,
        vector BLOB NOT NULL, PRIMARY KEY (passage, model)
    );
    """,  # long files, which are searched instead of read whole
    """
    CREATE TABLE tool_consent (
        owner TEXT NOT NULL, server TEXT NOT NULL, tool TEXT NOT NULL, digest TEXT NOT NULL, choice TEXT NOT NULL,
        at_s REAL NOT NULL, PRIMARY KEY (owner, server, tool)
    );
    """,
    """
    CREATE TABLE picture (
        owner TEXT NOT NULL, digest TEXT NOT NULL, kind TEXT NOT NULL, data BLOB NOT NULL, created_s REAL NOT NULL,
        PRIMARY KEY (owner, digest)
    );
    CREATE TABLE message_picture (
        message INTEGER NOT NULL REFERENCES message (number) ON DELETE CASCADE, owner TEXT NOT NULL,
        digest TEXT NOT NULL, PRIMARY KEY (message, digest)
    );
    CREATE INDEX message_picture_by_digest ON message_picture (owner, digest);
    CREATE TRIGGER message_pictured AFTER INSERT ON message WHEN new.details LIKE '%"pictures"%' BEGIN
        INSERT OR IGNORE INTO message_picture (message, owner, digest)
            SELECT new.number, chat.owner, json_extract(each.value, '$.digest')
            FROM chat, json_each(new.details, '$.pictures') AS each WHERE chat.id = new.chat_id;
    END;
    CREATE TRIGGER picture_unnamed AFTER DELETE ON message_picture WHEN NOT EXISTS (
        SELECT 1 FROM message_picture AS it WHERE it.owner = old.owner AND it.digest = old.digest
    ) BEGIN
        DELETE FROM picture WHERE owner = old.owner AND digest = old.digest;
    END;
    """,  # pictures, each deleted with the last message that names it
    """
    CREATE TABLE project_folder (
        project_id TEXT PRIMARY KEY REFERENCES project (id) ON DELETE CASCADE, path TEXT NOT NULL, chat_id TEXT NOT NULL
    );
    CREATE TRIGGER project_folder_removed AFTER DELETE ON project_folder BEGIN
        DELETE FROM chat WHERE id = old.chat_id;
    END;
    """,  # folders of projects; their files belong to a chat that no list shows
    """
    CREATE TABLE chat_link (
        chat_id TEXT PRIMARY KEY REFERENCES chat (id) ON DELETE CASCADE, secret TEXT NOT NULL UNIQUE,
        leaf TEXT NOT NULL, created_s REAL NOT NULL
    );
    """,  # links with which anybody may read a chat up to one message
    """
    CREATE TABLE memory (owner TEXT PRIMARY KEY, is_on INTEGER NOT NULL, text TEXT NOT NULL);
    """,  # notes of a user that the model reads in every chat
)
"""The migrations, each to the next version of the schema (`PRAGMA user_version`). Released migrations are never
changed.
"""

OLDEST_READER = 6
"""The oldest version of the schema whose code can read and write today's. A migration that only adds tables, or columns
with a default, leaves the number; any other migration raises it to its own."""


class _Unusable(Exception):
    """The file does not contain chats in a format that we can read."""


class _Newer(Exception):
    """A newer localllm wrote the file, in a format that only newer versions can read."""


class _Database(sqlite3.Connection):
    """A connection that holds the lock of its file until it is closed."""

    held: IO[str] | None = None

    def close(self) -> None:
        super().close()
        if self.held is not None:
            self.held.close()


def chats_path() -> Path:
    """$XDG_DATA_HOME/localllm/chats.db"""
    return data_folder() / "chats.db"


def open_database(path: Path | None) -> tuple[sqlite3.Connection, str]:
    """Return the database (`path` None: in memory), and a notice for the user. Raises `ChatsUnavailable` for a locked
    file.
    """
    if path is None:
        return _prepared(":memory:"), ""
    try:
        return _open_file(path), ""
    except _Newer as error:
        said = f"{error} They are left as they are, and the chats of this run are not stored."
    except _Unusable as error:
        if aside := _set_aside(path):
            log.error("chats set aside path=%s reason=%s", aside, error)
            return _open_file(path), f"{error} They were set aside as {aside}, and a new file was created."
        said = f"{error} Another localllm has the file open, so it stays, and the chats of this run are not stored."
    log.error("chats are kept in memory reason=%s", said)
    return _prepared(":memory:"), said


@contextmanager
def beside_a_server(path: Path) -> Iterator[sqlite3.Connection | None]:
    """Yield the database of a server that may be running; None if there is no file. Nothing is migrated or renamed.
    Raises `ChatsUnavailable`.
    """
    if not path.exists():
        yield None
        return
    try:
        with closing(_connected(str(path), file_versions.hold(path))) as db:
            _refuse_newer(db, str(path))
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA secure_delete = ON")
            yield db
    except _Newer as error:
        raise ChatsUnavailable(str(error), hint="localllm update") from error
    except sqlite3.Error as error:
        raise unavailable(error, path) from error


def unavailable(error: sqlite3.Error, path: Path | None) -> ChatsUnavailable:
    """Return the error in our words, with a hint."""
    code = _code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        what, hint = (
            "The chats are locked by another program.",
            "Close the program that has the file open, then try again.",
        )
    elif code == sqlite3.SQLITE_FULL:
        what, hint = "The chats cannot be written: the disk is full.", "Free some space, then try again."
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        what, hint = (
            "The file with the chats is damaged.",
            "Restart the server: it moves the file aside and creates a new one.",
        )
    else:
        what = "The chats cannot be read or written."
        hint = "Check the folder's permissions, or start with --no-chat-history."
    return ChatsUnavailable(what, f"{path or 'in memory'}: {error}.", hint)


def _open_file(path: Path) -> sqlite3.Connection:
    try:
        make_private(path.parent)
        os.close(open_private(path, os.O_RDWR | os.O_CREAT))  # created before SQLite does it, with a private mode
        return _prepared(str(path), file_versions.hold(path))
    except OSError as error:
        hint = "Check the folder's permissions and space, or start with --no-chat-history."
        raise ChatsUnavailable("The chats cannot be read or written.", f"{path}: {error.strerror}.", hint) from error
    except sqlite3.Error as error:
        # SQLITE_ERROR: a table that a migration expects is missing, so the file is not ours.
        if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise _Unusable(f"The chats in {path} could not be read ({error}).") from error
        raise unavailable(error, path) from error


def _connected(name: str, held: IO[str] | None) -> _Database:
    """Connect to the file. The lock is given back when the connection is closed, or now if this fails."""
    try:
        db = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, factory=_Database)
    except BaseException:
        if held is not None:
            held.close()
        raise
    db.held = held
    return db


def _prepared(name: str, held: IO[str] | None = None) -> sqlite3.Connection:
    db = _connected(name, held)
    try:
        _refuse_newer(db, name)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA secure_delete = ON")  # deleted data is overwritten, not only unlinked
        found = db.execute("PRAGMA quick_check (1)").fetchone()[0]
        if found != "ok":
            raise _Unusable(f"The chats in {name} are damaged ({found}).")
        file_versions.delete_copies(db, older_than_s=file_versions.KEEP_COPY_S)
        _migrate(db, name)
    except BaseException:
        db.close()
        raise
    return db


def _refuse_newer(db: sqlite3.Connection, name: str) -> None:
    """Raise `_Newer` for a file that this version cannot read and write."""
    was = file_versions.read_written(db)
    if was.version > len(MIGRATIONS) and was.oldest_reader > len(MIGRATIONS):
        who = f"localllm {was.localllm}" if was.localllm else "a newer localllm"
        raise _Newer(
            f"The chats in {name} were written by {who} (version {was.version} of their tables; this one reads up to "
            f"{len(MIGRATIONS)}). Update localllm to see them."
        )


def _migrate(db: sqlite3.Connection, name: str) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):  # a newer file that this version can use as well
        return
    if 0 < version < len(MIGRATIONS):
        file_versions.copy_before_migration(db, Path(name), version)
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        # All or nothing, and only once: another server may have migrated first.
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] >= number:
            db.execute("COMMIT")
            continue
        try:
            for statement in _statements(script):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
    file_versions.record_written(db, OLDEST_READER)


def _statements(script: str) -> list[str]:
    """Split a script into statements; `executescript` would commit between them."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _set_aside(path: Path) -> Path | None:
    """Rename the file and its journal to a name with the date. Return None if another process has the file open."""
    stem = path.with_name(f"{path.name}.broken-{time.strftime('%Y-%m-%dT%H%M%S')}")
    aside, number = stem, 1
    while aside.exists():
        number += 1
        aside = stem.with_name(f"{stem.name}-{number}")
    with file_versions.alone(path) as free:
        if not free:
            return None
        try:
            file_versions.move(path, aside)
        except PermissionError:  # Windows does not rename a file that another process has open
            return None
    return aside
