"""Stores of blocks outside of the KV cache, in RAM and on disk. Both have one interface, `BlockStore`.

A block is kept under (KV group, name of the block). Names carry everything that KV depends on (block_names.py), so a
block that is found is the right one; what is on disk is checked by its hash before it is used.
`Transfers` reads and writes on two threads of its own: no step and no event loop ever waits for a disk.
Does not know: requests, blocks of the cache, torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from localllm.engine.memory.block_names import DIGEST_BYTES
from localllm.engine.step import Bytes, HostBlocks
from localllm.files.folders import cache_folder

log = logging.getLogger(__name__)

Key = tuple[int, bytes]
"""KV group and name of a block."""
Entry = tuple[Key, bool]
"""A key, and whether its block is private: it must not outlive the process."""

MAGIC, FORMAT = b"LLKV", 1
HEADER = struct.Struct("<4sI16s16sIQ16s")
"""Magic, format, fingerprint, name, group, bytes of the payload, blake2b of all before it and of the payload."""
LEAST_FREE = 0.05  # share of the file system that stays free
RETRY_S = 60.0  # after a write failed
TOUCH_S = 60.0  # seconds between two changes of the time of a file that is read
LEFT_S = 3600.0  # until an unfinished file of another server is deleted
LOOK_S = 5.0  # seconds between two looks of a server at whether its blocks were deleted
ABOUT = "about.json"
"""The file of a fingerprint's folder that names the model. Deleting blocks deletes it, too."""


class BlockStore(Protocol):
    """Blocks by key, bounded: the least recently used ones make room. Methods may be called from any thread."""

    name: str  # ram, disk
    capacity_bytes: int

    @property
    def used_bytes(self) -> int: ...

    @property
    def is_private(self) -> bool:
        """Return whether blocks of private requests may be kept here: what is kept does not outlive the process."""

    @property
    def accepts(self) -> bool:
        """Return whether blocks can be written at present."""

    def __contains__(self, key: Key) -> bool: ...

    def put(self, key: Key, block: Bytes) -> None:
        """Keep a copy of a block. Never raises: a block that cannot be kept is lost."""

    def get(self, key: Key) -> Bytes | None:
        """Return a block; None if it is gone, or is not what was written. Never raises."""

    def clear(self) -> None:
        """Forget all blocks."""


class RamStore:
    """Blocks in RAM. Those that swapped requests hold are not evicted."""

    name, is_private, accepts = "ram", True, True

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self._blocks: OrderedDict[Key, Bytes] = OrderedDict()
        self._held: set[Key] = set()
        self._lock = threading.Lock()

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def put(self, key: Key, block: Bytes) -> None:
        if block.nbytes > self.capacity_bytes:
            return
        with self._lock:
            if key in self._blocks or (len(key[1]) > DIGEST_BYTES and key not in self._held):
                return  # there already, or the tail of a request that does not wait for it any more
            for _ in range(len(self._blocks)):
                if self.used_bytes + block.nbytes <= self.capacity_bytes:
                    break
                oldest = next(iter(self._blocks))
                if oldest in self._held:
                    self._blocks.move_to_end(oldest)
                else:
                    self.used_bytes -= self._blocks.pop(oldest).nbytes
            if self.used_bytes + block.nbytes <= self.capacity_bytes:
                self._blocks[key] = block.copy()
                self.used_bytes += block.nbytes

    def hold(self, keys: Iterable[Key]) -> None:
        """Do not evict these blocks, which are here or are still to come."""
        with self._lock:
            self._held.update(keys)

    def let_go(self, keys: Iterable[Key], forget: Iterable[Key]) -> None:
        """Let blocks be evicted again, and drop the blocks of `forget` at once."""
        with self._lock:
            self._held.difference_update(keys)
            for key in forget:
                if (block := self._blocks.pop(key, None)) is not None:
                    self.used_bytes -= block.nbytes

    def get(self, key: Key) -> Bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self.used_bytes = 0


class DiskStore:
    """Blocks in files, one each, that survive restarts. Folder and files are readable by their owner alone.

        FOLDER/<fingerprint>/ab/<name>-<group>.kv

    A file is written under another name and renamed, without fsync: a torn one fails its hash and is deleted. All
    fingerprints share `capacity_bytes`. The first server of a fingerprint writes; others that run beside it only read.
    """

    name, is_private = "disk", False

    def __init__(self, folder: Path, fingerprint: bytes, capacity_bytes: int, model: str = "", files: str = "") -> None:
        """Open a store. model, files: name and path, for `kept_models`. Raises OSError if the folder cannot be made."""
        self.capacity_bytes, self._about = capacity_bytes, {"model": model, "path": files}
        self._fingerprint, self._own = fingerprint, folder / fingerprint.hex()
        make_private(self._own)
        self._files: OrderedDict[Path, int] = OrderedDict()  # of all fingerprints, least recently used first
        self._keys: dict[Key, Path] = {}  # of this one
        self._touched: dict[Path, float] = {}
        self._lock, self._numbers = threading.Lock(), count()
        self._paused_until, self._told = 0.0, False
        self._lock_file = lock_folder(self._own)
        self.used_bytes = 0
        for path, size, used_s in sorted(block_files(folder), key=lambda each: each[2]):
            if path.suffix != ".kv":  # a write that was cut off
                if path.parent.parent != self._own or self._lock_file is not None:
                    self._delete(path, if_older_s=LEFT_S if path.parent.parent != self._own else 0)
                continue
            self._files[path], self._touched[path] = size, used_s
            self.used_bytes += size
            if path.parent.parent == self._own and (key := _key_of(path)) is not None:
                self._keys[key] = path
        if self._lock_file is not None:
            self._write_about()
            with self._lock:
                self._make_room(0)

    @property
    def accepts(self) -> bool:
        return self._lock_file is not None and time.monotonic() >= self._paused_until

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def put(self, key: Key, block: Bytes) -> None:
        if not self.accepts:
            return
        self.forget_deleted()
        if key in self._keys:
            return
        group, name = key
        size = HEADER.size + block.nbytes
        path = self._own / name.hex()[:2] / f"{name.hex()}-{group}.kv"
        try:
            with self._lock:
                self._make_room(size)
            usage = shutil.disk_usage(self._own)
            if size > self.capacity_bytes or usage.free - size < LEAST_FREE * usage.total:
                raise OSError(f"{usage.free} bytes are free")
            make_private(path.parent)
            head = HEADER.pack(MAGIC, FORMAT, self._fingerprint, name, group, block.nbytes, bytes(16))
            temporary = f".tmp-{os.getpid()}-{next(self._numbers)}"
            write_private(path, head[:-16] + _digest(head, block), block, temporary=temporary)
        except OSError as error:
            self._paused_until = time.monotonic() + RETRY_S
            if not self._told:
                log.warning("KV blocks are not written to disk folder=%s why=%s", self._own, error)
            self._told = True
            return
        with self._lock:
            self._files[path], self._keys[key] = size, path
            self.used_bytes += size

    def get(self, key: Key) -> Bytes | None:
        path = self._keys.get(key)
        if path is None:
            return None
        try:
            content = np.fromfile(path, np.uint8)
        except OSError:
            content = np.empty(0, np.uint8)
        block = content[HEADER.size :]
        head = content[: HEADER.size].tobytes()
        wanted = HEADER.pack(MAGIC, FORMAT, self._fingerprint, key[1], key[0], block.nbytes, bytes(16))
        if head != wanted[:-16] + _digest(wanted, block):
            self._forget(path, key)
            return None
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
        if time.time() - self._touched.get(path, 0.0) > TOUCH_S:
            self._touched[path] = time.time()
            with contextlib.suppress(OSError):
                os.utime(path)
        return block

    def clear(self) -> None:
        """Forget all blocks of this fingerprint, and delete their files."""
        keys, self._keys = self._keys, {}
        for key, path in keys.items():
            self._forget(path, key)

    def forget_deleted(self) -> bool:
        """Forget the blocks of this fingerprint if a user has deleted them, and return whether there were any."""
        if (self._own / ABOUT).exists():
            return False
        with self._lock:
            for path in self._keys.values():
                self.used_bytes -= self._files.pop(path, 0)
                self._touched.pop(path, None)
            had_blocks, self._keys = bool(self._keys), {}
        if self._lock_file is not None:
            with contextlib.suppress(OSError):  # a disk that cannot be written: `put` will tell
                self._write_about()
        return had_blocks

    def _write_about(self) -> None:
        write_private(self._own / ABOUT, json.dumps(self._about).encode())

    def close(self) -> None:
        """Let another server write. Idempotent."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _make_room(self, size: int) -> None:
        while self._files and self.used_bytes + size > self.capacity_bytes:
            path, freed = self._files.popitem(last=False)
            self.used_bytes -= freed
            self._touched.pop(path, None)
            if path.parent.parent == self._own and (key := _key_of(path)) is not None:
                self._keys.pop(key, None)
            self._delete(path)

    def _forget(self, path: Path, key: Key) -> None:
        with self._lock:
            self._keys.pop(key, None)
            self.used_bytes -= self._files.pop(path, 0)
            self._touched.pop(path, None)
        self._delete(path)

    def _delete(self, path: Path, if_older_s: float = 0.0) -> None:
        with contextlib.suppress(OSError):
            if not if_older_s or time.time() - path.stat().st_mtime > if_older_s:
                path.unlink()


def _digest(head: bytes, block: Bytes) -> bytes:
    digest = blake2b(head[:-16], digest_size=16)
    digest.update(memoryview(block))  # type: ignore[arg-type]
    return digest.digest()


def _key_of(path: Path) -> Key | None:
    name, _, group = path.stem.partition("-")
    try:
        return int(group), bytes.fromhex(name)
    except ValueError:
        return None


def kv_folder(asked: str | None = None) -> Path:
    """Return the folder of blocks on disk. asked: the setting `kv_offload_dir`."""
    return Path(asked).expanduser() if asked else cache_folder() / "kv"


class KeptModel(NamedTuple):
    """Blocks on disk of one model with one set of settings."""

    folder: Path
    name: str  # of the model; empty: unknown
    num_blocks: int
    num_bytes: int
    used_s: float  # last use, in seconds since 1970
    path: str  # of the model's files; empty: unknown


def kept_models(folder: Path) -> list[KeptModel]:
    """Return what is kept in a folder, the last used first."""
    files: dict[Path, list[tuple[int, float]]] = {each.parent: [] for each in folder.glob(f"*/{ABOUT}")}
    for path, size, used_s in block_files(folder):
        files.setdefault(path.parent.parent, []).append((size, used_s))
    models = []
    for own, found in files.items():
        try:
            about = json.loads((own / ABOUT).read_text())
            name, source = str(about["model"]), str(about.get("path", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            name = source = ""
        used_s = max([used for _, used in found], default=0.0)
        models.append(KeptModel(own, name, len(found), sum(size for size, _ in found), used_s, source))
    return sorted(models, key=lambda each: -each.used_s)


def delete_kept(model: KeptModel) -> None:
    """Delete what is kept of a model. A server that runs forgets its blocks on disk, and writes new ones. Raises
    OSError."""
    for child in model.folder.iterdir():
        if child.name != "lock":  # which a running server holds
            shutil.rmtree(child) if child.is_dir() else child.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if (descriptor := lock_folder(model.folder)) is not None:
            shutil.rmtree(model.folder)
            os.close(descriptor)


def delete_of_removed(folder: Path, models: Path) -> tuple[int, int]:
    """Delete the blocks of models whose files were below `models` and are gone. Return their number and bytes. Raises
    OSError."""
    lost = [one for one in kept_models(folder) if Path(one.path).is_relative_to(models) and not Path(one.path).exists()]
    for each in lost:
        delete_kept(each)
    return sum(each.num_blocks for each in lost), sum(each.num_bytes for each in lost)


def block_files(folder: Path) -> Iterable[tuple[Path, int, float]]:
    """Yield the files of blocks below a folder, unfinished ones included, each with its bytes and its time of use in
    seconds since 1970."""
    for path in folder.glob("*/??/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield path, status.st_size, status.st_mtime


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, *parts: bytes | Bytes, temporary: str = ".tmp") -> None:
    """Write a file for its owner alone, whole or not at all. Raises OSError."""
    made = path.with_name(path.name + temporary)
    try:
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part).cast("B")  # type: ignore[arg-type]
                while rest:
                    rest = rest[file.write(rest) :]
        made.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def lock_folder(folder: Path) -> int | None:
    """Return the descriptor of a lock that this process holds on a folder until it is closed; None: another has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # without locks, as on Windows: the last writer of a file counts, and each is whole
        return descriptor
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


# ---- threads ---------------------------------------------------------------------------------------------------------


class BlockArrived(NamedTuple):
    """A block that was read, or could not be: `block` is None."""

    load: Any  # as given to `Transfers.read`
    number: int  # likewise
    block: Bytes | None
    store: str = ""  # where it was
    seconds: float = 0.0


class BlocksWritten(NamedTuple):
    """Blocks that were written, or lost."""

    keys: Sequence[Entry | None]
    num_bytes: int
    seconds: float
    first_s: float = 0.0  # of the seconds, until the fastest store had them


class Transfers:
    """Reads and writes blocks of the stores, the fastest first, on one thread each.

    `news` is filled by the threads, `on_news` called after. Reads that nobody waits for any more are left out.
    """

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self.stores = tuple(stores)
        self.news: deque[BlockArrived | BlocksWritten] = deque()
        self.on_news: Callable[[], None] = lambda: None
        self._reads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __contains__(self, key: Key) -> bool:
        return any(key in store for store in self.stores)

    def accepts(self, *, is_private: bool) -> bool:
        """Return whether a block would be kept somewhere."""
        return any(store.accepts and (store.is_private or not is_private) for store in self.stores)

    def read(self, load: Any, index: int, key: Key, is_wanted: Callable[[], bool]) -> None:
        """Read a block; `BlockArrived` tells. is_wanted: asked when its turn comes."""
        self.start()
        self._reads.put(lambda: self.do_read(load, index, key) if is_wanted() else None)

    def write(self, keys: Sequence[Entry | None], blocks: HostBlocks, num_bytes: int) -> None:
        """Write blocks; `BlocksWritten` tells. keys: of each block; None: it is not written."""
        self.start()
        self._writes.put(lambda: self.do_write(keys, blocks, num_bytes))

    def clear(self) -> None:
        """Forget all blocks of this model, also those on their way."""
        self.start()
        self._clear()
        self._writes.put(self._clear)

    def _clear(self) -> None:
        for store in self.stores:
            store.clear()

    def close(self, wait_s: float = 5.0) -> None:
        """End the threads after what is queued, or leave them to their disk after a while."""
        for queue in (self._reads, self._writes):
            queue.put(None)
        for thread in self._threads:
            thread.join(wait_s)
        for store in self.stores:
            if isinstance(store, DiskStore):
                store.close()

    def do_read(self, load: Any, index: int, key: Key) -> None:
        started, block, found = time.perf_counter(), None, ""
        for store in self.stores:
            if (block := store.get(key)) is not None:
                found = store.name
                break
        self._tell(BlockArrived(load, index, block, found, time.perf_counter() - started))

    def do_write(self, keys: Sequence[Entry | None], blocks: HostBlocks, num_bytes: int) -> None:
        started, first_s = time.perf_counter(), 0.0
        try:
            rows = blocks.result()
            for store in self.stores:
                for entry, row in zip(keys, rows, strict=True):
                    if entry is not None and (store.is_private or not entry[1]):
                        store.put(entry[0], row)
                first_s = first_s or time.perf_counter() - started
        finally:
            self._tell(BlocksWritten(keys, num_bytes, time.perf_counter() - started, first_s))

    def forget_deleted(self) -> None:
        """Forget the blocks that a user has deleted, and let the engine count again."""
        if any(store.forget_deleted() for store in self.stores if isinstance(store, DiskStore)):
            self._tell(BlocksWritten((), 0, 0.0))

    def _tell(self, news: BlockArrived | BlocksWritten) -> None:
        self.news.append(news)
        self.on_news()

    def start(self) -> None:
        """Start the threads. Idempotent."""
        if not self._threads:
            look_s = LOOK_S if any(isinstance(store, DiskStore) for store in self.stores) else None
            for name, queue, wait_s in (("read", self._reads, None), ("write", self._writes, look_s)):
                target = partial(_work, queue, wait_s, self.forget_deleted)
                thread = threading.Thread(target=target, name=f"localllm-kv-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)


def _work(queue: SimpleQueue[Callable[[], None] | None], wait_s: float | None, when_idle: Callable[[], None]) -> None:
    """Do the jobs of a queue until there is None. wait_s: without a job before `when_idle` is called; None: never."""
    job: Callable[[], None] | None
    while True:
        try:
            job = queue.get(timeout=wait_s)
        except Empty:
            job = when_idle
        if job is None:
            return
        try:
            job()
        except Exception:
            log.exception("KV blocks were not moved")
