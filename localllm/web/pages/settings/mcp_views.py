"""The page for servers of tools, and its form, read as an entry of config.toml.

Does not know: how a server is started.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

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
    timeout_s: str = "60"
    in_new_chats: bool = True
    for_all: bool = False  # keys with the scope infer may use it too
    error: ErrorNotice | None = None


@view("settings/tools.html")
class ToolServersPage(View):
    """`/settings/tools`."""

    shell: Shell
    servers: tuple[ToolServerCard, ...]
    form: ToolServerForm
    consents: ConsentList
    config_file: str
    missing: ErrorNotice | None = None  # the package mcp, or a proof of who uses this browser


@view("settings/new_tool_server.html")
class NewToolServerPage(View):
    """Shows a new server in full, before it is saved."""

    shell: Shell
    form: ToolServerForm
    command: tuple[str, ...]  # each argument; empty: an address
    address: str
    variables: tuple[Fact, ...]  # or headers
    table: str  # what is written to the file
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
        timeout_s=form.get("timeout_s", "").strip()[:20] or "60",
        in_new_chats="in_new_chats" in form,
        for_all="for_all" in form,
    )


def read_form(form: ToolServerForm) -> McpServer:
    """Return the server. Raises `ConfigError` that says which field is wrong."""
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
