"""One setting in config.toml: the line that would set it, checked by the parser that reads it, and written when told.

The rest of the file stays as it is, comments included; a file where that cannot be had by changing one line is left
alone. What opens the machine to others' code or holds a secret is not written from here at all.
Does not know: who asks, when the file is read again (at the next start).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from localllm.config import EngineConfig, ServerConfig, resolve
from localllm.errors import ConfigError

KINDS: Mapping[str, str] = {each.name: str(each.type) for each in (*fields(EngineConfig), *fields(ServerConfig))}
BY_HAND = {
    "api_key": "A secret does not belong into this file: make a key instead.",
    "trust_remote_code": "It lets a checkpoint run code with your rights, which is for whoever sits at the machine.",
}
"""What `planned` refuses, and why."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """A file as it would be."""

    path: Path
    name: str
    line: str  # what would stand there; empty: nothing
    old_line: str  # what stands there now; empty: nothing
    text: str  # the whole file with it


def planned(path: Path, name: str, asked: str | None) -> Change:
    """asked: the value as a person types it; None: the line goes. Raises `ConfigError` for what a start refuses."""
    if name not in KINDS:
        raise ConfigError(f"Unknown setting {name[:80]!r}.", f"Known: {', '.join(sorted(KINDS))}.", param="name")
    if name in BY_HAND:
        raise ConfigError(f"{name} is not written from here.", BY_HAND[name], param=name)
    line = "" if asked is None else f"{name} = {_toml(KINDS[name], asked.strip())}"
    text = _read(path)
    old_line, new = _replaced(text, name, line)
    _check(path, text, new, name)
    return Change(path, name, line, old_line, new)


def write(change: Change) -> None:
    """Whole or not at all. Raises `ConfigError`."""
    path = change.path.resolve()  # a link to a file of dotfiles stays one
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(change.text)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"Cannot write {change.path}.", f"{error.strerror or error}.") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}.", f"{error}.") from error


def _toml(kind: str, text: str) -> str:
    if kind.startswith("tuple"):
        return f"[{', '.join(_quoted(part.strip()) for part in text.split(',') if part.strip())}]"
    if kind.startswith("bool") and text.lower() in ("true", "false"):
        return text.lower()
    return text if kind.startswith(("int", "float")) and _NUMBER.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """JSON's escapes are TOML's, but for the pairs that JSON makes of characters beyond 16 bits."""
    return json.dumps(text, ensure_ascii=False)


def _replaced(text: str, name: str, line: str) -> tuple[str, str]:
    """The line that sets it now, and the text with the new one in its place; a new setting goes before the tables."""
    lines = text.splitlines(keepends=True)
    end = next((at for at, each in enumerate(lines) if each.lstrip().startswith("[")), len(lines))
    sets = re.compile(rf'\s*["\']?{name.replace("_", "[_-]")}["\']?\s*=')
    at = next((at for at, each in enumerate(lines[:end]) if sets.match(each)), None)
    new = [f"{line}\n"] if line else []
    if at is not None:
        return lines[at].strip(), "".join([*lines[:at], *new, *lines[at + 1 :]])
    head = lines[:end]
    if head and new and not head[-1].endswith("\n"):
        head[-1] += "\n"
    return "", "".join([*head, *new, *lines[end:]])


def _check(path: Path, old: str, new: str, name: str) -> None:
    """Nothing else may change, and a start must take the file."""
    try:
        same = _others(old, name) == _others(new, name)
    except tomllib.TOMLDecodeError as error:
        same = False
        if not _is_toml(old):
            raise ConfigError(f"Cannot read {path}.", f"{error}.", "Mend it in an editor.", param=name) from error
    if not same:
        why = "It holds the setting in more than one line, or the value cannot stand in one."
        raise ConfigError(f"{path} is left as it is.", why, "Change it in an editor.", param=name)
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / path.name
        trial.write_text(new, encoding="utf-8")
        resolve({}, {}, trial)


def _others(text: str, name: str) -> dict[str, Any]:
    return {key: value for key, value in tomllib.loads(text).items() if key.replace("-", "_") != name}


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
