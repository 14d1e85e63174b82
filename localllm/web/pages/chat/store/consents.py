"""Decisions of owners about tools of servers: always, or never.

Does not know: chats, which tools there are.
"""

from __future__ import annotations

import time

from localllm.web.pages.chat.store.records import Consent
from localllm.web.pages.chat.store.tables import Tables


class Consents(Tables):
    """One decision for each owner, server and tool."""

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
