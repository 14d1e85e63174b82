"""Tool calls, their results, the choice of servers, and what a user has allowed.

Does not know: handlers, how a call is run, where chats are stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from localllm.mcp.servers import McpServers, ServerState
from localllm.serving.answers.conversation import calls_tools
from localllm.web.pages.chat.composer.settings import is_chosen
from localllm.web.pages.chat.markdown.render import code_block
from localllm.web.pages.chat.replies.claims import usable_servers
from localllm.web.pages.chat.replies.messages import awaited_calls, calls_of
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Consent
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import ErrorNotice, View, view


@view("chat/_tool_call.html")
class ToolCallCard(View):
    """A tool call in a reply. `html` shows its arguments as a code block."""

    name: str
    html: str
    broken: bool = False  # the arguments are not a JSON object, so the call cannot be answered
    is_offered: bool = True  # else the chat does not offer the tool, so there is nothing to run or to type
    server: str = ""  # the server of the tool; empty: the result is typed
    state: Literal["asks", "running", "done"] = "asks"  # of a call to a server
    note: str = ""  # why it asks again
    text: str = ""  # the result
    url: str = ""  # of the call; each decision is a path below it


@view("chat/_tool_notes.html")
class ToolNotes(View):
    """The reasons why tools that the chat has chosen were not offered to the model."""

    notes: tuple[str, ...]


@view("chat/_result_form.html")
class ResultForm(View):
    """The form where the user types the results of a reply's tool calls."""

    url: str  # of the message
    message_id: str
    calls: tuple[tuple[int, str], ...]  # number and name of each call without a result
    is_folded: bool = False  # a server can give the results, so typing is the second choice
    goes_on: bool = False  # every call has a result
    error: ErrorNotice | None = None  # why the results could not be sent


@view("chat/_tool_result.html")
class ToolResult(View):
    """The result of one tool call."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """A server whose tools the chat offers to the model, or not."""

    name: str
    chosen: bool
    note: str = ""  # its state, if it is of interest


@view("chat/_tool_servers.html")
class ToolServers(View):
    """The choice of servers in the drawer, besides the one behind the switch."""

    choices: tuple[ServerChoice, ...]
    note: str = ""  # why none of them is used


@view("chat/_web_switch.html")
class WebSwitch(View):
    """The switch beside Send with which the chat offers the tools of the web to the model."""

    server: str = ""  # the server that searches; empty: there is none
    chosen: bool = False
    note: str = ""  # why the model cannot use it


@dataclass(frozen=True, slots=True)
class ConsentRow:
    """A tool that the user allows always, or never."""

    server: str
    tool: str
    choice: Literal["always", "never"]
    date: str


@view("chat/_consents.html")
class ConsentList(View):
    """The tools that a user allows always or never, each with a button that takes the decision back."""

    rows: tuple[ConsentRow, ...]
    back: str = ""  # the page to return to


@dataclass(frozen=True, slots=True)
class ToolRow:
    """One tool of a server."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class UsableServer:
    """A server whose tools a user may use."""

    name: str
    state: str
    tools: tuple[ToolRow, ...] = ()
    error: ErrorNotice | None = None


@view("chat/_tools_panel.html")
class ToolsPanel(View):
    """The tools that a user may use, and what is allowed; in a dialog or as a page."""

    servers: tuple[UsableServer, ...]
    consents: ConsentList


MAX_SHOWN_CHARS = 300
"""Characters of a tool's description on a page."""


def call_cards(url: str, details: Mapping[str, Any]) -> tuple[ToolCallCard | ToolNotes, ...]:
    """Return the calls of a reply in their present state, and why tools were not offered. `url`: of the message."""
    notes = tuple(str(note) for note in details.get("tool_notes", []))
    cards = tuple(_card(url, details, number) for number in range(len(details.get("calls", []))))
    return (ToolNotes(notes), *cards) if notes else cards


def _card(url: str, details: Mapping[str, Any], number: int) -> ToolCallCard:
    call, stored = calls_of(details)[number], details["calls"][number]
    arguments = call.arguments_object()
    if arguments is None:
        return ToolCallCard(call.name, code_block(call.arguments, ""), broken=True)
    html = code_block(json.dumps(arguments, indent=2, ensure_ascii=False), "json")
    if stored.get("not_offered"):
        return ToolCallCard(call.name, html, is_offered=False)
    if not stored.get("server"):
        return ToolCallCard(call.name, html)
    return ToolCallCard(
        stored["tool"],
        html,
        server=stored["server"],
        state=stored.get("state", "asks"),
        note=stored.get("note", ""),
        text=stored.get("result", ""),
        url=f"{url}/calls/{number}",
    )


def answered(
    cards: Sequence[ToolCallCard | ToolNotes], details: Mapping[str, Any]
) -> tuple[ToolCallCard | ToolNotes, ...]:
    """Return the calls of a reply with the results that the message after it carries."""
    given = iter(results(details))
    return tuple(
        replace(card, state="done", text=next(given, ToolResult("", "")).text)
        if isinstance(card, ToolCallCard) and card.is_offered and not card.broken
        else card
        for card in cards
    )


def result_form(url: str, message_id: str, details: Mapping[str, Any]) -> ResultForm | None:
    """Return the form for the results that are not there yet; None if no call can be answered, or while calls run."""
    calls, awaited = calls_of(details), awaited_calls(details)
    if not awaited or details.get("calls_busy"):
        return None
    stored = details["calls"]
    left = tuple((n, calls[n].name) for n in awaited if stored[n].get("state") != "done")
    failure = details.get("calls_failure")
    return ResultForm(
        url,
        message_id,
        left,
        is_folded=any(stored[n].get("server") for n, _ in left),
        goes_on=not left,
        error=ErrorNotice(*failure) if failure else None,
    )


def follows_calls(details: Mapping[str, Any], *, is_saved: bool) -> bool:
    """Return whether the calls of a finished reply will change by themselves. While it is being saved, they may."""
    is_new = not is_saved and any(call.get("server") for call in details.get("calls", []))
    return is_new or bool(details.get("calls_busy"))


def results(details: Mapping[str, Any]) -> tuple[ToolResult, ...]:
    return tuple(ToolResult(result["name"], result["text"]) for result in details.get("results", []))


def consent_list(consents: Iterable[Consent], back: str) -> ConsentList:
    rows = (
        ConsentRow(each.server, each.tool, each.choice, datetime.fromtimestamp(each.at_s).strftime("%Y-%m-%d"))
        for each in consents
    )
    return ConsentList(tuple(rows), back)


def tool_servers(state: ChatState, owner: str, settings: Mapping[str, str]) -> ToolServers | None:
    """Return the choice of servers in the drawer; None if the user has none."""
    servers = usable_servers(state, owner)
    if not servers:
        return None
    entry = state.pages.manager.register.find(settings.get("model"))
    served = entry.served if entry is not None else None
    note = f"{served.shown_name} cannot call tools." if served is not None and not calls_tools(served) else ""
    elsewhere = state.pages.elsewhere(settings.get("model", ""))
    if elsewhere and not state.pages.upstreams.calls_tools(elsewhere):
        note = f"{elsewhere} cannot call tools."
    choices = (_choice(state.mcp.state(server.name), settings) for server in servers if not server.searxng)
    return ToolServers(tuple(choices), note)


def web_switch(state: ChatState, owner: str, settings: Mapping[str, str]) -> WebSwitch:
    """Return the switch for the first server that searches the web, if the user may use one."""
    server = next((each for each in usable_servers(state, owner) if each.searxng), None)
    shown = tool_servers(state, owner, settings) if server is not None else None
    if server is None or shown is None:
        return WebSwitch()
    return WebSwitch(server.name, is_chosen(server, settings), shown.note)


def chosen_again(shown: ToolServers | None, form: Mapping[str, str]) -> ToolServers | None:
    """Return the choice as it was typed into a form that was refused."""
    if shown is None or "mcp_shown" not in form:
        return shown
    choices = tuple(replace(choice, chosen=f"mcp-{choice.name}" in form) for choice in shown.choices)
    return replace(shown, choices=choices)


def _choice(state: ServerState, settings: Mapping[str, str]) -> ServerChoice:
    note = str(state.failure) if state.failure is not None else ""
    return ServerChoice(state.server.name, is_chosen(state.server, settings), note)


def server_list(servers: McpServers, names: Sequence[str]) -> tuple[UsableServer, ...]:
    """Return the servers of these names with the tools that they listed last."""
    return tuple(
        UsableServer(name, state.state, tool_rows(state), notice(state.failure) if state.failure is not None else None)
        for name, state in ((name, servers.state(name)) for name in names)
    )


def tool_rows(state: ServerState) -> tuple[ToolRow, ...]:
    listed = state.listing.tools if state.listing is not None else ()
    lines = ((tool.name, " ".join(tool.description.split())) for tool in listed)
    return tuple(
        ToolRow(name, line if len(line) <= MAX_SHOWN_CHARS else f"{line[:MAX_SHOWN_CHARS]}…") for name, line in lines
    )
