"""Operations on several chats at once: list, archive, move to a project, delete, and sums over a chat's messages.

A call names its owner; ids of other owners are left out. Does not know: messages one by one (chats.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.web.pages.chat.store import search
from localllm.web.pages.chat.store.projects import Projects
from localllm.web.pages.chat.store.records import Chat, ChatNotFound, ChatTotals
from localllm.web.pages.chat.store.tables import GONE_HINT

OLD = "owner = ? AND deletion IS NULL AND NOT pinned AND updated_s < ?"


class Selections(Projects):
    """The operations on several chats."""

    def latest(self, owner: str, limit: int, offset: int = 0, *, archived: bool = False) -> list[Chat]:
        """Return chats, pinned ones first, then the newest. Archived chats are a list of their own."""
        return search.list_chats(self._db, owner, limit, offset, archived=archived)

    def outside_projects(self, owner: str, limit: int) -> list[Chat]:
        """Return the pinned chats, and the newest of those that are in no project."""
        return search.list_outside_projects(self._db, owner, limit)

    def in_projects(self, owner: str, each: int) -> list[Chat]:
        """Return the newest chats of every project, at most `each` of one, without pinned chats."""
        return search.list_in_projects(self._db, owner, each)

    def archive(self, owner: str, ids: Sequence[str], archived: bool) -> list[str]:
        """Archive chats or return them to the list; return the ids of those that exist. Raises `ChatNotFound` for
        none.
        """
        return self._set(owner, ids, "archived = ?", archived)

    def move(self, owner: str, ids: Sequence[str], project_id: str) -> list[str]:
        """Move chats to a project, or out of theirs (an empty id); return the ids of those that exist. Raises
        `ChatNotFound` for none, `ProjectNotFound`.
        """
        return self._set(owner, ids, "project_id = ?", self.project(owner, project_id).id if project_id else None)

    def delete_chats(self, owner: str, ids: Sequence[str]) -> tuple[str, list[str]]:
        """Delete chats; return the id with which `undo` restores all of them, and the ids of those that existed. Raises
        `ChatNotFound` for none.
        """
        with self._whole():
            deletion = self._new_deletion()
            return deletion, self._set(owner, ids, "deletion = ?", deletion)

    def count_old(self, owner: str, before_s: float) -> int:
        """Return how many chats have not changed since a time, without pinned ones."""
        return int(self._db.execute(f"SELECT count(*) FROM chat WHERE {OLD}", (owner, before_s)).fetchone()[0])

    def old(self, owner: str, before_s: float) -> list[str]:
        """Return the ids of the chats that have not changed since a time, without pinned ones."""
        return [row[0] for row in self._db.execute(f"SELECT id FROM chat WHERE {OLD}", (owner, before_s))]

    def totals(self, chat_id: str) -> ChatTotals:
        """Return the sums over a chat's messages, on all branches."""
        row = self._db.execute(
            """
            SELECT count(*), total(prompt), total(cached), total(completion),
                total(ttft_s) + total(CASE WHEN rate > 0 AND completion > 1 THEN (completion - 1) / rate END)
            FROM (SELECT json_extract(details, '$.prompt_tokens') AS prompt,
                json_extract(details, '$.cached_tokens') AS cached,
                json_extract(details, '$.completion_tokens') AS completion,
                json_extract(details, '$.ttft_s') AS ttft_s, json_extract(details, '$.tokens_per_s') AS rate
                FROM message WHERE chat_id = ? AND deletion IS NULL)
            """,
            (chat_id,),
        ).fetchone()
        messages, prompt, cached, completion, duration_s = row
        return ChatTotals(messages, int(prompt), int(cached), int(completion), duration_s)

    def _set(self, owner: str, ids: Sequence[str], assignment: str, value: object) -> list[str]:
        change = f"UPDATE chat SET {assignment} WHERE id = ? AND owner = ? AND deletion IS NULL"
        changed = [each for each in dict.fromkeys(ids) if self._db.execute(change, (value, each, owner)).rowcount]
        if not changed:
            raise ChatNotFound("No chat was chosen, or the chosen chats are not on the server.", hint=GONE_HINT)
        return changed
