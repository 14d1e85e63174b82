"""Operations on the pictures of messages: files beside the messages that name them by digest.

A picture belongs to an owner. It is deleted with the last message that names it, by triggers of the database.
Does not know: how a picture is decoded, templates.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from localllm.errors import MediaTooLarge
from localllm.units import format_bytes
from localllm.web.pages.chat.store.tables import Tables

MOST_BYTES = 2 * 2**30
"""Pictures of all chats together."""


class PictureFiles(Tables):
    """The operations on the table of pictures."""

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
        if num_bytes > MOST_BYTES:
            raise MediaTooLarge(
                "The pictures of all chats take too much space.",
                f"With this one they have {format_bytes(num_bytes)}; the limit is {format_bytes(MOST_BYTES)}.",
                "Delete chats with pictures.",
            )
        kept = [{key: value for key, value in each.items() if key != "data"} for each in details["pictures"]]
        return {**details, "pictures": kept}
