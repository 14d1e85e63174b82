"""Uploaded files and the outputs of batches, on disk: `batches/files` of the data folder, private to its owner.

A file is its content and a record in JSON beside it. Ids are looked up in a table, so a request never names a path. The
number of files and their total size are limited; a key with the scope `infer` can take half of both.
Does not know: HTTP, the meaning of a file's lines.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from localllm.errors import InvalidParameter, RequestError
from localllm.files.folders import make_private, open_private, translated_write, write_whole
from localllm.units import format_bytes

log = logging.getLogger(__name__)

CHUNK_BYTES = 1024**2
KEPT_S = 30 * 24 * 3600.0
"""How long files are kept that do not say, as in OpenAI's service."""


class FileNotFound(RequestError):
    """No file with this id is stored, or it is of another key."""

    status, code = 404, "file_not_found"


class FileInUse(RequestError):
    """A batch that has not ended reads or writes the file."""

    status, code = 409, "file_in_use"


class StorageFull(RequestError):
    """The limits for files of batches are reached."""

    status, code = 507, "file_storage_full"


class StoredFile(msgspec.Struct, kw_only=True):
    """The record of a file. `is_listed`: false for the output of a batch that has not ended."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_s: float
    expires_s: float
    num_bytes: int = 0
    is_listed: bool = True


class FileStore:
    """All files, by id. Its methods block: they read and write the disk."""

    def __init__(self, folder: Path, *, max_files: int, max_bytes: int) -> None:
        self.folder, self.max_files, self.max_bytes = folder, max_files, max_bytes
        self._files: dict[str, StoredFile] = {}
        self.num_bytes = 0

    def load(self) -> None:
        """Read the records of all files."""
        for path in sorted(self.folder.glob("*.json")):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            found.num_bytes = self.path(found.id).stat().st_size
        except (OSError, msgspec.DecodeError) as error:
            log.warning("a file's record is not readable path=%s error=%s", path, error)
            return
        self._files[found.id] = found
        self.num_bytes += found.num_bytes

    def __len__(self) -> int:
        return len(self._files)

    def path(self, id: str) -> Path:
        return self.folder / id

    def of(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, newest first."""
        files = [each for each in self._files.values() if each.owner == owner and each.is_listed]
        return sorted(files, key=lambda each: (each.created_s, each.id), reverse=True)

    def get(self, owner: str, id: str, param: str = "file_id") -> StoredFile:
        """Return a file. Raises `FileNotFound`, also for a file of another owner."""
        found = self._files.get(id)
        if found is None or found.owner != owner or not found.is_listed:
            why = f"Files are kept for {KEPT_S / 86400:.0f} days, unless expires_after says less."
            raise FileNotFound(f"There is no file {id[:80]!r}.", why, "GET /v1/files lists the files.", param=param)
        return found

    def put(
        self, owner: str, source: IO[bytes], filename: str, purpose: str, lifetime_s: float, max_bytes: int
    ) -> StoredFile:
        """Store the content of `source`. Raises `StorageFull`, `InvalidParameter` for a file above `max_bytes`,
        `DiskFull` and `NotWritable`."""
        made = self.new(owner, filename, purpose, lifetime_s)
        try:
            with translated_write(f"The file {filename[:80]!r}", self.path(made.id), param="file"):
                with open(open_private(self.path(made.id), os.O_WRONLY | os.O_APPEND), "ab") as file:
                    while chunk := source.read(CHUNK_BYTES):
                        if made.num_bytes + len(chunk) > max_bytes:
                            raise InvalidParameter(
                                "The file is too large.",
                                f"The limit is {format_bytes(max_bytes)}.",
                                "Split it, or start the server with a higher --max-batch-file-bytes.",
                                param="file",
                            )
                        self.grow(made, len(chunk))
                        file.write(chunk)
                made.is_listed = True
                self.save(made)
        except BaseException:
            self.forget(made)
            raise
        return made

    def new(self, owner: str, filename: str, purpose: str, lifetime_s: float) -> StoredFile:
        """Return a new, empty file that is not listed yet. Raises `StorageFull`."""
        num_own = sum(each.owner == owner for each in self._files.values())
        most = self.max_files // 2 if owner else self.max_files
        if len(self._files) >= self.max_files or num_own >= most:
            raise self._full(f"{len(self._files)} files are stored, {num_own} of them yours.", f"{most} of yours")
        id, now_s = f"file-{secrets.token_hex(16)}", time.time()
        made = StoredFile(
            id=id, owner=owner, filename=filename[:255], purpose=purpose,
            created_s=now_s, expires_s=now_s + lifetime_s, is_listed=False,
        )  # fmt: skip
        with translated_write("The file", self.path(id), param="file"):
            make_private(self.folder.parent)
            make_private(self.folder)
            os.close(open_private(self.path(id), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self._files[id] = made
        return made

    def grow(self, file: StoredFile, num_bytes: int) -> None:
        """Count bytes that are about to be appended. Raises `StorageFull`."""
        own = sum(each.num_bytes for each in self._files.values() if each.owner == file.owner)
        most = self.max_bytes // 2 if file.owner else self.max_bytes
        if self.num_bytes + num_bytes > self.max_bytes or own + num_bytes > most:
            what = f"The stored files have {format_bytes(self.num_bytes)}, yours {format_bytes(own)}."
            raise self._full(what, f"{format_bytes(most)} for yours")
        file.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def shrink_to(self, file: StoredFile, num_bytes: int) -> None:
        """Cut a file, after a line that was not written whole."""
        os.truncate(self.path(file.id), num_bytes)
        self.num_bytes += num_bytes - file.num_bytes
        file.num_bytes = num_bytes

    def save(self, file: StoredFile) -> None:
        write_whole(self.path(file.id).with_suffix(".json"), msgspec.json.encode(file).decode())

    def forget(self, file: StoredFile) -> None:
        """Delete a file and its record."""
        if self._files.pop(file.id, None) is not None:
            self.num_bytes -= file.num_bytes
        for path in (self.path(file.id).with_suffix(".json"), self.path(file.id)):
            path.unlink(missing_ok=True)

    def find(self, id: str | None) -> StoredFile | None:
        """Return a file of any owner, listed or not."""
        return self._files.get(id) if id is not None else None

    def expired(self, now_s: float) -> Sequence[StoredFile]:
        return [each for each in self._files.values() if each.expires_s <= now_s and each.is_listed]

    def chunks(self, id: str) -> Iterator[bytes]:
        with self.path(id).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def _full(self, what: str, limit: str) -> StorageFull:
        why = f"The limit is {self.max_files:,} files and {format_bytes(self.max_bytes)} together, {limit}."
        hint = "Delete files with DELETE /v1/files/ID, or raise --max-batch-files or --max-batch-storage-bytes."
        return StorageFull(what, why, hint, param="file")
