"""Where this program keeps its own files: the XDG Base Directory Specification, and what it says to take instead.

Does not know: which files, or whether they are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def config_home(environ: Mapping[str, str] | None = None) -> Path:
    """$XDG_CONFIG_HOME, of all programs."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def data_folder() -> Path:
    """$XDG_DATA_HOME/localllm"""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "localllm"


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may open, and the data folder above it likewise. One that is there stays as
    it is: `localllm doctor` says when others may read it."""
    if folder.is_relative_to(data_folder()):
        data_folder().parent.mkdir(parents=True, exist_ok=True)
        data_folder().mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_private(path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """A file that its owner alone may read. One that is there keeps its mode."""
    return os.open(path, flags, 0o600)
