"""Download one file into the cache: resume it, verify its hash, then give it its final name.

Bytes go to blobs/HASH.incomplete, which survives an interruption, a cancel and a killed process; the next attempt
requests only the rest. A file gets its final name only when its size and hash match the hub's: sha256 for large files,
git's sha1 for small ones. huggingface_hub then makes the link in the snapshot, and downloads nothing: the blob exists.
It cannot download the bytes itself: version 2.4 writes to a file with a random name, so that a killed download begins
again at zero and leaves that file behind, and it compares sizes, not hashes.
Does not know: which files, in which order, who watches.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from localllm.errors import CorruptModel, DownloadCancelled
from localllm.models.library.catalog import hub_cache_dir
from localllm.models.library.hub import cache, client
from localllm.models.library.hub.plan import PlannedFile, file_url

LARGEST_ANSWER = 16 * 1024**3
"""Largest range per request: content delivery networks refuse to send a file of 50 GB and more in one response."""
_READ_BYTES = 2**20


class WrongHash(CorruptModel):
    """The received bytes do not have the hub's hash."""


@dataclass(slots=True)
class Meter:
    """Counters of one download, written by its threads and read by the watcher."""

    have: dict[str, int] = field(default_factory=dict)  # bytes on disk by file name
    received: int = 0  # bytes received in this run
    notes: dict[str, str] = field(default_factory=dict)  # by file name: the reason of a wait


def fetch_file(repo_id: str, commit: str, file: PlannedFile, meter: Meter, stop: threading.Event) -> None:
    """Download one file. Raises the hub's errors translated, `DownloadCancelled`, `WrongHash`, `DiskFull`."""
    with client.translated(repo_id):
        if file.etag and not cache.is_cached(repo_id, commit, file.name, file.etag):
            blob = cache.repository_folder(repo_id) / "blobs" / file.etag
            with _locked(repo_id, file.etag, stop):
                if not blob.exists():
                    _PartialBlob(file_url(repo_id, commit, file.name), blob, file, meter, stop).fetch()
        if not (cache.repository_folder(repo_id) / "snapshots" / commit / file.name).exists():
            client.retry(lambda: _link(repo_id, commit, file.name), stop=stop)
    meter.have[file.name] = file.size


def matches_hub_hash(path: Path, file: PlannedFile) -> bool:
    """Return whether a file on disk has the hub's size and hash."""
    if path.stat().st_size != file.size:
        return False
    digest = Digest(file)
    with path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
    return digest.matches


class Digest:
    """The hash in an etag: sha256, or git's sha1 over a header and the content. Other etags always agree."""

    def __init__(self, file: PlannedFile) -> None:
        self._etag = file.etag
        if re.fullmatch(r"[0-9a-f]{64}", file.etag):
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)

    def update(self, piece: bytes) -> None:
        self._hash.update(piece)

    @property
    def matches(self) -> bool:
        return self._hash.hexdigest() == self._etag or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", self._etag)


class _PartialBlob:
    """A blob being downloaded: its bytes so far, and their hash."""

    def __init__(self, url: str, blob: Path, file: PlannedFile, meter: Meter, stop: threading.Event) -> None:
        self.url, self.blob, self.file, self.meter, self.stop = url, blob, file, meter, stop
        self.partial = blob.with_name(blob.name + cache.PARTIAL)
        self.have, self.digest = 0, Digest(file)

    def fetch(self) -> None:
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        resumed = self._resume()
        self._receive_all()
        if not self.digest.matches and resumed:  # the bytes on disk may have been damaged
            self._restart()
            self._receive_all()
        if not self.digest.matches:
            self.partial.unlink()
            raise WrongHash(
                f"{self.file.name} arrived damaged.",
                f"All {self.file.size:,} bytes arrived, but their hash is not the hub's {self.file.etag[:12]}...",
                "Try again; if the error persists, the repository or a proxy in between is broken.",
            )
        os.replace(self.partial, self.blob)

    def _resume(self) -> bool:
        """Count and hash the bytes of an earlier attempt. Returns True if there were any."""
        if self.partial.is_file():
            with self.partial.open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    self._count(piece)
                    self._check_stop()
        if self.have > self.file.size:
            self._restart()
        return self.have > 0

    def _receive_all(self) -> None:
        failures = 0
        while self.have < self.file.size:
            before = self.have
            try:
                self._receive()
                self.meter.notes.pop(self.file.name, None)
            except Exception as error:
                failures = 1 if self.have > before else failures + 1
                if client.status_of(error) == 416 and self.have:
                    self._restart()
                elif not client.is_transient(error) or failures >= client.TRIES:
                    raise
                status = client.status_of(error)
                reason = f"status {status}" if status is not None else type(error).__name__
                self.meter.notes[self.file.name] = f"{reason}; retrying in {client.wait_s(failures, error):.0f} s"
                client.wait_before_retry(failures, error, self.stop)
                self._check_stop()
        if self.have == 0:
            self.partial.touch()  # an empty file must exist too

    def _receive(self) -> None:
        """Request the missing bytes once."""
        end = min(self.file.size, self.have + LARGEST_ANSWER)
        whole = self.have == 0 and end == self.file.size
        wanted = {} if whole else {"range": f"bytes={self.have}-{end - 1}"}
        with client.get(self.url, extra=wanted) as answer:
            if answer.status == 200 and self.have:  # the server ignores ranges and sends the whole file
                self._restart()
            with self.partial.open("ab") as out:
                for piece in answer.pieces:
                    self._check_stop()
                    self._write(out, piece)
        if self.have < end:
            raise ConnectionError(f"the hub ended the answer after {self.have:,} of {end:,} bytes")

    def _write(self, out: BinaryIO, piece: bytes) -> None:
        if self.have + len(piece) > self.file.size:
            raise WrongHash(
                f"{self.file.name} is longer than the hub says.",
                f"More than {self.file.size:,} bytes arrived.",
                "Try again; if the error persists, the repository or a proxy in between is broken.",
            )
        out.write(piece)
        out.flush()  # so that a killed process keeps its bytes
        self.meter.received += len(piece)
        self._count(piece)

    def _count(self, piece: bytes) -> None:
        self.digest.update(piece)
        self.have += len(piece)
        self.meter.have[self.file.name] = self.have

    def _restart(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.have, self.digest = 0, Digest(self.file)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise cancelled(self.file.name)


def cancelled(what: str) -> DownloadCancelled:
    return DownloadCancelled(f"The download of {what} was cancelled.", "The downloaded part is kept.")


@contextmanager
def _locked(repo_id: str, etag: str, stop: threading.Event) -> Iterator[None]:
    """Hold the library's lock on a blob, which waits for other processes that download the same file."""
    from filelock import Timeout

    path = hub_cache_dir() / ".locks" / cache.repository_folder(repo_id).name / f"{etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            held = client.utilities().WeakFileLock(path, timeout=0.5)
            held.__enter__()
            break
        except Timeout:
            if stop.is_set():
                raise cancelled(repo_id) from None
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def _link(repo_id: str, commit: str, name: str) -> None:
    client.library().hf_hub_download(
        repo_id, name, revision=commit, cache_dir=hub_cache_dir(), endpoint=client.endpoint(),
        etag_timeout=client.timeout_s(),
    )  # fmt: skip
