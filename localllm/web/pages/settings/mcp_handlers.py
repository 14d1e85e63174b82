"""The page for servers of tools: add one after seeing it in full, test, stop, disable or remove it.

Its routes need the scope admin, since a server is a command that is run on this machine. What starts one needs an admin
key or a browser that opened a one-time link, also on a server without keys.
Does not know: how the file is changed (config/edit.py), how a server is started (localllm/mcp/).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.config.edit import Change, enabling, table_of, with_server, without_server, write
from localllm.config.mcp_servers import McpServer, is_secret
from localllm.errors import ConfigError, InvalidParameter, LocalLLMError, NotWritable
from localllm.mcp.servers import ServerState, require_mcp
from localllm.mcp.values import McpMissing
from localllm.web.access.caller import owner_of, require_owner
from localllm.web.errors import MissingScope
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.tools.views import consent_list, tool_rows
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import Fact
from localllm.web.pages.settings.mcp_views import (
    KNOWN,
    NewToolServer,
    NewToolServerPage,
    ToolServerCard,
    ToolServerForm,
    ToolServersPage,
    read_form,
    read_pasted,
    typed_form,
)
from localllm.web.pages.settings.views import file_of, settings_of

log = logging.getLogger(__name__)

HERE = "/settings/tools"
EMPTY = ToolServerForm()


@get(HERE)
async def tool_servers(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the servers with their state and tools, the form for another one, and the consents. `known` fills the form
    with a well-known server.
    """
    known = next((each for each in KNOWN if each.name == request.query_params.get("known")), None)
    return html(
        await _page(request, EMPTY if known is None else replace(EMPTY, name=known.name, command=known.command))
    )


@post(f"{HERE}/add", status_code=200, request_max_body_size=200_000)
async def add_tool_server(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show new servers in full; once that is confirmed, save them. Each is started at its first use."""
    require_owner(request)
    form = await fields_of(request)
    typed = typed_form(form)
    path = file_of(settings_of(request))
    try:
        servers = read_pasted(typed) if typed.pasted else [read_form(typed)]
        for server in servers:
            change = await asyncio.to_thread(with_server, path, server)
            if form.get("confirm") == "yes":
                await asyncio.to_thread(write, change)
                await chat_state(request).mcp.put(server)
                log.info("mcp server added name=%s", server.name)
    except (ConfigError, NotWritable) as error:
        return html(await _page(request, replace(typed, error=notice(error))), 400)
    if form.get("confirm") == "yes":
        return Redirect(f"{HERE}#server-{servers[0].name}", status_code=303)
    shell = pages_state(request).shell(request, "New server of tools", "settings")
    return html(NewToolServerPage(shell, typed, tuple(map(_new, servers)), str(path)))


def _new(server: McpServer) -> NewToolServer:
    variables = tuple(Fact(name, text) for name, text in {**server.env, **server.headers}.items())
    command = (server.command, *server.args) if server.command else ()
    return NewToolServer(server.name, command, server.url, variables, table_of(server), server.searxng)


@post(f"{HERE}/{{name:str}}/test", status_code=303, request_max_body_size=10_000)
async def test_tool_server(request: Request[Any, Any, Any]) -> Redirect:
    """Start a server and list its tools; the page then shows them, or why that failed."""
    require_owner(request)
    server = _requested(request)
    with suppress(LocalLLMError):
        await chat_state(request).mcp.tools(server.name, again=True)
    return _back(server.name)


@post(f"{HERE}/{{name:str}}/stop", status_code=303, request_max_body_size=10_000)
async def stop_tool_server(request: Request[Any, Any, Any]) -> Redirect:
    """End a server; its next use starts it again."""
    server = _requested(request)
    await chat_state(request).mcp.stop(server.name)
    return _back(server.name)


@post(f"{HERE}/{{name:str}}/{{action:str}}", status_code=303, request_max_body_size=10_000)
async def change_tool_server(request: Request[Any, Any, Any]) -> Response[Any]:
    """Enable, disable or remove a server, in the file and at once."""
    server, action = _requested(request), request.path_params["action"]
    servers, path = chat_state(request).mcp, file_of(settings_of(request))
    if action not in ("enable", "disable", "remove"):
        raise InvalidParameter(f"A server has no action {action[:40]!r}.", hint="Reload the page.")
    if action == "enable":
        require_owner(request)
    plan: Callable[[], Change] = (
        (lambda: without_server(path, server.name))
        if action == "remove"
        else lambda: enabling(path, server.name, action == "enable")
    )
    try:
        await asyncio.to_thread(lambda: write(plan()))
    except (ConfigError, NotWritable) as error:
        return html(await _page(request, replace(EMPTY, error=notice(error))), 400)
    log.info("mcp server changed name=%s action=%s", server.name, action)
    if action == "remove":
        await servers.remove(server.name)
        return Redirect(HERE, status_code=303)
    await servers.put(replace(server, enabled=action == "enable"))
    return _back(server.name)


def _back(name: str) -> Redirect:
    return Redirect(f"{HERE}#server-{name}", status_code=303)


def _requested(request: Request[Any, Any, Any]) -> McpServer:
    name = request.path_params["name"]
    server = chat_state(request).mcp.find(name)
    if server is None:
        raise InvalidParameter(f"There is no server of tools named {name[:40]!r}.", hint="Reload the page.")
    return server


async def _page(request: Request[Any, Any, Any], form: ToolServerForm = EMPTY) -> ToolServersPage:
    state = chat_state(request)
    missing = None
    try:
        require_mcp()
        require_owner(request)
    except (McpMissing, MissingScope) as error:
        missing = notice(error)
    consents = await state.store.call(Chats.consents, owner_of(request))
    return ToolServersPage(
        shell=pages_state(request).shell(request, "Tools", "settings"),
        servers=tuple(_card(state.mcp.state(server.name)) for server in state.mcp.servers),
        form=form,
        searches=any(server.searxng for server in state.mcp.servers),
        consents=consent_list(consents, HERE),
        config_file=str(file_of(settings_of(request))),
        missing=missing,
    )


def _card(state: ServerState) -> ToolServerCard:
    server = state.server
    facts = [Fact("Address", server.url)] if server.url else []
    facts += [Fact("SearXNG", server.searxng)] if server.searxng else []
    facts += [Fact(name, "••••" if is_secret(name) else text) for name, text in server.env.items()]
    facts += [Fact(name, "••••") for name in server.headers]
    facts.append(Fact("Time limit of a call", f"{server.timeout_s:g} s"))
    facts.append(Fact("In new chats", "on" if server.in_new_chats else "off"))
    facts.append(Fact("For", "every key" if server.scope == "infer" else "keys with the scope admin"))
    facts.append(Fact("Through the API", API[server.api]))
    return ToolServerCard(
        name=server.name,
        url=f"{HERE}/{server.name}",
        state=state.state,
        command=(server.command, *server.args) if server.command else (),
        facts=tuple(facts),
        tools=tool_rows(state) if state.listing is not None else None,
        refused=state.listing.refused if state.listing is not None else (),
        tail=state.tail,
        error=notice(state.failure) if state.failure is not None else None,
    )


API = {
    "off": "not at all",
    "consent": "tools that an admin always allows",
    "ask": "also calls that the client approves",
    "run": "every call",
}
"""What requests to the API may run, by the value of `api` in the server's table."""

HANDLERS = (tool_servers, add_tool_server, test_tool_server, stop_tool_server, change_tool_server)
