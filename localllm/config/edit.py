"""Change config.toml: prepare the changed file, check it with the parser that reads it, write it. A change is one
setting, settings of one `[models.NAME]` table, or one `[mcp.servers.NAME]` table that is added, removed, enabled or
disabled.

The rest of the file stays as it is, comments included; a file in which more would change is refused.
Settings that let foreign code run or that hold a secret are never written from here.
Does not know: who asks, how servers are started; that the file is read again only at the next start.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from localllm.config.mcp_servers import DEFAULTS, KEYS, McpServer, read_mcp_servers
from localllm.config.resolve import resolve
from localllm.config.settings import SETTINGS
from localllm.errors import ConfigError
from localllm.files.folders import translated_write, write_whole

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the config file that is not written yet."""

    path: Path
    name: str
    line: str  # the new line; empty: the setting is removed
    old_line: str  # the present line; empty: the setting is not in the file
    text: str  # the whole file after the change


def planned(path: Path, name: str, asked: str | None) -> Change:
    """Return the change that sets `name` to `asked`, as a person types it; None removes the line. Raises `ConfigError`
    for a value that a start would refuse."""
    if name not in SETTINGS:
        raise ConfigError(f"Unknown setting {name[:80]!r}.", f"Known: {', '.join(sorted(SETTINGS))}.", param="name")
    if why := SETTINGS[name].by_hand:
        raise ConfigError(f"{name} cannot be set here.", why, param=name)
    line = "" if asked is None else f"{name} = {_toml(SETTINGS[name].kind, asked.strip())}"
    text = read_text(path)
    old_line, new = _replaced(text, name, line)
    _check(path, text, new, name)
    return Change(path, name, line, old_line, new)


def planned_for_model(path: Path, model: str, values: Mapping[str, Any]) -> Change:
    """Return the change that sets these settings in the table of one model. Raises `ConfigError`."""
    text = read_text(path)
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"""\s*\[\s*models\s*\.\s*["']?{re.escape(model)}["']?\s*\]""")
    start = next((at for at, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        lines += [_joint(text), f"[models.{_quoted(model)}]\n"]
        start = len(lines) - 1
    for name, value in values.items():
        end = next((at for at in range(start + 1, len(lines)) if _HEADER.match(lines[at])), len(lines))
        at = next((at for at in range(start + 1, end) if _sets(name, lines[at])), None)
        lines[slice(at, at + 1) if at is not None else slice(start + 1, start + 1)] = [f"{name} = {_as_toml(value)}\n"]
    new = "".join(lines)
    if not (_is_toml(text) and _is_toml(new)) or _beside_model(text, model) != _beside_model(new, model):
        why = "The table of this model is not written as lines of its own."
        raise ConfigError(f"{path} was not changed.", why, "Change it in an editor.", param="model")
    resolve({}, {}, path, new)
    return Change(path, model, ", ".join(values), "", new)


def _beside_model(text: str, model: str) -> dict[str, Any]:
    tables = tomllib.loads(text)
    models = {name: table for name, table in tables.pop("models", {}).items() if name != model}
    return tables | {"models": models}


def present_line(path: Path, name: str) -> str:
    """Return the line of the file that sets `name`; empty if no line does. Raises `ConfigError`."""
    return _replaced(read_text(path), name, "")[0]


def write(change: Change) -> None:
    """Replace the file atomically. Raises `NotWritable`."""
    path = change.path.resolve()  # a symbolic link stays one
    with translated_write("The setting", change.path):
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write_whole(path, change.text, mode)


def read_text(path: Path) -> str:
    """Return the text of the config file; empty if there is none. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}.", f"{error}.") from error


def _toml(kind: str, text: str) -> str:
    if kind == "tuple":
        return f"[{', '.join(_quoted(part.strip()) for part in text.split(',') if part.strip())}]"
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower()
    return text if kind in ("int", "float", "bytes", "seconds") and _NUMBER.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """Quote a string for TOML. JSON's escapes are valid TOML, except surrogate pairs; hence ensure_ascii=False."""
    return json.dumps(text, ensure_ascii=False)


def _replaced(text: str, name: str, line: str) -> tuple[str, str]:
    """Return the line that sets the setting now, and the text with the new line; a new line goes before the tables."""
    lines = text.splitlines(keepends=True)
    end = next((at for at, each in enumerate(lines) if each.lstrip().startswith("[")), len(lines))
    at = next((at for at, each in enumerate(lines[:end]) if _sets(name, each)), None)
    new = [f"{line}\n"] if line else []
    if at is not None:
        return lines[at].strip(), "".join([*lines[:at], *new, *lines[at + 1 :]])
    head = lines[:end]
    if head and new and not head[-1].endswith("\n"):
        head[-1] += "\n"
    return "", "".join([*head, *new, *lines[end:]])


def _sets(name: str, line: str) -> bool:
    return re.match(rf'\s*["\']?{name.replace("_", "[_-]")}["\']?\s*=', line) is not None


def _joint(text: str) -> str:
    """Return what stands between a file's text and a table behind it."""
    return "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"


def _check(path: Path, old: str, new: str, name: str) -> None:
    """Refuse a change that would alter another setting or that a start would refuse."""
    try:
        same = _others(old, name) == _others(new, name)
    except tomllib.TOMLDecodeError as error:
        same = False
        if not _is_toml(old):
            raise ConfigError(f"Cannot read {path}.", f"{error}.", "Correct it in an editor.", param=name) from error
    if not same:
        why = "The setting spans more than one line, or the new value does not fit on one line."
        raise ConfigError(f"{path} was not changed.", why, "Change it in an editor.", param=name)
    resolve({}, {}, path, new)


def _others(text: str, name: str) -> dict[str, Any]:
    return {key: value for key, value in tomllib.loads(text).items() if key.replace("-", "_") != name}


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


_HEADER = re.compile(r"\s*\[")


def with_server(path: Path, server: McpServer) -> Change:
    """Return the change that adds a server. Raises `ConfigError` if the name is taken."""
    text = read_text(path)
    servers = _servers(text, path)
    if server.name in servers:
        raise ConfigError(f"A server named {server.name} exists already.", hint="Choose another name.", param="name")
    table = table_of(server)
    return _checked(path, text, f"{text}{_joint(text)}{table}", servers | {server.name: server}, table)


def without_server(path: Path, name: str) -> Change:
    """Return the change that removes a server."""
    text = read_text(path)
    servers = _servers(text, path)
    lines = text.splitlines(keepends=True)
    for start, end in reversed(_tables(lines, name)):
        del lines[start:end]
    servers.pop(name, None)
    return _checked(path, text, "".join(lines), servers, "")


def enabling(path: Path, name: str, enabled: bool) -> Change:
    """Return the change that enables or disables a server."""
    text = read_text(path)
    servers = _servers(text, path)
    if name not in servers:
        raise ConfigError(f"{path} has no server named {name}.", hint="Reload the page.", param="name")
    lines = text.splitlines(keepends=True)
    line = f"enabled = {'true' if enabled else 'false'}\n"
    for start, end in _tables(lines, name)[:1]:
        at = next((at for at in range(start + 1, end) if re.match(r"\s*enabled\s*=", lines[at])), None)
        lines[slice(at, at + 1) if at is not None else slice(start + 1, start + 1)] = [line]
    changed = McpServer(**{key: getattr(servers[name], key) for key in ("name", *KEYS)} | {"enabled": enabled})
    return _checked(path, text, "".join(lines), servers | {name: changed}, line)


def table_of(server: McpServer) -> str:
    """Return the table of a server, without values at their default."""
    lines = [f"[mcp.servers.{server.name}]"]
    for key in KEYS:
        value = getattr(server, key)
        if value != getattr(DEFAULTS, key):
            lines.append(f"{key} = {_as_toml(value)}")
    return "\n".join(lines) + "\n"


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_as_toml(name)} = {_as_toml(text)}' for name, text in value.items())} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tables(lines: list[str], name: str) -> list[tuple[int, int]]:
    """Return the first line of each table of a server, and the line after its last. Comments directly before the next
    table belong to that.
    """
    own = re.compile(rf"""\s*\[\s*mcp\s*\.\s*servers\s*\.\s*["']?{re.escape(name)}["']?\s*[.\]]""")
    heads = [at for at, line in enumerate(lines) if _HEADER.match(line)]
    found = []
    for start, end in pairwise([*heads, len(lines)]):
        if own.match(lines[start]):
            while end > start + 1 and end < len(lines) and re.match(r"\s*#", lines[end - 1]):
                end -= 1
            found.append((start, end))
    return found


def _servers(text: str, path: Path) -> dict[str, McpServer]:
    try:
        return read_mcp_servers(tomllib.loads(text).get("mcp"), path)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Cannot read {path}.", f"{error}.", "Correct it in an editor.") from error


def _checked(path: Path, old: str, new: str, servers: dict[str, McpServer], line: str) -> Change:
    """Refuse a change that a start would refuse, or that would alter more than the one table."""
    try:
        before, after = tomllib.loads(old), tomllib.loads(new)
        before.pop("mcp", None)
        same = read_mcp_servers(after.pop("mcp", None), path) == servers and before == after
    except (tomllib.TOMLDecodeError, ConfigError):
        same = False
    if not same:
        why = "The table of the server is not written as a block of its own that begins with [mcp.servers.NAME]."
        raise ConfigError(f"{path} was not changed.", why, "Change it in an editor.")
    return Change(path, "mcp", line, "", new)
