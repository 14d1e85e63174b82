"""Aliases of models, made by `localllm cp` and Ollama's /api/copy. No weights are copied.

    $XDG_DATA_HOME/localllm/aliases/NAME      a file with the name of the model; / and : in NAME are escaped

Does not know: which model a name means (catalog.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

from localllm.errors import ConfigError
from localllm.files.folders import data_folder, make_private, translated_write, write_whole
from localllm.models.library.names import PROGRAMS, looks_like_path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,79}")


def aliases() -> dict[str, str]:
    """Return the target of every alias."""
    try:
        files = sorted(_folder().iterdir())
    except OSError:
        return {}
    found = {unquote(file.name): _read(file) for file in files}
    return {name: target for name, target in found.items() if target}


def target_of(name: str) -> str | None:
    """Return the target of an alias; None if the name is not an alias."""
    return (_read(_file(name)) or None) if _NAME.fullmatch(name) else None


def set_alias(name: str, target: str) -> None:
    """Set or replace an alias. Raises `ConfigError` for a name that looks like a path or another program's model,
    and `NotWritable`."""
    if not _NAME.fullmatch(name) or looks_like_path(name) or name.partition(":")[0] in PROGRAMS:
        raise ConfigError(
            f"{name[:100]!r} is not a valid second name for a model.",
            f"A name has up to 80 letters, digits and . _ - / :, and does not begin with {':, '.join(PROGRAMS)}:.",
            f"localllm cp {target} my-model",
            param="destination",
        )
    file = _file(name)
    with translated_write(f"The name {name}", file, param="destination"):
        make_private(file.parent)
        write_whole(file, target)


def delete_alias(name: str) -> None:
    _file(name).unlink(missing_ok=True)


def _folder() -> Path:
    return data_folder() / "aliases"


def _file(name: str) -> Path:
    return _folder() / quote(name, safe="")


def _read(file: Path) -> str:
    """Return the target stored in a file; empty if the file is gone or is not an alias."""
    try:
        return "" if file.name.startswith(".") else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
