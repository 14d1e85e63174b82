"""Batches on disk: one record in JSON for each, in `batches` of the data folder.

A record is replaced whole at each change of its state. The lines that are answered are in the output files; so the
record's counts are exact at the end, and recounted when a batch resumes.
Does not know: HTTP, how a batch runs.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from localllm.errors import RequestError
from localllm.files.folders import make_private, translated_write, write_whole
from localllm.web.api.batches.file_store import KEPT_S

log = logging.getLogger(__name__)

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]  # fmt: skip
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
MAX_BATCHES = 1000
"""Most batches on record; one key with the scope infer can have half of them."""


class BatchNotFound(RequestError):
    """No batch with this id is stored, or it is of another key."""

    status, code = 404, "batch_not_found"


class TooManyBatches(RequestError):
    """The limit for batches that have not ended, or are on record, is reached."""

    status, code = 429, "too_many_batches"


class BatchFault(msgspec.Struct, kw_only=True):
    """An error of the whole batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """The stored facts of a batch. Times are seconds since 1970; None: that state was not reached."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: float
    expires_s: float
    output_lifetime_s: float
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    output_id: str | None = None
    error_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    faults: list[BatchFault] = []
    reached_s: dict[str, float] = {}  # time at which each status began

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def ended_s(self) -> float:
        return max(self.reached_s.values(), default=self.created_s)


class BatchRecords:
    """All batches, by id, oldest first. Changes are written to disk at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, BatchRecord] = {}

    def load(self) -> None:
        """Read all records."""
        found = [self._read(path) for path in self.folder.glob("batch_*.json")]
        for record in sorted((each for each in found if each is not None), key=lambda each: each.created_s):
            self._records[record.id] = record

    def _read(self, path: Path) -> BatchRecord | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=BatchRecord)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("a batch's record is not readable path=%s error=%s", path, error)
            return None

    def all(self) -> Iterable[BatchRecord]:
        return tuple(self._records.values())

    def of(self, owner: str) -> list[BatchRecord]:
        """Return the owner's batches, newest first."""
        return [each for each in self._records.values() if each.owner == owner][::-1]

    def get(self, owner: str, id: str) -> BatchRecord:
        """Raises `BatchNotFound`, also for a batch of another owner."""
        found = self._records.get(id)
        if found is None or found.owner != owner:
            raise BatchNotFound(f"There is no batch {id[:80]!r}.", "", "GET /v1/batches lists them.", param="batch_id")
        return found

    def uses(self, file_id: str) -> BatchRecord | None:
        """Return a batch that has not ended and reads or writes this file."""
        named = (each for each in self._records.values() if each.is_open)
        return next((each for each in named if file_id in (each.input_file_id, each.output_id, each.error_id)), None)

    def add(self, record: BatchRecord) -> None:
        """Store a new batch. Raises `TooManyBatches`, `DiskFull`, `NotWritable`."""
        own = sum(each.owner == record.owner for each in self._records.values())
        most = MAX_BATCHES // 2 if record.owner else MAX_BATCHES
        if len(self._records) >= MAX_BATCHES or own >= most:
            raise TooManyBatches(
                f"{len(self._records)} batches are on record, {own} of them yours.",
                f"At most {MAX_BATCHES} are kept, {most} of yours; a batch is forgotten {KEPT_S / 86400:.0f} days "
                "after its end.",
                "Put more lines into one batch.",
            )
        with translated_write("The batch", self._path(record)):
            make_private(self.folder)
            self.save(record)
        self._records[record.id] = record

    def set_status(self, record: BatchRecord, status: Status) -> None:
        record.status = status
        record.reached_s = {**record.reached_s, status: time.time()}
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        write_whole(self._path(record), msgspec.json.encode(record).decode())

    def forget_old(self, now_s: float) -> None:
        for each in self.all():
            if not each.is_open and each.ended_s + KEPT_S <= now_s:
                del self._records[each.id]
                self._path(each).unlink(missing_ok=True)

    def _path(self, record: BatchRecord) -> Path:
        return self.folder / f"{record.id}.json"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"
