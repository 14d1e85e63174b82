"""The list of chats, and full-text search over titles and messages: every word must match as a prefix.

Does not know: how rows are written (chats.py).
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from localllm.web.pages.chat.store.records import Chat, Found

CHAT = "chat.id, chat.title, chat.pinned, chat.leaf, chat.settings, chat.updated_s"
MARK, END = "\x02", "\x03"
MOST_WORDS = 16


def chat(row: tuple[Any, ...]) -> Chat:
    chat_id, title, pinned, leaf, settings, updated_s = row
    return Chat(chat_id, title, bool(pinned), leaf, json.loads(settings), updated_s)


def list_chats(db: sqlite3.Connection, owner: str, limit: int) -> list[Chat]:
    rows = db.execute(
        f"SELECT {CHAT} FROM chat WHERE owner = ? AND deletion IS NULL ORDER BY pinned DESC, updated_s DESC LIMIT ?",
        (owner, limit),
    )
    return [chat(row) for row in rows]


def search(db: sqlite3.Connection, owner: str, words: str, limit: int) -> list[Found]:
    """Return chats, newest first, with every word in the title, or every word in one message."""
    asked = query(words)
    if not asked:
        return []
    found: dict[str, Found] = {}
    titles = db.execute(
        f"SELECT {CHAT} FROM title_words JOIN chat ON chat.number = title_words.rowid "
        "WHERE title_words MATCH ? AND owner = ? AND deletion IS NULL ORDER BY updated_s DESC LIMIT ?",
        (asked, owner, limit),
    )
    for row in titles:
        found[row[0]] = Found(chat(row))
    newest = db.execute(
        "SELECT max(message.number), chat.updated_s FROM message_words "
        "JOIN message ON message.number = message_words.rowid JOIN chat ON chat.id = chat_id "
        "WHERE message_words MATCH ? AND owner = ? AND chat.deletion IS NULL "
        "AND message.deletion IS NULL GROUP BY chat_id ORDER BY chat.updated_s DESC LIMIT ?",
        (asked, owner, limit),
    )
    for number, _ in newest.fetchall():
        *row, snippet = db.execute(
            f"SELECT {CHAT}, snippet(message_words, 0, ?, ?, '…', 12) FROM message_words "
            "JOIN message ON message.number = message_words.rowid JOIN chat ON chat.id = chat_id "
            "WHERE message_words MATCH ? AND message_words.rowid = ?",
            (MARK, END, asked, number),
        ).fetchone()
        found[row[0]] = Found(chat(tuple(row)), _cut(snippet))
    return sorted(found.values(), key=lambda each: -each.chat.updated_s)[:limit]


def query(words: str) -> str:
    """Return the FTS5 query: all words, each as a prefix. Typed characters are never treated as operators."""
    kept = [word for word in words.replace("\0", " ").replace('"', " ").split() if any(map(str.isalnum, word))]
    return " ".join(f'"{word}"*' for word in kept[:MOST_WORDS])


def _cut(snippet: str) -> tuple[str, str, str]:
    before, _, rest = snippet.partition(MARK)
    found, _, after = rest.partition(END)
    return before, found, after.replace(MARK, "").replace(END, "")
