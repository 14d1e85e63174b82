"""The list of chats, and full-text search over titles and messages: every word must match as a prefix.

Does not know: how rows are written (chats.py).
"""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from typing import Any

from localllm.web.pages.chat.store.records import Chat, FoundChat

CHAT = (
    "chat.id, chat.title, chat.pinned, chat.leaf, chat.settings, chat.updated_s, chat.archived, chat.project_id, "
    "(SELECT name FROM project WHERE project.id = chat.project_id AND project.deletion IS NULL)"
)
LISTED = "owner = ? AND chat.deletion IS NULL AND archived = ?"
NEWEST_FIRST = "ORDER BY pinned DESC, updated_s DESC, number DESC"
TOKEN = re.compile(r"[^\W_]+")
MOST_TOKENS = 16
AROUND = 60
"""Characters of a message that are shown on each side of a match."""


def chat(row: tuple[Any, ...]) -> Chat:
    chat_id, title, pinned, leaf, settings, updated_s, archived, project_id, project_name = row
    project = (project_id, project_name) if project_name is not None else (None, "")  # a deleted project is not shown
    return Chat(chat_id, title, bool(pinned), leaf, json.loads(settings), updated_s, bool(archived), *project)


def list_chats(
    db: sqlite3.Connection, owner: str, limit: int, offset: int = 0, *, archived: bool = False, project_id: str = ""
) -> list[Chat]:
    """Return chats, pinned ones first, then the newest: all, or the chats of a project."""
    where, values = (" AND project_id = ?", [project_id]) if project_id else ("", [])
    rows = db.execute(
        f"SELECT {CHAT} FROM chat WHERE {LISTED}{where} {NEWEST_FIRST} LIMIT ? OFFSET ?",
        (owner, archived, *values, limit, offset),
    )
    return [chat(row) for row in rows]


def list_outside_projects(db: sqlite3.Connection, owner: str, limit: int) -> list[Chat]:
    """Return the pinned chats, and the newest of those that are in no project."""
    outside = "NOT EXISTS (SELECT 1 FROM project WHERE project.id = project_id AND project.deletion IS NULL)"
    rows = db.execute(
        f"SELECT {CHAT} FROM chat WHERE {LISTED} AND (pinned OR {outside}) {NEWEST_FIRST} LIMIT ?",
        (owner, False, limit),
    )
    return [chat(row) for row in rows]


def list_in_projects(db: sqlite3.Connection, owner: str, each: int) -> list[Chat]:
    """Return the newest chats of every project, at most `each` of one, without pinned chats."""
    ranked = (
        "SELECT *, row_number() OVER (PARTITION BY project_id ORDER BY updated_s DESC, number DESC) AS place "
        f"FROM chat WHERE {LISTED} AND project_id IS NOT NULL AND NOT pinned"
    )
    rows = db.execute(
        f"SELECT {CHAT} FROM ({ranked}) AS chat WHERE place <= ? ORDER BY updated_s DESC, number DESC",
        (owner, False, each),
    )
    return [found for row in rows if (found := chat(row)).project_id is not None]


def search(db: sqlite3.Connection, owner: str, words: str, limit: int) -> list[FoundChat]:
    """Return chats, newest first, with every word in the title, or every word in one message."""
    asked = query(words)
    if not asked:
        return []
    found: dict[str, FoundChat] = {}
    titles = db.execute(
        f"SELECT {CHAT} FROM title_words JOIN chat ON chat.number = title_words.rowid "
        "WHERE title_words MATCH ? AND owner = ? AND deletion IS NULL ORDER BY updated_s DESC LIMIT ?",
        (asked, owner, limit),
    )
    for row in titles:
        found[row[0]] = FoundChat(chat(row))
    newest = db.execute(
        f"SELECT max(message.number), message.text, {CHAT} FROM message_words "
        "JOIN message ON message.number = message_words.rowid JOIN chat ON chat.id = chat_id "
        "WHERE message_words MATCH ? AND owner = ? AND chat.deletion IS NULL "
        "AND message.deletion IS NULL GROUP BY chat_id ORDER BY chat.updated_s DESC LIMIT ?",
        (asked, owner, limit),
    )
    for _, text, *row in newest:
        found[row[0]] = FoundChat(chat(tuple(row)), snippet(text, words))
    return sorted(found.values(), key=lambda each: -each.chat.updated_s)[:limit]


def query(words: str) -> str:
    """Return the FTS5 query: all words, each as a prefix. Typed characters are never treated as operators."""
    return " ".join(f'"{" ".join(tokens)}"*' for tokens in _tokens(words))


def snippet(text: str, words: str) -> tuple[str, str, str]:
    """Return the text around the first match of a word: before, the match, after.

    FTS5's snippet() takes seconds for a word that occurs 20,000 times, because its time is quadratic in the matches.
    """
    match = _pattern(words).search(text) or _pattern(_without_accents(words)).search(_without_accents(text))
    start, end = match.span() if match else (0, 0)
    before, after = text[max(0, start - AROUND) : start], text[end : end + AROUND]
    if start > AROUND:
        before = "…" + before.partition(" ")[2]
    if end + AROUND < len(text):
        after = after.rpartition(" ")[0] + "…"
    return before, text[start:end], after


def _pattern(words: str) -> re.Pattern[str]:
    phrases = (r"[\W_]+".join(tokens) for tokens in _tokens(words))
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(phrases)})[^\W_]*", re.IGNORECASE)


def _tokens(words: str) -> list[list[str]]:
    """Return each word's tokens as FTS5's unicode61 splits them, at most `MOST_TOKENS` of all words together."""
    found, left = [], MOST_TOKENS
    for word in unicodedata.normalize("NFC", words).split():
        tokens = TOKEN.findall(word)[:left]
        left -= len(tokens)
        found += [tokens] if tokens else []
    return found


def _without_accents(text: str) -> str:
    """Return a text of the same length in which no letter has an accent."""
    return "".join(unicodedata.normalize("NFD", character)[0] for character in text)
