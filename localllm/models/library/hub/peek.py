"""Read the headers of a remote checkpoint, a few hundred KiB: enough to tell whether the model fits.

`peek` makes a folder (or a .gguf file) with the real config and headers. Its weight files have their real length, with
holes instead of the weights. Code that reads headers (`read_spec`, `open_checkpoint`, the fit) can therefore treat it
like a local checkpoint.
Does not know: what a header says, only where it ends.
"""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from localllm.errors import CorruptModel
from localllm.files import json_file
from localllm.models.formats.gguf.file_names import gguf_models
from localllm.models.library.hub import client
from localllm.models.library.hub.plan import DownloadPlan, PlannedFile, file_url, plan_download
from localllm.models.library.names import ModelName, parse_name
from localllm.units import format_bytes

LARGEST_HEADER = 16 * 1024**2
LARGEST_LOOK = 64 * 1024**2
MOST_WEIGHT_FILES = 256
"""Limits of what a look downloads, as the repository is untrusted: bytes of one header, bytes in all, weight files.

Llama 3.1 405B has 191 files and needs 24 MiB; a GGUF header holds the vocabulary, up to about 12 MiB.
"""
_FIRST_BYTES = 128 * 1024
_AT_ONCE = 8
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a GGUF value by its type."""
_STRING, _ARRAY = 8, 9
_DEEPEST_ARRAY = 4
_SMALL_FILES = (
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "adapter_config.json", "modules.json", "*.index.json", "[1-9]_*/config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A checkpoint on the hub. `path` is valid until the `with` block of `peek` ends; its weights are holes."""

    name: str  # the name that `pull` would use
    path: Path  # a folder with config.json, or a .gguf file (the first part of a split one)
    plan: DownloadPlan  # the download of it: files, total_bytes, needed_bytes
    weights_bytes: int  # size of the weight files, headers included
    fetched_bytes: int  # bytes downloaded by this look


@contextmanager
def peek(name: str | ModelName, revision: str | None = None) -> Iterator[RemoteCheckpoint]:
    """Look at `org/name[:QUANT][@REVISION]` without weights. Raises as `plan_download`, and `CorruptModel`."""
    asked = parse_name(name) if isinstance(name, str) else name
    plan = plan_download(asked, revision)
    with tempfile.TemporaryDirectory(prefix="localllm-peek-") as parent:
        folder = Path(parent) / plan.repo_id.rpartition("/")[2]
        weights = [file for file in plan.files if file.name.endswith((".safetensors", ".gguf"))]
        small = [file for file in plan.files if any(fnmatch(file.name, pattern) for pattern in _SMALL_FILES)]
        if len(weights) > MOST_WEIGHT_FILES:
            raise CorruptModel(
                f"{plan.name} has too many weight files to inspect on the hub.",
                f"It has {len(weights):,}; at most {MOST_WEIGHT_FILES} are inspected.",
                f"localllm pull {plan.name}  downloads them",
            )
        budget = _Budget(plan.name)
        heads = [_Head(plan, file, folder / file.name, budget) for file in (*small, *weights)]
        with client.translated(plan.name), ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(_Head.fetch, heads))
        ggufs = [name for model in gguf_models(file.name for file in weights) for name in model.files]
        yield RemoteCheckpoint(
            name=plan.name,
            path=folder / ggufs[0] if ggufs else folder,
            plan=plan,
            weights_bytes=sum(file.size for file in weights if not ggufs or file.name in ggufs),
            fetched_bytes=sum(head.fetched for head in heads),
        )


class _Budget:
    """The bytes that may still be downloaded, shared by all threads."""

    def __init__(self, name: str) -> None:
        self._name, self._left, self._lock = name, LARGEST_LOOK, threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0:
                raise CorruptModel(
                    f"The headers of {self._name} are too large to inspect on the hub.",
                    f"At most {format_bytes(LARGEST_LOOK)} are downloaded to inspect a repository.",
                    f"localllm pull {self._name}  downloads it",
                )


class _Head:
    """The beginning of a remote file, downloaded as far as it is read; the rest of the local file is a hole."""

    def __init__(self, plan: DownloadPlan, file: PlannedFile, path: Path, budget: _Budget) -> None:
        self._budget, is_weights = budget, file.name.endswith((".safetensors", ".gguf"))
        self._most_bytes = LARGEST_HEADER if is_weights else json_file.MOST_BYTES
        self.url, self.file, self.path = file_url(plan.repo_id, plan.commit, file.name), file, path
        self.fetched = 0

    def fetch(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w+b") as out:
            if self.file.name.endswith(".safetensors"):
                self.ensure(out, _FIRST_BYTES)
                self.require(self._safetensors_end(out))
                self.ensure(out, self._safetensors_end(out))
            elif self.file.name.endswith(".gguf"):
                self.ensure(out, _FIRST_BYTES)
                _GGUFHeader(self, out).walk()
            else:
                self.ensure(out, self.file.size)
            out.truncate(self.file.size)

    def _safetensors_end(self, out: BinaryIO) -> int:
        (length,) = struct.unpack("<Q", self.read(out, 0, 8))
        return 8 + int(length)

    def read(self, out: BinaryIO, offset: int, count: int) -> bytes:
        """Return bytes of the file, and download those that are missing."""
        self.require(offset + count)
        self.ensure(out, offset + count)
        out.seek(offset)
        return out.read(count)

    def require(self, end: int) -> None:
        if end > self.file.size:
            raise self.damaged(f"It has {self.file.size:,} bytes, and its header ends at {end:,}.")

    def ensure(self, out: BinaryIO, end: int) -> None:
        """Download at least the first `end` bytes, in growing steps, so that a long header takes few requests."""
        if end > self._most_bytes:
            raise self.damaged(f"Its header needs {end:,} bytes; at most {self._most_bytes:,} are read.")
        if end > self.fetched:
            end = min(self.file.size, max(end, min(4 * self.fetched, self._most_bytes)))
            self._budget.take(end - self.fetched)
            found = client.retry(lambda: _range(self.url, self.fetched, end))
            out.seek(self.fetched)
            out.write(found)
            self.fetched += len(found)

    def damaged(self, why: str) -> CorruptModel:
        return CorruptModel(f"The header of {self.file.name} on the hub is damaged.", why)


def _range(url: str, start: int, end: int) -> bytes:
    """Return bytes start to end. Stop reading when they have arrived, in case the server ignores the range."""
    with client.get(url, extra={"range": f"bytes={start}-{end - 1}"}) as answer:
        skip, pieces, count = (start if answer.status == 200 else 0), [], 0
        for piece in answer.pieces:
            pieces.append(piece[skip:] if skip < len(piece) else b"")
            skip = max(0, skip - len(piece))
            count += len(pieces[-1])
            if count >= end - start:
                break
    if count < end - start:
        raise ConnectionError(f"the hub ended the answer after {count:,} of {end - start:,} bytes")
    return b"".join(pieces)[: end - start]


class _GGUFHeader:
    """A walk to the end of a GGUF header, which downloads all of it. formats/gguf/checkpoint.py parses it later."""

    def __init__(self, head: _Head, out: BinaryIO) -> None:
        self.head, self.out, self.at = head, out, 0

    def walk(self) -> None:
        if self.head.read(self.out, 0, 4) != b"GGUF":
            raise self.head.damaged("It does not begin with GGUF.")
        self.at = 8
        num_tensors, num_values = self._number("<Q", 8), self._number("<Q", 8)
        for _ in range(num_values):
            self._skip_string()
            self._skip_value(self._number("<I", 4))
        for _ in range(num_tensors):
            self._skip_string()
            self._skip(8 * self._number("<I", 4))  # dimensions
            self._skip(12)  # type, offset
        self.head.ensure(self.out, self.at)

    def _skip_value(self, kind: int, depth: int = 0) -> None:
        if depth > _DEEPEST_ARRAY:
            raise self.head.damaged(f"It has arrays nested more than {_DEEPEST_ARRAY} deep.")
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            inner, count = self._number("<I", 4), self._number("<Q", 8)
            if inner in _VALUE_BYTES:
                self._skip(count * _VALUE_BYTES[inner])
            else:
                for _ in range(count):
                    self._skip_value(inner, depth + 1)
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            raise self.head.damaged(f"It names a value type {kind}, which does not exist.")

    def _skip_string(self) -> None:
        self._skip(self._number("<Q", 8))

    def _number(self, form: str, size: int) -> int:
        (value,) = struct.unpack(form, self.head.read(self.out, self.at, size))
        self.at += size
        return int(value)

    def _skip(self, count: int) -> None:
        self.at += count
        self.head.require(self.at)
