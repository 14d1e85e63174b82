"""The parts of a model's name, as in `org/name:Q4_K_M`, `org/name@revision` or `ollama:llama3.2:1b`; and aliases.

Aliases are made by `localllm cp` and Ollama's /api/copy. No weights are copied:

    $XDG_DATA_HOME/localllm/aliases/NAME      a file with the name of the model; / and : in NAME are escaped

Does not know: which models exist, which one a name means (catalog.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from localllm.errors import ConfigError
from localllm.files.folders import data_folder, make_private, translated_write, write_whole

PROGRAMS = ("ollama", "lmstudio", "llamacpp", "jan")
"""Other local programs whose files localllm reads; their models are called `ollama:NAME`, `lmstudio:NAME`, ..."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"(?:{_PART}/)?{_PART}")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed name. `base` is a repository, the bare last part of one, or a model of another program."""

    base: str
    quant: str | None = None  # after a colon: which file of a GGUF repository
    revision: str | None = None  # after an @
    program: str | None = None  # one of PROGRAMS

    def __str__(self) -> str:
        program = f"{self.program}:" if self.program else ""
        quant = f":{self.quant}" if self.quant else ""
        return f"{program}{self.base}{quant}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_repository(self) -> bool:
        """Return whether the hub could have it: one owner, one name."""
        return self.program is None and self.base.count("/") == 1 and _is_repo_id(self.base)


def parse_name(text: str) -> ModelName:
    """Parse any text. An invalid name is returned as `base`, which matches no model."""
    text = text.strip()
    program, colon, rest = text.partition(":")
    if colon and program in PROGRAMS:
        return ModelName(rest, program=program)
    head, at, revision = text.partition("@")
    base, _, quant = head.partition(":")
    return ModelName(base, quant or None, revision or None if at else None)


def looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or (text.endswith(("/", ".gguf")) and ":" not in text)


def _is_repo_id(text: str) -> bool:
    """Check a name as the hub does: letters, digits, ._- without --, .. and a final .git; at most 96 characters."""
    return bool(_REPO_ID.fullmatch(text)) and len(text) <= 96 and not re.search(r"--|\.\.|\.git$", text)


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
