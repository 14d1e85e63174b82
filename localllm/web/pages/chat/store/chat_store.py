"""All SQL runs in one thread of its own, one call after the other, so the event loop never waits for a disk.

The file is opened at the first call; if that fails, the next call tries again.
Does not know: the calls themselves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from localllm.web.pages.chat.store.chats import UNDO_S, Chats
from localllm.web.pages.chat.store.database import open_database, unavailable

P = ParamSpec("P")
Result = TypeVar("Result")


class ChatStore:
    """The access to the store: `await store.call(Chats.rename, owner, chat_id, title)`."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: the chats are in memory and end with the process."""
        self.path = path
        self.notice = ""  # what happened to the file when it was opened
        self.num_changes = 0  # rows that were changed so far
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chats")
        self._db: sqlite3.Connection | None = None

    async def call(
        self, operation: Callable[Concatenate[Chats, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Run an operation. Raises `ChatsUnavailable` if the file cannot be used, and whatever the operation raises."""

        def work() -> Result:
            try:
                result = operation(chats := self._chats(), *args, **kwargs)
                self.num_changes = chats.num_changes
                return result
            except sqlite3.Error as error:
                raise unavailable(error, self.path) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Close the file, after the last call."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    def _chats(self) -> Chats:
        if self._db is None:
            db, notice = open_database(self.path)
            self._db, self.notice = db, self.notice or notice
            chats = Chats(db)
            chats.close_unfinished()
            chats.purge(time.time() - UNDO_S)  # not earlier, because another server may just have deleted something
        return Chats(self._db)

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
