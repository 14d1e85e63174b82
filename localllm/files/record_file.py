"""A file of large records that several threads read in parts, without the system's page cache where the disk allows it.

    header     one block: magic, format, place and length of the index, CRC-32 of the index
    records    each from a multiple of BLOCK on, padded to one
    index      JSON at the end: digest, the caller's facts, bytes of each record; then a CRC-32 of each part

A file gets its name only when it is whole. Its digest says what it was made from: a file of another digest is not used.
Each part's sum is compared when it is read for the first time after opening. Reading by page faults was 20 times
slower than reading whole records (docs/lab.md).
An open file holds a shared lock, and a file that is being written an exclusive one, so that other processes see which
files may be deleted.
Does not know: what a record means.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import weakref
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from localllm.errors import CorruptModel, DiskFull, NotWritable, UnsupportedOption
from localllm.files.folders import translated_write
from localllm.units import format_bytes

BLOCK = 4096  # offsets, lengths and addresses of direct reads are multiples of it
PART = 1 << 20  # bytes that a thread reads at a time
READERS = 8  # parts in flight; a solid-state disk reaches its speed with four or more
LEAST_FREE = 0.02  # share of the file system that stays free
MAGIC, FORMAT = b"LLRECORD", 1
_HEADER = struct.Struct("<8sIIQQI")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}")  # names until a file is whole


def padded(num_bytes: int) -> int:
    """Return the bytes that a record takes in the file."""
    return -(-num_bytes // BLOCK) * BLOCK


def write_records(path: Path, digest: str, facts: Any, sizes: Sequence[int], records: Iterable[Sequence[Any]]) -> None:
    """Write a file, under another name until it is whole. records: of each the buffers that make it, in order; sizes:
    the bytes of each. facts: JSON, read from only once the last record is written.

    Raises `DiskFull` before anything is written, `NotWritable`, and what `records` raises.
    """
    needed = sum(map(padded, sizes))
    with translated_write("The file of experts", path, param="weights_on"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_space(path.parent, needed)
        new = path.with_name(f".{os.urandom(8).hex()}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=BLOCK) as file:
                _lock(file.fileno(), exclusive=True)
                file.write(bytes(BLOCK))
                sums = array("I")
                for size, buffers in zip(sizes, records, strict=True):
                    record = b"".join(buffers)
                    assert len(record) == size, (len(record), size)
                    record += bytes(padded(size) - size)
                    sums.extend(zlib.crc32(record[at : at + PART]) for at in range(0, len(record), PART))
                    file.write(record)
                    if hasattr(os, "posix_fadvise"):  # else the page cache would push out the memory of programs
                        os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
                index = json.dumps({"digest": digest, "sizes": list(sizes), "facts": facts}).encode()
                tail = struct.pack("<Q", len(index)) + index + sums.tobytes()
                at = file.tell()
                file.write(tail)
                file.seek(0)
                file.write(_HEADER.pack(MAGIC, FORMAT, 0, at, len(tail), zlib.crc32(tail)))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


class RecordFile:
    """An open file of records. `start` may be called from any thread."""

    def __init__(self, path: Path, digest: str) -> None:
        """Raises `CorruptModel` for a damaged file or one of another digest, and `OSError` if there is none."""
        self.path = path
        if not hasattr(os, "preadv"):
            what = "Reading weights from disk is not supported on this system."
            raise UnsupportedOption(what, "It has no preadv.", "--weights-on ram", param="weights_on")
        index, self._sums = self._read_index(digest)
        self.facts: Any = index["facts"]
        self.sizes: list[int] = index["sizes"]
        self._offsets, self._first_parts = [BLOCK], [0]
        for size in self.sizes:
            self._offsets.append(self._offsets[-1] + padded(size))
            self._first_parts.append(self._first_parts[-1] + -(-padded(size) // PART))
        self._checked = bytearray(len(self._sums))
        self.is_direct, descriptor = _opened(path)
        _lock(descriptor, exclusive=False)
        with suppress(OSError):
            os.utime(path)  # its last use
        self._descriptor = descriptor
        self._readers = ThreadPoolExecutor(READERS, "localllm-disk")
        self._finalizer = weakref.finalize(self, _close, self._readers, descriptor)

    def start(self, record: int, into: memoryview) -> list[Future[None]]:
        """Begin to read a record into `into`, whose address and length are multiples of BLOCK, in parts. Each result
        raises `CorruptModel` if the part could not be read, is short, or is not what was written."""
        size = padded(self.sizes[record])
        offset, first = self._offsets[record], self._first_parts[record]
        return [
            self._readers.submit(self._read_part, first + at // PART, offset + at, into[at : min(at + PART, size)])
            for at in range(0, size, PART)
        ]

    def close(self) -> None:
        """End the readers, after the parts that are being read. Idempotent."""
        self._finalizer()

    def _read_part(self, part: int, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise self._corrupt(f"Byte {offset + done:,} cannot be read: {error.strerror}.") from error
            if not got:
                raise self._corrupt(f"The file ends at byte {offset + done:,} of {offset + len(into):,}.")
            done += got
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
        if not self._checked[part]:
            if zlib.crc32(into) != self._sums[part]:
                raise self._corrupt(f"{len(into):,} bytes from byte {offset:,} on are not what was written.")
            self._checked[part] = 1

    def _read_index(self, digest: str) -> tuple[dict[str, Any], array[int]]:
        with self.path.open("rb") as file:
            header, length = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
            if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
                raise self._corrupt("It does not begin as such a file.")
            _, format, _, at, tail_bytes, checksum = _HEADER.unpack(header)
            if format != FORMAT:
                raise self._corrupt(f"Its format is {format}, and {FORMAT} is read.")
            if length != at + tail_bytes:
                raise self._corrupt(f"It has {length:,} of {at + tail_bytes:,} bytes.")
            file.seek(at)
            tail = file.read(tail_bytes)
        if zlib.crc32(tail) != checksum:
            raise self._corrupt("Its index is damaged.")
        (index_bytes,) = struct.unpack_from("<Q", tail)
        index, sums = json.loads(tail[8 : 8 + index_bytes]), array("I", tail[8 + index_bytes :])
        if index["digest"] != digest:
            raise self._corrupt(f"It was made from other weights or settings: {index['digest']}, not {digest}.")
        return index, sums

    def _corrupt(self, why: str) -> CorruptModel:
        what = f"{self.path.name} is not a usable file of experts."
        return CorruptModel(what, why, f"rm {self.path}; the next start writes it again.", param="weights_on")


# ---- the files of a folder -------------------------------------------------------------------------------------------


class KeptRecords(NamedTuple):
    """A file of records on disk."""

    path: Path
    num_bytes: int
    used_s: float  # seconds since 1970
    is_used: bool  # by a process that runs
    is_whole: bool  # False: its writer ended before it was done


def kept_records(folder: Path) -> list[KeptRecords]:
    """Return the files of records in a folder, also unfinished ones, the last used first. Links and files that
    `write_records` did not write are left out."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError), _opened_own(path) as own:
            if own is not None:
                descriptor, is_whole = own
                status = os.fstat(descriptor)
                is_used = not _lock(descriptor, exclusive=True)
                found.append(KeptRecords(path, status.st_size, status.st_mtime, is_used, is_whole))
    return sorted(found, key=lambda each: -each.used_s)


def delete_unused(folder: Path, names: Collection[str] = ()) -> list[KeptRecords]:
    """Delete the files of a folder that no process uses, and return them. names: only of these files. Raises
    `NotWritable`."""
    deleted = []
    for each in kept_records(folder):
        if names and each.path.name not in names:
            continue
        with _opened_own(each.path) as own:
            if own is not None and _lock(own[0], exclusive=True):
                try:
                    each.path.unlink(missing_ok=True)
                except OSError as error:
                    what, why = f"{each.path} could not be deleted.", f"{error.strerror or error}."
                    raise NotWritable(what, why, f"ls -ld {folder}") from error
                deleted.append(each)
    return deleted


@contextmanager
def _opened_own(path: Path) -> Iterator[tuple[int, bool] | None]:
    """Open a file that `write_records` wrote: its descriptor, and whether it is whole. None: another file."""
    if path.is_symlink() or not path.is_file():
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        begin = os.read(descriptor, BLOCK)
        is_whole = begin.startswith(MAGIC) and not path.name.startswith(".")
        is_unfinished = _UNFINISHED.fullmatch(path.name) is not None and (begin.startswith(MAGIC) or not any(begin))
        yield (descriptor, is_whole) if is_whole or is_unfinished else None
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file until it is closed. Return False if another process or another opening keeps it from that."""
    try:
        import fcntl
    except ImportError:  # Windows does not delete a file that is open
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # a file system without locks
    return True


def _opened(path: Path) -> tuple[bool, int]:
    """Open a file for direct reads, or through the page cache where the file system supports no other. Return whether
    reads are direct, and the descriptor."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return bool(direct), os.open(path, os.O_RDONLY | direct)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        return False, os.open(path, os.O_RDONLY)


def _close(readers: ThreadPoolExecutor, descriptor: int) -> None:
    readers.shutdown(wait=True, cancel_futures=True)
    os.close(descriptor)


def _require_space(folder: Path, needed: int) -> None:
    usage = shutil.disk_usage(folder)
    free = usage.free - int(usage.total * LEAST_FREE)
    if needed > free:
        raise DiskFull(
            f"The experts do not fit on the disk of {folder}.",
            f"{format_bytes(needed)} are needed; {format_bytes(max(0, free))} are free besides a reserve.",
            f"df -h {folder}; XDG_CACHE_HOME names another folder",
            param="weights_on",
        )
