"""The folders of this program's own files, by the XDG Base Directory Specification and, on macOS and Windows, by the
conventions of the platform; and how such files are written.

Does not know: which files, or whether they exist.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DiskFull, NotWritable

if TYPE_CHECKING:
    from platformdirs.api import PlatformDirsABC

NAME = "localllm"


def config_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return $XDG_CONFIG_HOME, the folder on Linux in which each program has its configuration."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def config_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return $XDG_CONFIG_HOME/localllm, or the platform's folder."""
    return _folder("XDG_CONFIG_HOME", "~/.config", "user_config_path", os.environ if environ is None else environ)


def data_folder() -> Path:
    """Return $XDG_DATA_HOME/localllm, or the platform's folder."""
    return _folder("XDG_DATA_HOME", "~/.local/share", "user_data_path", os.environ)


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/localllm, or the platform's folder: files that may be deleted at any time."""
    return _folder("XDG_CACHE_HOME", "~/.cache", "user_cache_path", os.environ)


def experts_folder() -> Path:
    """Return the folder of the experts that models read from disk."""
    return cache_folder() / "experts"


def _folder(variable: str, default: str, kind: str, environ: Mapping[str, str]) -> Path:
    """Return one of our folders: inside the folder that `variable` names, else where the platform has it.

    default: on Linux. Older versions had it on macOS and Windows too: there our folder stays in use if it exists.
    kind: the property of platformdirs on other systems.
    """
    folder = Path(environ.get(variable) or default).expanduser() / NAME
    if not environ.get(variable) and sys.platform in ("darwin", "win32") and not folder.exists():
        found: Path = getattr(_platform_folders(), kind)
        return found
    return folder


def _platform_folders() -> PlatformDirsABC:
    """Return the folders of macOS (~/Library/...) or Windows (%LOCALAPPDATA%)."""
    if sys.platform == "darwin":
        from platformdirs.macos import MacOS

        return MacOS(NAME)
    from platformdirs.windows import Windows

    return Windows(NAME, appauthor=False)


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


@contextmanager
def translated_write(what: str, path: Path, *, param: str | None = None) -> Iterator[None]:
    """Raise `DiskFull` or `NotWritable` for an `OSError` of the block, with the path and the way to another folder.

    what: what is written, with a capital: "The key laptop".
    """
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else NotWritable
        at = Path(error.filename) if isinstance(error.filename, str) else path
        why = f"{error.strerror or error}: {at if path.is_relative_to(at) else path}."
        folder = next((each for each in path.parents if each.exists()), path.parent)
        hint = f"df -h {folder}" if kind is DiskFull else f"ls -ld {folder}"
        variables = {
            "XDG_DATA_HOME": data_folder(),
            "XDG_CONFIG_HOME": config_folder(),
            "XDG_CACHE_HOME": cache_folder(),
        }
        if variable := next((name for name, folder in variables.items() if path.is_relative_to(folder)), ""):
            hint += f"; {variable} names another folder"
        raise kind(f"{what} could not be saved.", why, hint, param=param) from error


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner may read. An existing file keeps its mode."""
    return os.open(path, flags, 0o600)
