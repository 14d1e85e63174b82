"""Changes of the `[mcp.servers.NAME]` tables in config.toml: add, remove, enable or disable one.

As in edit.py the rest of the file stays as it is, and a file in which more than the one table would change is refused.
Does not know: who asks, how servers are started.
"""

from __future__ import annotations

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

from localllm.config.edit import Change, read_text
from localllm.config.mcp_servers import DEFAULTS, KEYS, McpServer, read_mcp_servers
from localllm.errors import ConfigError

_HEADER = re.compile(r"\s*\[")


def with_server(path: Path, server: McpServer) -> Change:
    """Return the change that adds a server. Raises `ConfigError` if the name is taken."""
    text = read_text(path)
    servers = _servers(text, path)
    if server.name in servers:
        raise ConfigError(f"A server named {server.name} exists already.", hint="Choose another name.", param="name")
    table = table_of(server)
    joint = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
    return _checked(path, text, f"{text}{joint}{table}", servers | {server.name: server}, table)


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
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(name)} = {_toml(text)}' for name, text in value.items())} }}"
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
