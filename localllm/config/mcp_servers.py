"""The `[mcp.servers.NAME]` tables of the config file: servers of tools that the user added, and how each is reached.

A server is a command that is run on this machine, a URL, or the web through a SearXNG, a search engine that one runs
oneself. Only the config file names servers: no request can.
Does not know: how a server is started or called (localllm/mcp/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from localllm.errors import ConfigError

ToolScope = Literal["admin", "infer"]
ToolApi = Literal["off", "consent", "ask", "run"]
"""Which calls API requests may run: none; tools that an admin always allows; those that the client approves as well;
every tool."""
NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?")
NAME_RULE = "Names are 1 to 32 lower-case letters, digits, hyphens and underscores, such as files or my-notes."
MAX_TIMEOUT_S = 3600.0
_SECRET_HINT = re.compile(r"key|token|secret|passw|auth", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class McpServer:
    """One server of tools: a command with its arguments and variables, a URL with its headers, or a SearXNG."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # added to a few variables of this process, such as PATH
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    searxng: str = ""  # address of a SearXNG; localllm's own server then searches there, and reads public pages
    timeout_s: float = 60.0  # for one call; a start has at least 60 s
    enabled: bool = True
    in_new_chats: bool = True  # a new chat offers the tools of this server
    scope: ToolScope = "admin"  # the scope that a key needs to use the tools
    api: ToolApi = "consent"  # what requests to the API may run

    @property
    def origin(self) -> str:
        """Return what is run or contacted. Consent to a tool holds for this origin only."""
        return "\0".join((self.command, *self.args)) if self.command else self.url or f"searxng\0{self.searxng}"


DEFAULTS = McpServer("")
KEYS = tuple(McpServer.__dataclass_fields__)[1:]


def read_mcp_servers(table: Any, path: Path | str) -> dict[str, McpServer]:
    """Return the servers of the `[mcp]` table; `path` is the file it comes from. Raises `ConfigError`."""
    if table is None:
        return {}
    if not isinstance(table, Mapping) or table.keys() - {"servers"} or not isinstance(table.get("servers", {}), dict):
        raise ConfigError(f"{path}: mcp must be a table of servers.", hint="Write [mcp.servers.NAME] for each server.")
    return {name: read_mcp_server(name, given, path) for name, given in table.get("servers", {}).items()}


def read_mcp_server(name: str, given: Any, path: Path | str) -> McpServer:
    """Return one server. Raises `ConfigError` that names the wrong key."""
    where = f"[mcp.servers.{name}] of {path}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"The name {name[:80]!r} of a server of tools is not allowed.", NAME_RULE, param="name")
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is not a table.")
    values = {str(key).replace("-", "_"): value for key, value in given.items()}
    if unknown := sorted(values.keys() - set(KEYS)):
        raise ConfigError(f"Unknown setting {unknown[0]!r} in {where}.", f"Known: {', '.join(KEYS)}.", param=unknown[0])
    for key, value in values.items():
        if not _CHECKS[key](value):
            raise ConfigError(f"{key} = {value!r} in {where} is not valid.", f"It must be {_EXPECTED[key]}.", param=key)
    if isinstance(values.get("args"), list):
        values["args"] = tuple(values["args"])
    server = McpServer(name, **values)
    num_kinds = sum(map(bool, (server.command, server.url, server.searxng)))
    if num_kinds != 1:
        why = f"It has {'more than one of them' if num_kinds else 'none of them'}."
        raise ConfigError(f"{where} needs one of command, url and searxng.", why, param="command")
    if (server.headers and not server.url) or ((server.args or server.env) and not server.command):
        what = "args and env belong to a command" if server.args or server.env else "headers belong to a url"
        raise ConfigError(f"{where} mixes two kinds of servers.", f"{what[0].upper()}{what[1:]}.", param="headers")
    return server


def is_secret(name: str) -> bool:
    """Return whether the value of a variable or header is probably a secret, which pages do not show."""
    return bool(_SECRET_HINT.search(name))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= 4096


def _is_line(value: Any) -> bool:
    return _is_text(value) and value.isprintable()


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= 100 and all(map(_is_text, value))


def _is_variables(value: Any) -> bool:
    pairs = value.items() if isinstance(value, Mapping) else [("", "")]
    return len(pairs) <= 100 and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) and _is_text(v) for key, v in pairs)


def _is_headers(value: Any) -> bool:
    pairs = value.items() if isinstance(value, Mapping) else [("", "")]
    named = all(re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", key) and _is_line(v) and v.isascii() for key, v in pairs)
    return len(pairs) <= 50 and named


def _is_url(value: Any) -> bool:
    return _is_line(value) and re.match(r"https?://[^/?#\s]+", value) is not None and " " not in value


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "command": lambda value: _is_line(value) and bool(value.strip()),
    "args": _is_list,
    "env": _is_variables,
    "url": _is_url,
    "headers": _is_headers,
    "searxng": _is_url,
    "timeout_s": _is_seconds,
    "enabled": _is_bool,
    "in_new_chats": _is_bool,
    "scope": lambda value: value in get_args(ToolScope),
    "api": lambda value: value in get_args(ToolApi),
}
_EXPECTED = {
    "command": "the name or path of a program",
    "args": "a list of up to 100 texts",
    "env": "a table of variables with texts",
    "url": "an address that begins with http:// or https://",
    "headers": "a table of HTTP headers with texts on one line",
    "searxng": "an address that begins with http:// or https://",
    "timeout_s": f"a number of seconds, at most {MAX_TIMEOUT_S:g}",
    "enabled": "true or false",
    "in_new_chats": "true or false",
    "scope": "admin or infer",
    "api": "off, consent, ask or run",
}
