"""The page for servers of tools, and its form, read as an entry of config.toml.

Does not know: how a server is started.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.config.mcp_servers import McpServer, read_mcp_server
from localllm.errors import ConfigError
from localllm.web.pages.chat.tools.views import ConsentList, ToolRow
from localllm.web.pages.frame.views import ErrorNotice, Fact, Shell, View, view


@view("settings/_tool_server.html")
class ToolServerCard(View):
    """One server of tools: what it is, its state, its tools, the last lines of its errors."""

    name: str
    url: str  # of its actions
    state: str  # disabled, not started, starting, running, failed
    command: tuple[str, ...]  # empty: it is reached at an address
    facts: tuple[Fact, ...]
    tools: tuple[ToolRow, ...] | None = None  # None: it has not listed them yet
    refused: tuple[str, ...] = ()  # why tools are left out
    tail: tuple[str, ...] = ()
    error: ErrorNotice | None = None


@view("settings/_tool_server_form.html")
class ToolServerForm(View):
    """The form that adds a server; the fields are as they were typed."""

    name: str = ""
    command: str = ""
    env: str = ""
    address: str = ""
    headers: str = ""
    searxng: str = ""
    pasted: str = ""  # JSON with `mcpServers`, instead of the other fields
    timeout_s: str = "60"
    in_new_chats: bool = True
    for_all: bool = False  # keys with the scope infer may use it too
    error: ErrorNotice | None = None

    @property
    def known(self) -> tuple[KnownServer, ...]:
        return KNOWN


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server that many use, with the command that its authors give."""

    name: str
    what: str
    command: str
    needs: str  # the program that runs it


KNOWN = (
    KnownServer("time", "The time now, and between time zones", "uvx mcp-server-time", "uv"),
    KnownServer(
        "files",
        "Read and write files below one folder",
        "npx -y @modelcontextprotocol/server-filesystem FOLDER",
        "Node",
    ),
    KnownServer(
        "git", "Status, differences and history of a repository", "uvx mcp-server-git --repository FOLDER", "uv"
    ),
    KnownServer("fetch", "Read pages of the web as Markdown", "uvx mcp-server-fetch", "uv"),
    KnownServer(
        "memory",
        "A graph of facts that the model writes and reads",
        "npx -y @modelcontextprotocol/server-memory",
        "Node",
    ),
    KnownServer("browser", "Operate a browser: open pages, click, fill in forms", "npx -y @playwright/mcp", "Node"),
)


@view("settings/tools.html")
class ToolServersPage(View):
    """`/settings/tools`."""

    shell: Shell
    servers: tuple[ToolServerCard, ...]
    form: ToolServerForm
    consents: ConsentList
    searches: bool  # a SearXNG is among the servers
    config_file: str
    missing: ErrorNotice | None = None  # the package mcp, or a proof of who uses this browser


@dataclass(frozen=True, slots=True)
class NewToolServer:
    """A new server, before it is saved."""

    name: str
    command: tuple[str, ...]  # each argument; empty: an address
    address: str
    variables: tuple[Fact, ...]  # or headers
    table: str  # what is written to the file
    searxng: str = ""


@view("settings/new_tool_server.html")
class NewToolServerPage(View):
    """The page that shows new servers in full, before they are saved."""

    shell: Shell
    form: ToolServerForm
    servers: tuple[NewToolServer, ...]
    config_file: str


MAX_CHARS = 20_000
THE_FORM = "the form"


def typed_form(form: Mapping[str, str]) -> ToolServerForm:
    """Return the fields as they were typed."""

    def text(name: str) -> str:
        return form.get(name, "").strip()[:MAX_CHARS]

    return ToolServerForm(
        name=text("name"),
        command=text("command"),
        env=text("env"),
        address=text("address"),
        headers=text("headers"),
        searxng=text("searxng"),
        pasted=text("pasted"),
        timeout_s=form.get("timeout_s", "").strip()[:20] or "60",
        in_new_chats="in_new_chats" in form and not text("searxng"),  # the web is a switch that is off at first
        for_all="for_all" in form,
    )


def read_form(form: ToolServerForm) -> McpServer:
    """Return the server. Raises `ConfigError` that says which field is wrong."""
    if form.searxng:
        found = {"searxng": form.searxng, "in_new_chats": False, "scope": "infer" if form.for_all else "admin"}
        return read_mcp_server(form.name or "web", found, THE_FORM)
    if form.command and form.address:
        raise ConfigError("Give either a command or an address.", "Both are filled in.", param="address")
    values: dict[str, object] = {"timeout_s": _seconds(form.timeout_s), "in_new_chats": form.in_new_chats}
    if form.command:
        command, *arguments = _words(form.command)
        values |= {"command": command, "args": arguments, "env": _pairs(form.env, "=", "variable")}
    elif form.address:
        values |= {"url": form.address, "headers": _pairs(form.headers, ":", "header")}
    else:
        raise ConfigError("Give a command or an address.", "Both are empty.", param="command")
    return read_mcp_server(form.name, values | {"scope": "infer" if form.for_all else "admin"}, THE_FORM)


def read_pasted(form: ToolServerForm) -> list[McpServer]:
    """Return the servers of the JSON that the pages of servers print: an object with `mcpServers`, or with `servers`,
    or the servers alone. Raises `ConfigError`.
    """
    try:
        found = msgspec.json.decode(form.pasted)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            "The pasted text is not JSON.", f"{error}.", "Paste it from { to }.", param="pasted"
        ) from error
    for key in ("mcpServers", "mcp", "servers"):
        found = found[key] if isinstance(found, dict) and isinstance(found.get(key), dict) else found
    if not isinstance(found, dict) or not found or not all(isinstance(each, dict) for each in found.values()):
        hint = 'For example: {"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}'
        raise ConfigError("The pasted JSON cannot be used.", "It holds no servers.", hint, param="pasted")
    common = {"in_new_chats": form.in_new_chats, "scope": "infer" if form.for_all else "admin"}
    servers = []
    for name, each in found.items():
        plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:32].strip("-_")
        servers.append(read_mcp_server(plain, {**_of_pasted(each), **common}, THE_FORM))
    return servers


def _of_pasted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with our keys. What we do not know stays, so that it is refused by name."""
    names = {"serverUrl": "url", "httpUrl": "url", "timeout": "timeout_s"}
    found = {names.get(key, key): value for key, value in given.items() if key not in ("type", "disabled", "transport")}
    if isinstance(found.get("timeout_s"), int | float) and found["timeout_s"] > 1000:  # others count milliseconds
        found["timeout_s"] /= 1000
    return {key: value for key, value in found.items() if value not in ({}, [], None)}


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError("The command cannot be read.", f"{error}.", "Close every quote.", param="command") from error
    if not words:
        raise ConfigError("The command is empty.", param="command")
    return words


def _pairs(text: str, mark: str, what: str) -> dict[str, str]:
    found = {}
    for line in filter(str.strip, text.splitlines()):
        name, sign, value = line.partition(mark)
        if not sign or not name.strip():
            raise ConfigError(f"A {what} cannot be read.", f"Got {line[:60]!r}.", f"NAME{mark}VALUE, one on each line")
        found[name.strip()] = value.strip()
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError("The time limit must be a number of seconds.", f"Got {text!r}.", param="timeout_s") from None
