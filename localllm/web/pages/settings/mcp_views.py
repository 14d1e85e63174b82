"""Views of the page for servers of tools."""

from __future__ import annotations

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
