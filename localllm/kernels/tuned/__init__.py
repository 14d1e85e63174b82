"""Measured launch settings, and their look-up by kernels.

Each kernel file has a heuristic, a small pure function of values that are fixed while serving and a bucket of the
batch:

    settings = settings_for("decode_attention", (head_dim, group, bucket), _settings)

    1. measured on this machine      <user cache>/localllm/kernels/<gpu>/triton-<version>/<kernel>-<source>.json
    2. shipped for this GPU          localllm/kernels/tuned/<gpu>.json (README.md beside this file)
    3. the heuristic                 _settings(*key)

The files are read at a kernel's first use; from then on a look-up is one dict access. Measurements belong to one source
text of the kernel: if the kernel changes, they are ignored. Deterministic mode uses the heuristic, which takes it into
account: a measured choice may differ between batch buckets.
`measure.py` measures; nothing else does, and nothing is measured once the server is ready.
Does not know: what the settings mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from localllm.files.folders import cache_folder, write_whole
from localllm.kernels.choice import settings_without
from localllm.kernels.launch import HAS_TRITON, INTERPRETED, launch_options, triton

log = logging.getLogger(__name__)

Key = tuple[int | str | bool, ...]
LaunchT = TypeVar("LaunchT", bound=NamedTuple)
SHIPPED = Path(__file__).parent


@dataclass(slots=True)
class Table:
    """The settings known in this process. A missing or invalid file changes nothing."""

    folder: Path | None  # of this machine's measurements; None: neither read nor written
    gpu: str | None  # None: without a GPU there are no measurements
    triton: str
    chosen: dict[tuple[str, Key, bool], Any] = field(default_factory=dict)
    measured: dict[str, dict[Key, dict[str, Any]]] = field(default_factory=dict)  # kernel -> key -> settings
    heuristics: dict[str, Callable[..., Any]] = field(default_factory=dict)  # of every kernel used so far
    is_sealed: bool = False  # the server is ready: a measurement would delay requests
    _has_warned: bool = False

    def settings_for(self, kernel: str, key: Key, heuristic: Callable[..., LaunchT]) -> LaunchT:
        """Return the settings for `key`, which are also the heuristic's arguments."""
        found: LaunchT | None = self.chosen.get((kernel, key, launch_options().deterministic))
        if found is None:
            found = self.chosen[kernel, key, launch_options().deterministic] = self._choose(kernel, key, heuristic)
        avoids = launch_options().avoids
        return settings_without(kernel, found, avoids) if avoids else found

    def record(
        self, kernel: str, key: Key, settings: LaunchT, microseconds: float, heuristic: Callable[..., LaunchT]
    ) -> None:
        """Use `settings` for `key` from now on, in this process and, if the cache is writable, in later ones."""
        entries = self._entries(kernel, heuristic)
        entries[key] = {**settings._asdict(), "us": round(microseconds, 3)}
        self.chosen.pop((kernel, key, False), None)
        path = self._path(kernel, heuristic)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"entries": entries_as_rows(entries)}, indent=1) + "\n")
        except OSError as error:
            self._warn_once("cannot be written", path, error)

    def seal(self) -> None:
        """Forbid measurements, since the server is ready."""
        self.is_sealed = True

    def _choose(self, kernel: str, key: Key, heuristic: Callable[..., LaunchT]) -> LaunchT:
        self.heuristics[kernel] = heuristic
        default = heuristic(*key)
        if launch_options().deterministic or self.gpu is None:
            return default
        stored = self._entries(kernel, heuristic).get(key)
        return default if stored is None else _stored_or_default(default, stored)

    def _entries(self, kernel: str, heuristic: Callable[..., Any]) -> dict[Key, dict[str, Any]]:
        if kernel not in self.measured:
            own = self._path(kernel, heuristic)
            shipped = read_shipped(SHIPPED / f"{file_name_of(self.gpu or '')}.json").get(kernel, {})
            self.measured[kernel] = {**shipped, **_entries_of(self._read_own(own) if own else None)}
        return self.measured[kernel]

    def _read_own(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("entries")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, AttributeError) as error:
            self._warn_once("cannot be read", path, error)
            return None

    def _path(self, kernel: str, heuristic: Callable[..., Any]) -> Path | None:
        if self.folder is None or self.gpu is None:
            return None
        name = f"{kernel}-{source_hash(heuristic.__module__)}.json"
        return self.folder / file_name_of(self.gpu) / f"triton-{self.triton}" / name

    def _warn_once(self, what: str, path: Path, error: Exception) -> None:
        """Log a problem once. Kernels still run, with shipped settings or the heuristic."""
        if not self._has_warned:
            log.warning("measured kernel settings %s path=%s error=%s", what, path, error)
        self._has_warned = True


@cache
def table() -> Table:
    """Return this process's table, for its first GPU. GPUs of different models share it."""
    folder = cache_folder() / "kernels"
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    gpu = torch.cuda.get_device_name(torch.cuda.current_device()) if on_gpu else None
    return Table(folder, gpu, triton.__version__ if HAS_TRITON else "none")


def settings_for(kernel: str, key: Key, heuristic: Callable[..., LaunchT]) -> LaunchT:
    """Return the launch settings of `kernel`; `heuristic(*key)` if nothing better is known. See the module's header."""
    return table().settings_for(kernel, key, heuristic)


@cache
def source_hash(module: str) -> str:
    """Return twelve hex digits that identify a module's source text;
    a module without a file is identified by its name."""
    path = getattr(sys.modules.get(module), "__file__", None)
    text = Path(path).read_bytes() if path and Path(path).is_file() else module.encode()
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def entries_as_rows(entries: Mapping[Key, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return entries in the form of the files."""
    return [
        {"key": list(key), "settings": {n: v for n, v in entry.items() if n != "us"}, "us": entry["us"]}
        for key, entry in entries.items()
    ]


def ensure_triton_cache() -> Path:
    """Return the folder of Triton's compilation cache; another one, with a warning, if that is not writable.

    Call this before the first launch, which would fail otherwise.
    """
    asked = triton_cache_dir()
    if is_writable(asked):
        return asked
    own = cache_folder() / "triton"
    instead = own if is_writable(own) else Path(tempfile.mkdtemp(prefix="localllm-triton-"))
    kept = "" if instead == own else "; kernels will be compiled again at every start"
    log.warning(
        "Triton's cache folder %s cannot be written: using %s%s. TRITON_CACHE_DIR names another.", asked, instead, kept
    )
    os.environ["TRITON_CACHE_DIR"] = str(instead)
    return instead


def triton_cache_dir() -> Path:
    """Return Triton's compilation cache by Triton's own rules."""
    asked = os.environ.get("TRITON_CACHE_DIR")
    return Path(asked) if asked else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def is_writable(folder: Path) -> bool:
    """Return whether a file can be created in the folder, which is created if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _stored_or_default(default: LaunchT, stored: Mapping[str, Any]) -> LaunchT:
    """Return the stored settings in the heuristic's type; `default` if their fields differ."""
    values = {name: stored.get(name) for name in default._fields}
    same = all(type(values[name]) is type(value) for name, value in default._asdict().items())
    return default._replace(**values) if same else default


def _entries_of(stored: Any) -> dict[Key, dict[str, Any]]:
    """Parse `[{"key": [...], "settings": {...}}, ...]` into a dict by key; invalid entries are skipped."""
    entries = {}
    for entry in stored if isinstance(stored, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("key"), list) and isinstance(entry.get("settings"), dict):
            entries[tuple(entry["key"])] = {**entry["settings"], "us": entry.get("us")}
    return entries


def read_shipped(path: Path) -> dict[str, dict[Key, dict[str, Any]]]:
    """Return the settings in a file of the package's form, by kernel and key; usually there is none. Raises
    `ValueError` if it is not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    kernels = content.get("kernels") if isinstance(content, dict) else None
    return {kernel: _entries_of(rows) for kernel, rows in kernels.items()} if isinstance(kernels, dict) else {}


def file_name_of(gpu: str) -> str:
    """Convert 'NVIDIA H200' to 'NVIDIA_H200'."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", gpu).strip("_")
