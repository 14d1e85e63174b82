"""Operations on chats, messages, pictures and consents to tools: plain calls on a database, each in one transaction.

A chat has an owner, the name of a key or an empty string; every call for a chat names the owner. Deleted rows are
marked first, so that they can be restored, and purged later.
Does not know: threads (chat_store.py), how the file is opened (database.py).
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

from localllm.errors import MediaTooLarge
from localllm.machine.running_servers import is_of_other_process, process_mark
from localllm.units import format_bytes
from localllm.web.pages.chat.store import search
from localllm.web.pages.chat.store.file_passages import FilePassages
from localllm.web.pages.chat.store.file_versions import delete_copies
from localllm.web.pages.chat.store.records import (
    Branch,
    Chat,
    ChatLink,
    ChatNotFound,
    Consent,
    FoundChat,
    Restored,
    Role,
    StoredMessage,
    Tree,
)
from localllm.web.pages.chat.store.saved_prompts import SavedPrompts
from localllm.web.pages.chat.store.selections import Selections
from localllm.web.pages.chat.store.tables import GONE_HINT, Tables, as_json, new_id

ADD_MESSAGE = """INSERT INTO message (id, chat_id, parent_id, role, text, details, created_s, writer)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
UNFINISHED = "role = 'assistant' AND json_extract(details, '$.finish_reason') = ''"
UNDO_S = 120.0
"""How long a deletion can be undone."""
HANGS_ON_NOTHING = """SELECT 1 FROM message AS it WHERE deletion = :it AND parent_id IS NOT NULL AND NOT EXISTS
    (SELECT 1 FROM message AS parent WHERE parent.id = it.parent_id AND ifnull(parent.deletion, :it) = :it)"""
NUMBERED = re.compile(r" \(\d{1,6}\)$")


LINK = "SELECT chat_id, title, secret, chat_link.leaf, created_s FROM chat_link JOIN chat ON chat.id = chat_id"
LINK_BYTES = 24
"""Random bytes of a link's secret: nobody guesses 192 bits."""

MOST_PICTURE_BYTES = 2 * 2**30
"""Pictures of all chats together."""


class PictureFiles(Tables):
    """Pictures of messages, which name them by digest. A picture belongs to an owner. Triggers of the database delete
    it with the last message that names it."""

    def picture(self, owner: str, digest: str) -> tuple[str, bytes] | None:
        """Return the format and the bytes of a picture; None if the owner has no such picture."""
        found = self._db.execute("SELECT kind, data FROM picture WHERE owner = ? AND digest = ?", (owner, digest))
        row: tuple[str, bytes] | None = found.fetchone()
        return row

    def picture_files(self, chat_id: str, digests: Collection[str]) -> dict[str, bytes]:
        """Return the bytes of pictures of a chat, by digest."""
        query = "SELECT digest, data FROM picture JOIN chat USING (owner) WHERE chat.id = ? AND digest = ?"
        rows = (self._db.execute(query, (chat_id, digest)).fetchone() for digest in set(digests))
        return dict(row for row in rows if row is not None)

    def _keep_pictures(self, owner: str, details: Mapping[str, Any]) -> dict[str, Any]:
        """Store the pictures whose bytes a message's details hold, and return the details without bytes.

        Raises `MediaTooLarge` if there is no room for them.
        """
        if "pictures" not in details:
            return dict(details)
        for each in details["pictures"]:
            if "data" in each:
                row = (owner, each["digest"], each["kind"], each["data"], time.time())
                self._db.execute("INSERT OR IGNORE INTO picture VALUES (?, ?, ?, ?, ?)", row)
        [num_bytes] = self._db.execute("SELECT ifnull(sum(length(data)), 0) FROM picture").fetchone()
        if num_bytes > MOST_PICTURE_BYTES:
            raise MediaTooLarge(
                "The pictures of all chats take too much space.",
                f"With this one they have {format_bytes(num_bytes)}; the limit is {format_bytes(MOST_PICTURE_BYTES)}.",
                "Delete chats with pictures.",
            )
        kept = [{key: value for key, value in each.items() if key != "data"} for each in details["pictures"]]
        return {**details, "pictures": kept}


class Ratings(Tables):
    """Ratings of replies: good or bad, with a note."""

    def rate(self, message_id: str, rating: str, note: str) -> None:
        """Keep the rating of a reply; an empty one takes it back."""
        kept = as_json({"rating": rating, "note": note, "at_s": time.time()}) if rating else "null"
        self._db.execute(
            "UPDATE message SET details = json_patch(details, json_object('rating', json(?))) WHERE id = ?",
            (kept, message_id),
        )

    def rated(self, owner: str) -> list[tuple[str, str]]:
        """Return chat and id of each reply of an owner that has a rating, the oldest first."""
        rows = self._db.execute(
            "SELECT chat_id, message.id FROM message JOIN chat ON chat.id = chat_id WHERE owner = ?"
            " AND message.deletion IS NULL AND chat.deletion IS NULL AND json_extract(details, '$.rating') IS NOT NULL"
            " ORDER BY message.number",
            (owner,),
        )
        return rows.fetchall()


class ChatLinks(Tables):
    """Links to read single chats. A chat has one at most; it ends with the chat."""

    def set_link(self, owner: str, chat_id: str, leaf: str) -> None:
        """Let a link show a chat up to a message. A link that exists keeps its secret."""
        self._db.execute(
            "INSERT INTO chat_link (chat_id, secret, leaf, created_s) SELECT id, ?, ?, ? FROM chat WHERE id = ? "
            "AND owner = ? ON CONFLICT (chat_id) DO UPDATE SET leaf = excluded.leaf, created_s = excluded.created_s",
            (secrets.token_urlsafe(LINK_BYTES), leaf, time.time(), chat_id, owner),
        )

    def end_link(self, owner: str, chat_id: str) -> None:
        """End a chat's link for good: a later one has another secret."""
        self._db.execute(
            "DELETE FROM chat_link WHERE chat_id = (SELECT id FROM chat WHERE id = ? AND owner = ?)", (chat_id, owner)
        )

    def links(self, owner: str) -> list[ChatLink]:
        """Return the links to an owner's chats, the newest first."""
        rows = self._db.execute(f"{LINK} WHERE owner = ? AND deletion IS NULL ORDER BY created_s DESC", (owner,))
        return [ChatLink(*row) for row in rows]

    def link(self, secret: str) -> ChatLink | None:
        """Return the link with this secret, whoever asks; None if there is none."""
        row = self._db.execute(f"{LINK} WHERE secret = ? AND deletion IS NULL", (secret,)).fetchone()
        return ChatLink(*row) if row is not None else None


class Consents(Tables):
    """Decisions of owners about tools of servers: always, or never. One for each owner, server and tool."""

    def consents(self, owner: str) -> list[Consent]:
        """Return what an owner decided about tools, by server and tool."""
        rows = self._db.execute(
            "SELECT server, tool, digest, choice, at_s FROM tool_consent WHERE owner = ? ORDER BY server, tool",
            (owner,),
        )
        return [Consent(*row) for row in rows]

    def set_consent(self, owner: str, server: str, tool: str, digest: str, choice: str) -> None:
        row = (owner, server, tool, digest, choice, time.time())
        self._db.execute("INSERT OR REPLACE INTO tool_consent VALUES (?, ?, ?, ?, ?, ?)", row)

    def revoke_consent(self, owner: str, server: str, tool: str) -> None:
        """Have a tool ask again."""
        where = (owner, server, tool)
        self._db.execute("DELETE FROM tool_consent WHERE owner = ? AND server = ? AND tool = ?", where)


class Chats(Consents, Ratings, ChatLinks, FilePassages, PictureFiles, SavedPrompts, Selections):
    """The operations on the tables. Those on files, prompts, projects and several chats are in modules of their own."""

    # Chats ------------------------------------------------------------------------------------------------------

    def create(
        self, owner: str, title: str, settings: Mapping[str, str], project_id: str = "", chat_id: str = ""
    ) -> Chat:
        """Create a chat, in a project if one is named. chat_id: chosen by the page that the chat began on; an id that
        was used before is replaced. Raises `ProjectNotFound`.
        """
        project = self.project(owner, project_id).id if project_id else None
        if not chat_id or self._db.execute("SELECT 1 FROM chat WHERE id = ?", (chat_id,)).fetchone():
            chat_id = new_id()
        row = (chat_id, owner, title, as_json(settings), time.time(), project)
        self._db.execute(
            "INSERT INTO chat (id, owner, title, settings, updated_s, project_id) VALUES (?, ?, ?, ?, ?, ?)", row
        )
        return self.get(owner, chat_id)

    def get(self, owner: str, chat_id: str) -> Chat:
        """Return a chat. Raises `ChatNotFound`."""
        found = self._db.execute(
            f"SELECT {search.CHAT} FROM chat WHERE id = ? AND owner = ? AND deletion IS NULL", (chat_id, owner)
        ).fetchone()
        if found is None:
            raise ChatNotFound("This chat is not on the server.", "It was deleted, or it never existed.", GONE_HINT)
        return search.chat(found)

    def rename(self, owner: str, chat_id: str, title: str) -> None:
        self._change(owner, chat_id, "title = ?", title)

    def retitle(self, owner: str, chat_id: str, before: str, title: str) -> None:
        """Rename a chat unless it was renamed since it was called `before`."""
        if self.get(owner, chat_id).title == before:
            self.rename(owner, chat_id, title)

    def pin(self, owner: str, chat_id: str, pinned: bool) -> None:
        self._change(owner, chat_id, "pinned = ?", pinned)

    def configure(self, owner: str, chat_id: str, settings: Mapping[str, str]) -> None:
        self._change(owner, chat_id, "settings = ?", as_json(settings))

    def _change(self, owner: str, chat_id: str, assignment: str, value: object) -> None:
        self.get(owner, chat_id)
        self._db.execute(f"UPDATE chat SET {assignment} WHERE id = ?", (value, chat_id))

    def search(self, owner: str, words: str, limit: int) -> list[FoundChat]:
        """Return chats whose title or messages contain words that begin with each of these."""
        return search.search(self._db, owner, words, limit)

    def ids(self, owner: str) -> list[str]:
        """Return the ids of all chats of an owner, the oldest first, archived ones too."""
        rows = self._db.execute("SELECT id FROM chat WHERE owner = ? AND deletion IS NULL ORDER BY updated_s", (owner,))
        return [chat_id for (chat_id,) in rows]

    def count(self, owner: str) -> int:
        """Return how many chats an owner has, without deleted ones."""
        row = self._db.execute("SELECT count(*) FROM chat WHERE owner = ? AND deletion IS NULL", (owner,)).fetchone()
        return int(row[0])

    # Messages ---------------------------------------------------------------------------------------------------

    def add(
        self,
        chat_id: str,
        parent_id: str | None,
        role: Role,
        text: str,
        details: Mapping[str, Any] | None = None,
    ) -> StoredMessage:
        """Add a message; it becomes the end of the shown branch. An archived chat returns to the list."""
        message_id, now_s = new_id(), time.time()
        with self._whole():
            if details and "pictures" in details:
                [owner] = self._db.execute("SELECT owner FROM chat WHERE id = ?", (chat_id,)).fetchone()
                details = self._keep_pictures(owner, details)
            self._db.execute(
                ADD_MESSAGE,
                (message_id, chat_id, parent_id, role, text, as_json(details or {}), now_s, process_mark()),
            )
            self._db.execute(
                "UPDATE chat SET leaf = ?, updated_s = ?, archived = 0 WHERE id = ?", (message_id, now_s, chat_id)
            )
        return StoredMessage(message_id, parent_id, role, text, details or {}, now_s)

    def add_all(
        self, owner: str, title: str, settings: Mapping[str, str], messages: Sequence[StoredMessage], leaf: str | None
    ) -> Chat:
        """Add a chat from elsewhere. Parents must precede their children; ids are replaced by new ones."""
        with self._whole():
            return self._fill(owner, self.create(owner, title, settings), messages, leaf)

    def newest(self) -> int:
        """Return a number that every chat of today has at most, and every later one exceeds."""
        [number] = self._db.execute("SELECT ifnull(max(number), 0) FROM chat").fetchone()
        return int(number)

    def holds(self, owner: str, newest: int, messages: Sequence[StoredMessage]) -> bool:
        """Return whether one chat of the owner, up to the chat `newest`, has all these messages with their times."""
        wanted = {(each.role, each.text, each.created_s) for each in messages if each.created_s}
        if len(wanted) < len(messages) or not wanted:
            return False
        role, text, created_s = min(wanted, key=lambda each: each[2])
        found = self._db.execute(
            "SELECT chat_id FROM message JOIN chat ON chat.id = chat_id WHERE owner = ? AND chat.number <= ?"
            " AND chat.deletion IS NULL AND created_s = ? AND role = ? AND text = ?",
            (owner, newest, created_s, role, text),
        ).fetchall()
        has = "SELECT role, text, created_s FROM message WHERE chat_id = ? AND deletion IS NULL"
        return any(wanted <= set(self._db.execute(has, chat_id)) for chat_id in found)

    def fork(self, owner: str, chat_id: str, message_id: str) -> Chat:
        """Copy the messages that lead to one message, itself included, into a new chat of the same settings and
        project.
        """
        with self._whole():
            chat = self.get(owner, chat_id)
            branch = self.branch(chat_id, self.message(chat_id, message_id).id).messages
            title = self._next_title(owner, chat.title)
            copy = self.create(owner, title, chat.settings, chat.project_id or "")
            messages = self._with_copied_files(branch, chat_id, copy.id)
            return self._fill(owner, copy, messages, message_id, self._left_out(chat_id))

    def _fill(
        self, owner: str, chat: Chat, messages: Sequence[StoredMessage], leaf: str | None, left_out: Sequence[str] = ()
    ) -> Chat:
        ids: dict[str | None, str | None] = {None: None} | {message.id: new_id() for message in messages}
        now_s = time.time()
        rows = [
            (ids[m.id], chat.id, ids[m.parent_id], m.role, m.text, as_json(details), m.created_s or now_s, "")
            for m in messages
            for details in [self._keep_pictures(owner, _own(m.details))]
        ]
        self._db.executemany(ADD_MESSAGE, rows)
        marks = json.dumps([ids[each] for each in left_out if each in ids])
        self._db.execute("UPDATE chat SET leaf = ?, left_out = ? WHERE id = ?", (ids[leaf], marks, chat.id))
        return self.get(owner, chat.id)

    def _next_title(self, owner: str, title: str) -> str:
        """'Blocks' -> 'Blocks (2)', then 'Blocks (3)': the first number that no chat of the owner has."""
        stem = NUMBERED.sub("", title)
        rows = self._db.execute("SELECT title FROM chat WHERE owner = ? AND deletion IS NULL", (owner,))
        taken = {found for (found,) in rows}
        return next(f"{stem} ({number})" for number in count(2) if f"{stem} ({number})" not in taken)

    def compare(self, chat_id: str, parent_id: str, replies: Sequence[Mapping[str, Any]]) -> list[StoredMessage]:
        """Add empty replies with these details to one message, to be shown beside each other until one is selected.
        The first becomes the end of the shown branch.
        """
        ids, now_s = [new_id() for _ in replies], time.time()
        with self._whole():
            self.message(chat_id, parent_id)
            rows = [
                (message_id, chat_id, parent_id, "assistant", "", as_json(details), now_s, process_mark())
                for message_id, details in zip(ids, replies, strict=True)
            ]
            self._db.executemany(ADD_MESSAGE, rows)
            self._db.execute(
                "UPDATE message SET details = json_set(details, '$.compared', json(?)) WHERE id = ?",
                (json.dumps(ids), parent_id),
            )
            self._db.execute("UPDATE chat SET leaf = ?, updated_s = ? WHERE id = ?", (ids[0], now_s, chat_id))
        return self._messages(chat_id, self._tree(chat_id), ids)

    def write(self, message_id: str, text: str, details: Mapping[str, Any]) -> None:
        """Save the current state of a reply. A reply that was deleted meanwhile stays deleted."""
        self._db.execute(
            "UPDATE message SET text = ?, details = ?, writer = ? WHERE id = ?",
            (text, as_json(details), process_mark(), message_id),
        )

    def message(self, chat_id: str, message_id: str) -> StoredMessage:
        """Return a message. Raises `ChatNotFound`."""
        return self._messages(chat_id, self._tree(chat_id), [message_id])[0]

    def branch(self, chat_id: str, leaf: str | None, *, limit: int | None = None, before: str | None = None) -> Branch:
        """Return the messages that lead to a leaf: all, or the last `limit`, optionally only those before a message."""
        tree = self._tree(chat_id)
        path = tree.path(leaf)
        end = path.index(before) if before in path else len(path)
        start = 0 if limit is None else max(0, end - limit)
        messages = tuple(self._messages(chat_id, tree, path[start:end]))
        beside = tuple(self._messages(chat_id, tree, _compared(messages))) if end == len(path) else ()
        marks = self._left_out(chat_id)
        num_left_out = next((at + 1 for at in reversed(range(len(path))) if path[at] in marks), 0)
        return Branch(messages, start, len(path) - end, num_left_out, beside)

    def questions(self, chat_id: str, leaf: str | None) -> tuple[list[tuple[int, StoredMessage]], list[str]]:
        """Return the user's messages that lead to a leaf, each with its place, and the ids of all that lead to it."""
        tree = self._tree(chat_id)
        path = tree.path(leaf)
        messages = self._messages(chat_id, tree, path)
        return [(place, message) for place, message in enumerate(messages) if message.role == "user"], path

    def all_messages(self, chat_id: str) -> list[StoredMessage]:
        """Return the messages of every branch, oldest first."""
        tree = self._tree(chat_id)
        return self._messages(chat_id, tree, list(tree.parents))

    def select(self, chat_id: str, message_id: str) -> str:
        """Show the branch with this message up to its newest leaf; return that leaf. A comparison that the message
        was a part of is over.
        """
        parent_id = self.message(chat_id, message_id).parent_id
        leaf = self._tree(chat_id).newest_leaf(message_id)
        with self._whole():
            self._db.execute("UPDATE chat SET leaf = ? WHERE id = ?", (leaf, chat_id))
            self._db.execute(
                "UPDATE message SET details = json_remove(details, '$.compared') WHERE id = ?", (parent_id,)
            )
        return str(leaf)

    def leave_out(self, owner: str, chat_id: str, message_id: str) -> None:
        """Leave this message, and all before it on its branch, out of what the model reads. Raises `ChatNotFound`."""
        self.message(chat_id, message_id)
        marks = json.dumps([*self._left_out(chat_id), message_id])
        self._change(owner, chat_id, "left_out = ?", marks)

    def bring_back(self, owner: str, chat_id: str) -> None:
        """Let the model read the whole of the shown branch again."""
        path = self._tree(chat_id).path(self.get(owner, chat_id).leaf)
        marks = json.dumps([each for each in self._left_out(chat_id) if each not in path])
        self._change(owner, chat_id, "left_out = ?", marks)

    def _left_out(self, chat_id: str) -> list[str]:
        row = self._db.execute("SELECT left_out FROM chat WHERE id = ?", (chat_id,)).fetchone()
        found: list[str] = json.loads(row[0]) if row is not None else []
        return found

    def _tree(self, chat_id: str) -> Tree:
        return Tree(
            self._db.execute(
                "SELECT id, parent_id FROM message WHERE chat_id = ? AND deletion IS NULL ORDER BY number", (chat_id,)
            )
        )

    def _messages(self, chat_id: str, tree: Tree, ids: Iterable[str]) -> list[StoredMessage]:
        found = []
        for message_id in ids:
            row = self._db.execute(
                "SELECT id, parent_id, role, text, details, created_s FROM message WHERE id = ? AND chat_id = ?",
                (message_id, chat_id),
            ).fetchone()
            if row is None or message_id not in tree.parents:
                raise ChatNotFound("This message is not on the server.", "It was deleted.", GONE_HINT)
            _, parent_id, role, text, details, created_s = row
            versions = tree.versions(message_id)
            found.append(StoredMessage(message_id, parent_id, role, text, json.loads(details), created_s, versions))
        return found

    # Deleting ---------------------------------------------------------------------------------------------------

    def delete(self, owner: str, chat_id: str) -> str:
        """Delete a chat; return the id with which `undo` restores it until it is purged."""
        self.get(owner, chat_id)
        with self._whole():
            deletion = self._new_deletion(None)
            self._db.execute("UPDATE chat SET deletion = ? WHERE id = ?", (deletion, chat_id))
        return deletion

    def delete_message(self, chat_id: str, message_id: str) -> str:
        """Delete a message and all that follow it. The shown branch becomes the newest sibling's, or ends at the
        parent.
        """
        message, tree = self.message(chat_id, message_id), self._tree(chat_id)
        leaf = self._db.execute("SELECT leaf FROM chat WHERE id = ?", (chat_id,)).fetchone()[0]
        others = [each for each in message.versions if each != message_id]
        doomed = tree.below(message_id)
        with self._whole():
            deletion = self._new_deletion(leaf if leaf in doomed else None)
            self._db.executemany("UPDATE message SET deletion = ? WHERE id = ?", [(deletion, each) for each in doomed])
            if leaf in doomed:
                shown = tree.newest_leaf(others[-1]) if others else message.parent_id
                self._db.execute("UPDATE chat SET leaf = ? WHERE id = ?", (shown, chat_id))
        return deletion

    def undo(self, owner: str, deletion: str) -> Restored:
        """Undo a deletion; return what was restored. Raises `ChatNotFound` if it was purged."""
        with self._whole():
            found = self._deleted_by(owner, deletion)
            if found is None:
                raise ChatNotFound("It cannot be restored.", "The time for undo is over, or it is already restored.")
            if found.kind == "message":
                self._restore_messages(deletion)
            else:
                for table in ("chat", "project", "prompt"):
                    self._db.execute(f"UPDATE {table} SET deletion = NULL WHERE deletion = ?", (deletion,))
            self._db.execute("DELETE FROM deletion WHERE id = ?", (deletion,))
        return found

    def _deleted_by(self, owner: str, deletion: str) -> Restored | None:
        kinds: tuple[Literal["project", "prompt", "chat"], ...] = ("project", "prompt", "chat")
        for kind in kinds:
            rows = self._db.execute(f"SELECT id FROM {kind} WHERE deletion = ? AND owner = ?", (deletion, owner))
            if ids := [row[0] for row in rows]:
                return Restored(kind, ids[0], len(ids))
        row = self._db.execute(
            "SELECT chat.id FROM message JOIN chat ON chat.id = chat_id "
            "WHERE message.deletion = ? AND owner = ? LIMIT 1",
            (deletion, owner),
        ).fetchone()
        return Restored("message", row[0]) if row is not None else None

    def _restore_messages(self, deletion: str) -> None:
        if self._db.execute(HANGS_ON_NOTHING, {"it": deletion}).fetchone() is not None:
            raise ChatNotFound("It cannot be restored.", "The message before it was deleted later.")
        chat_id = "(SELECT chat_id FROM message WHERE deletion = :it LIMIT 1)"
        self._db.execute(
            f"UPDATE chat SET leaf = coalesce((SELECT leaf FROM deletion WHERE id = :it), leaf) WHERE id = {chat_id}",
            {"it": deletion},
        )
        self._db.execute("UPDATE message SET deletion = NULL WHERE deletion = ?", (deletion,))

    def purge(self, before_s: float) -> None:
        """Remove permanently what was deleted before a time."""
        self._db.execute("DELETE FROM deletion WHERE at_s <= ?", (before_s,))

    def wipe(self, owner: str) -> int:
        """Remove everything of an owner, prompts, projects and consents too, immediately and permanently, and the
        copies of the file; return the number of chats. The file may be of an older version, which has fewer tables.
        """
        with self._whole():
            count = self._db.execute("DELETE FROM chat WHERE owner = ?", (owner,)).rowcount
            tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table in tables & {"preset", "prompt", "project", "tool_consent", "memory"}:
                self._db.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))
            for table in tables & {"message_words", "title_words", "passage_words"}:
                # A search index keeps the words of deleted rows until it is rebuilt.
                self._db.execute(f"INSERT INTO {table} ({table}) VALUES ('rebuild')")
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint (TRUNCATE)")
        delete_copies(self._db)
        return count

    # Server start ------------------------------------------------------------------------------------------------

    def close_unfinished(self) -> None:
        """Mark replies without an end as interrupted, at server start. Another server on the same file may still be
        writing its own.
        """
        writers = self._db.execute(f"SELECT DISTINCT writer FROM message WHERE {UNFINISHED}").fetchall()
        for (writer,) in writers:
            if not is_of_other_process(writer):
                self._db.execute(
                    "UPDATE message SET details = json_set(details, '$.finish_reason', 'interrupted') "
                    f"WHERE {UNFINISHED} AND writer = ?",
                    (writer,),
                )


def _own(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the details without those that name other messages: a copy has others beside it."""
    return {name: value for name, value in details.items() if name != "compared"}


def _compared(messages: Sequence[StoredMessage]) -> list[str]:
    """Return the ids of the replies that are shown beside the last message, in the order of their creation."""
    if len(messages) < 2:
        return []
    ids, last = messages[-2].details.get("compared", []), messages[-1]
    return [each for each in last.versions if each in ids and each != last.id] if last.id in ids else []
