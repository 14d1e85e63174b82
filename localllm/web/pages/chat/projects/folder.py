"""The folder of a project: a folder of this machine whose files the chats of the project search.

Files are passages in the store, as long files of a message are. They belong to a chat that no list shows, so they are
searched in the same way. The folder is looked through before each question, and when the project's page is open: files
that are new or have another time of change are read, files that are gone are removed. A question waits `WAIT_S` for
that; what is left is read meanwhile. Hidden files and folders, links, and folders of installed packages are left out.
Does not know: HTTP, templates, how passages are found and ranked (files/long_files.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from localllm.errors import InvalidParameter, LocalLLMError, RequestError
from localllm.serving.answers.off_loop import off_loop
from localllm.web.api.documents import MAX_FILE_BYTES, MAX_PDF_BYTES, FileText, UnreadableFile, read_file
from localllm.web.pages.chat.files.passages import cut
from localllm.web.pages.chat.store import Chats, ChatStore
from localllm.web.pages.chat.store.records import ProjectFolder

log = logging.getLogger(__name__)

MAX_FILES = 2_000
"""Most files of a folder that are searched: the first ones by name."""

MAX_BYTES = 200_000_000
"""Most bytes of all files together."""

MOST_SEEN = 20_000
"""Most files and folders that are looked at: a folder with more is not walked to its end."""

WAIT_S = 2.0
"""How long a question waits for files that have changed."""

SKIPPED = frozenset(("node_modules", "__pycache__", "site-packages", "venv", "build", "dist", "target"))
"""Names of folders of installed or built files."""

UNPRINTED = "`<>"


@dataclass(slots=True)
class Looked:
    """The findings of the last look at a folder."""

    num_files: int = 0  # that are searched, once all are read
    num_read: int = 0
    unread: list[str] = field(default_factory=list)  # names of files that are not text
    num_left_out: int = 0  # files beyond the limits
    is_whole: bool = True  # no: there are more files than `MOST_SEEN`, and some are not counted
    problem: str = ""  # why the folder cannot be read
    is_reading: bool = True

    @property
    def note(self) -> str:
        """Return what a question has to know; empty if the whole folder was searched."""
        if self.problem:
            return f"The folder of the project was not searched. {self.problem}"
        if self.is_reading:
            return (
                f"The folder of the project is still being read: {self.num_read:,} of {self.num_files:,} files so far."
            )
        return ""


class Folders:
    """The folders of all projects, and what is known of them. `store`: keeps their passages."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._looked: dict[str, Looked] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def look(self, folder: ProjectFolder, wait_s: float = WAIT_S) -> Looked:
        """Look through a folder, and return what is known after at most `wait_s`."""
        key = folder.chat_id
        if key not in self._tasks:
            looked = self._looked[key] = Looked()
            self._tasks[key] = asyncio.create_task(self._read(folder, looked), name=f"folder {folder.project_id}")
            self._tasks[key].add_done_callback(lambda _: self._tasks.pop(key, None))
        await asyncio.wait({self._tasks[key]}, timeout=wait_s)
        return self._looked[key]

    async def stop(self, folder: ProjectFolder) -> None:
        """End the reading of a folder that is not watched any more."""
        if (task := self._tasks.get(folder.chat_id)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._looked.pop(folder.chat_id, None)

    async def close(self) -> None:
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, folder: ProjectFolder, looked: Looked) -> None:
        try:
            await self._read_changed(folder, looked)
        except OSError as error:
            looked.problem = f"{folder.path}: {error.strerror}."
        except LocalLLMError as error:
            log.warning("folder not read project=%s error=%s", folder.project_id, error)
            looked.problem = str(error)
        finally:
            looked.is_reading = False

    async def _read_changed(self, folder: ProjectFolder, looked: Looked) -> None:
        found, looked.num_left_out, looked.is_whole = await asyncio.to_thread(files_below, Path(folder.path))
        known = await self._store.call(Chats.file_stamps, folder.chat_id)
        looked.num_files = len(found)
        if gone := known.keys() - found.keys():
            await self._store.call(Chats.remove_files, folder.chat_id, gone)
        for name, changed_s in found.items():
            stamp, num_passages = known.get(name, (None, 0))
            if stamp != changed_s:
                num_passages = await self._read_file(folder, name, changed_s)
            looked.num_read += 1
            if not num_passages:
                looked.unread.append(name)

    async def _read_file(self, folder: ProjectFolder, name: str, changed_s: float) -> int:
        """Keep the passages of a file, and return their number. A file that is not text is kept without any, so that it
        is not read again before it changes.
        """
        passages = []
        file = FileText(name, "")
        with suppress(RequestError, OSError):  # not text, or gone meanwhile
            body = await asyncio.to_thread(_body, Path(folder.path) / name)
            file = await read_file(name, body)
            text, paged = file.text, file.paged
            passages = await off_loop(len(text), lambda: cut(text, paged=paged))
        kept = [each for each in passages if each.text.strip()]
        await self._store.call(Chats.replace_file, folder.chat_id, name, file.paged, kept, changed_s)
        return len(kept)


def checked_folder(text: str) -> str:
    """Return the absolute path of a folder that can be read. Raises `InvalidParameter`."""
    path = Path(text.strip()).expanduser()
    if not text.strip() or not path.is_absolute():
        hint = "Type a whole path, such as ~/notes."
        raise InvalidParameter(
            "The folder's path is not complete.", f"Got {text.strip()[:80]!r}.", hint, param="folder"
        )
    try:
        path = path.resolve()
        with os.scandir(path):
            pass
    except OSError as error:
        why = f"{path}: {error.strerror}."
        raise InvalidParameter("This folder cannot be read.", why, "Check the path.", param="folder") from error
    if path == path.parent:
        raise InvalidParameter("The whole disk is not a project's folder.", hint="Choose a folder.", param="folder")
    return str(path)


def files_below(root: Path) -> tuple[Mapping[str, float], int, bool]:
    """Return the time of change of each file that may be searched by its path below `root`, in the order of their
    names; how many are left out because they are too many or too large; and whether the walk came to its end. Raises
    `OSError` for an unreadable root.
    """
    with os.scandir(root):
        pass
    found, num_left_out, num_bytes, num_seen = dict[str, float](), 0, 0, 0
    for folder, names, files in os.walk(root):
        num_seen += len(names) + len(files)
        if num_seen > MOST_SEEN:
            return found, num_left_out, False
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in SKIPPED)
        for name in sorted(files):
            if name.startswith("."):
                continue
            try:
                info = os.lstat(os.path.join(folder, name))
            except OSError:  # deleted meanwhile
                continue
            if not stat.S_ISREG(info.st_mode) or not info.st_size:
                continue
            most = MAX_PDF_BYTES if name.lower().endswith(".pdf") else MAX_FILE_BYTES
            if info.st_size > most or len(found) == MAX_FILES or num_bytes + info.st_size > MAX_BYTES:
                num_left_out += 1
                continue
            num_bytes += info.st_size
            path = os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
            if path.isprintable() and not set(UNPRINTED) & set(path):
                found[path] = info.st_mtime
            else:
                num_left_out += 1
    return found, num_left_out, True


def _body(path: Path) -> bytes:
    """Return the bytes of a file. Raises `UnreadableFile` if its beginning shows that it is not text."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
        head = file.read(8192)
        if b"\0" in head and not head.startswith(b"%PDF-"):
            raise UnreadableFile(f"{path.name} is not text.")
        return head + file.read(MAX_PDF_BYTES)
