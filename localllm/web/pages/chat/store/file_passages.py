"""Operations on the long files of a chat: their passages, the search over them, their embeddings.

A file belongs to one chat and is deleted with it; every call names the chat, so a file of another one is not found.
Does not know: how a text becomes passages, how rankings are joined (chat/passages/).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from localllm.web.pages.chat.files.passages import Passage, indexed, spread
from localllm.web.pages.chat.store.records import FilePassage, StoredMessage
from localllm.web.pages.chat.store.tables import Tables, new_id

COLUMNS = "passage.number, file.name, file.paged, passage.first, passage.last, passage.text"


class FilePassages(Tables):
    """The operations on the tables of files and passages."""

    def add_long_file(self, chat_id: str, name: str, paged: bool, passages: Sequence[Passage]) -> str:
        """Add a file; return its id."""
        with self._whole():
            return self._insert_file(chat_id, name, paged, passages)

    def replace_file(self, chat_id: str, name: str, paged: bool, passages: Sequence[Passage], changed_s: float) -> None:
        """Add a file that replaces the one of this name. `changed_s`: when it was changed."""
        with self._whole():
            self._db.execute("DELETE FROM file WHERE chat_id = ? AND name = ?", (chat_id, name))
            self._insert_file(chat_id, name, paged, passages, changed_s)

    def remove_files(self, chat_id: str, names: Iterable[str]) -> None:
        with self._whole():
            doomed = [(chat_id, name) for name in names]
            self._db.executemany("DELETE FROM file WHERE chat_id = ? AND name = ?", doomed)

    def file_stamps(self, chat_id: str) -> dict[str, tuple[float, int]]:
        """Return the time of each file and its number of passages, by name."""
        rows = self._db.execute(
            "SELECT name, created_s, (SELECT count(*) FROM passage WHERE file = file.number) FROM file "
            "WHERE chat_id = ?",
            (chat_id,),
        )
        return {name: (created_s, count) for name, created_s, count in rows}

    def file_ids(self, chat_id: str) -> list[str]:
        """Return the ids of all files of a chat."""
        return [row[0] for row in self._db.execute("SELECT id FROM file WHERE chat_id = ? ORDER BY number", (chat_id,))]

    def _insert_file(
        self, chat_id: str, name: str, paged: bool, passages: Sequence[Passage], created_s: float | None = None
    ) -> str:
        file_id = new_id()
        at = self._db.execute(
            "INSERT INTO file (id, chat_id, name, paged, created_s) VALUES (?, ?, ?, ?, ?)",
            (file_id, chat_id, name, paged, time.time() if created_s is None else created_s),
        ).lastrowid
        first = self._db.execute("SELECT ifnull(max(number), 0) + 1 FROM passage").fetchone()[0]
        self._db.executemany(
            "INSERT INTO passage (number, file, first, last, text) VALUES (?, ?, ?, ?, ?)",
            ((number, at, each.first, each.last, each.text) for number, each in enumerate(passages, first)),
        )
        self._db.executemany(
            "INSERT INTO passage_words (rowid, text) VALUES (?, ?)",
            ((number, indexed(each.text)) for number, each in enumerate(passages, first)),
        )
        return file_id

    def _with_copied_files(
        self, messages: Sequence[StoredMessage], from_chat: str, to_chat: str
    ) -> list[StoredMessage]:
        """Return messages that are copied to another chat, with the ids of their files there: the files are copied,
        too. Their embeddings are made anew.
        """
        wanted = {file["file"] for message in messages for file in message.details.get("files", []) if "file" in file}
        copies = {}
        for at, file_id, name, paged in self._db.execute(
            "SELECT number, id, name, paged FROM file WHERE chat_id = ?", (from_chat,)
        ).fetchall():
            if file_id in wanted:
                rows = self._db.execute(
                    "SELECT text, 0, first, last FROM passage WHERE file = ? ORDER BY number", (at,)
                )
                copies[file_id] = self._insert_file(to_chat, name, bool(paged), [Passage(*row) for row in rows])
        return [
            replace(message, details={**message.details, "files": _renamed(message.details["files"], copies)})
            if "files" in message.details
            else message
            for message in messages
        ]

    def known_files(self, chat_id: str, file_ids: Collection[str]) -> list[str]:
        """Return the given files that the chat has."""
        rows = self._db.execute("SELECT id FROM file WHERE chat_id = ? ORDER BY number", (chat_id,))
        return [file_id for (file_id,) in rows if file_id in file_ids]

    def matching(self, chat_id: str, file_ids: Iterable[str], query: str, most: int) -> list[int]:
        """Return the numbers of the passages that match a full-text query, best first (bm25)."""
        found = list[tuple[float, int]]()
        for first, last in _merged(self._ranges(chat_id, file_ids)):
            found += self._db.execute(
                "SELECT bm25(passage_words) AS score, rowid FROM passage_words "
                "WHERE passage_words MATCH ? AND rowid BETWEEN ? AND ? ORDER BY score, rowid LIMIT ?",
                (query, first, last, most),
            ).fetchall()
        return [number for _, number in sorted(found)[:most]]

    def sampled(self, chat_id: str, file_ids: Iterable[str], most: int) -> list[int]:
        """Return passages from the whole length of each file, for a question that no passage matches. The first few of
        them are from each file, and spread, too.
        """
        ranges = self._ranges(chat_id, file_ids)
        share = max(1, most // max(1, len(ranges)))
        samples = [[first + step for step in spread(last - first + 1, share)] for first, last in ranges]
        return [number for each in zip_longest(*samples) for number in each if number is not None][:most]

    def passages(self, chat_id: str, numbers: Iterable[int]) -> dict[int, FilePassage]:
        """Return passages of the chat by their numbers."""
        found = {}
        for number in numbers:
            row = self._db.execute(
                f"SELECT {COLUMNS} FROM passage JOIN file ON file.number = passage.file "
                "WHERE passage.number = ? AND file.chat_id = ?",
                (number, chat_id),
            ).fetchone()
            if row is not None:
                found[number] = _passage(row)
        return found

    # Embeddings -------------------------------------------------------------------------------------------------

    def without_vector(self, chat_id: str, model: str, most: int, most_in_file: int) -> list[tuple[int, str]]:
        """Return (number, text) of passages that a model has not embedded yet, of the first `most_in_file` of each
        file.
        """
        return self._db.execute(
            "SELECT passage.number, passage.text FROM passage JOIN file ON file.number = passage.file "
            "LEFT JOIN passage_vector AS it ON it.passage = passage.number AND it.model = ? "
            "WHERE file.chat_id = ? AND it.passage IS NULL AND passage.number < ? + "
            "(SELECT min(number) FROM passage WHERE file = file.number) ORDER BY passage.number LIMIT ?",
            (model, chat_id, most_in_file, most),
        ).fetchall()

    def add_vectors(self, model: str, vectors: Mapping[int, bytes]) -> None:
        """Store embeddings by passage. Embeddings of a passage that was deleted meanwhile are dropped."""
        with self._whole():
            self._db.executemany(
                "INSERT OR REPLACE INTO passage_vector (passage, model, vector) "
                "SELECT number, ?, ? FROM passage WHERE number = ?",
                [(model, vector, number) for number, vector in vectors.items()],
            )

    def vectors(self, chat_id: str, file_ids: Iterable[str], model: str) -> list[tuple[int, bytes]]:
        """Return (number, embedding) of every passage that the model has embedded."""
        return [
            row
            for first, last in _merged(self._ranges(chat_id, file_ids))
            for row in self._db.execute(
                "SELECT passage, vector FROM passage_vector WHERE model = ? AND passage BETWEEN ? AND ?",
                (model, first, last),
            )
        ]

    def _ranges(self, chat_id: str, file_ids: Iterable[str]) -> list[tuple[int, int]]:
        """Return the first and the last passage number of each file: a file's passages are added at once."""
        rows = self._db.execute(
            "SELECT file.id, min(passage.number), max(passage.number) "
            "FROM file JOIN passage ON file.number = passage.file WHERE file.chat_id = ? GROUP BY file.number",
            (chat_id,),
        )
        ranges = {file_id: (first, last) for file_id, first, last in rows}
        return [ranges[file_id] for file_id in file_ids if file_id in ranges]


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with neighbours joined: a search in a thousand files that were added together is one query."""
    found = list[tuple[int, int]]()
    for first, last in sorted(ranges):
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def _passage(row: tuple[int, str, int, int, int, str]) -> FilePassage:
    number, name, paged, first, last, text = row
    span = str(first) if first == last else f"{first}–{last}"
    return FilePassage(number, name, f"p. {span}" if paged else f"line{'s' * (first != last)} {span}", text)


def _renamed(files: Sequence[Mapping[str, Any]], copies: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{**file, "file": copies[file["file"]]} if file.get("file") in copies else dict(file) for file in files]
