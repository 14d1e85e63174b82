"""The folders of this program's own files, by the XDG Base Directory Specification and its defaults, and how such
files are written.

Does not know: which files, or whether they exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def config_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return $XDG_CONFIG_HOME, the configuration folder of all programs."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def data_folder() -> Path:
    """Return $XDG_DATA_HOME/localllm."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "localllm"


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/localllm: files that may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "localllm"


def make_private(folder: Path) -> None:
    """Create a folder that only its owner may open, and the data folder above it likewise. An existing folder keeps
    its mode: `localllm doctor` reports a folder that others may read."""
    if folder.is_relative_to(data_folder()):
        data_folder().parent.mkdir(parents=True, exist_ok=True)
        data_folder().mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically: readers find the old text or the new text, even after a crash. The folder must exist.

    mode: permissions of the new file, less the umask. Raises `OSError`; the old file is then unchanged.
    """
    new = path.with_name(f".{os.urandom(8).hex()}")  # a name of its own: two processes may write at once
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner may read. An existing file keeps its mode."""
    return os.open(path, flags, 0o600)
