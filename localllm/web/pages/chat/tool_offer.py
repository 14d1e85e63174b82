"""The tools of servers that a chat offers to the model: which servers it has chosen, and who may use them.

Does not know: HTTP, templates, how a call is run (tool_runs.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from localllm.config.mcp_servers import McpServer
from localllm.errors import LocalLLMError
from localllm.mcp.naming import function_names
from localllm.mcp.values import ServerTool
from localllm.serving.chat import calls_tools
from localllm.serving.served import ServedModel
from localllm.units import format_count
from localllm.web.access.tools import may_use
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.tools import MAX_TOOLS_CHARS, is_chosen, read_tools

CHARS_PER_TOKEN = 4
MAX_OFFERED = 256
"""Most tools of servers that a reply is offered."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools by the name that the model uses, and what was left out and why."""

    by_name: Mapping[str, ServerTool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def for_model(self, served: ServedModel, settings: Mapping[str, str]) -> OfferedTools:
        """Return the tools that this model can call, and whose descriptions take at most half of its context."""
        typed = read_tools(settings.get("tools", ""))
        if not calls_tools(served):
            return OfferedTools()
        taken = {tool["function"]["name"] for tool in typed}
        most = min(MAX_TOOLS_CHARS, served.plan.max_model_len // 2 * CHARS_PER_TOKEN) - len(msgspec.json.encode(typed))
        found, left_out = dict[str, ServerTool](), dict[str, int]()
        for name, tool in function_names(self.by_name.values(), taken).items():
            most -= len(msgspec.json.encode(function_of(name, tool))) + 1
            if most < 0 or len(found) == MAX_OFFERED:
                left_out[tool.server] = left_out.get(tool.server, 0) + 1
            else:
                found[name] = tool
        notes = [
            f"{format_count(count)} tools of {server} are left out: with them the descriptions are too long."
            for server, count in left_out.items()
        ]
        return OfferedTools(found, (*self.notes, *notes))

    def in_settings(self, settings: Mapping[str, str]) -> Mapping[str, str]:
        """Return the settings with these tools beside the typed ones."""
        if not self.by_name:
            return settings
        functions = [function_of(name, tool) for name, tool in self.by_name.items()]
        typed = read_tools(settings.get("tools", ""))
        return {**settings, "tools": msgspec.json.encode([*typed, *functions]).decode()}


NOTHING = OfferedTools()


def function_of(name: str, tool: ServerTool) -> dict[str, object]:
    return {"name": name, "description": tool.description, "parameters": tool.schema}


def usable_servers(state: ChatState, owner: str) -> list[McpServer]:
    """Return the servers that are enabled, and that this owner may use."""
    return [server for server in state.mcp.servers if server.enabled and may_use(owner, server)]


async def offered_tools(state: ChatState, owner: str, settings: Mapping[str, str]) -> OfferedTools:
    """Return the tools of the chosen servers, which are started if they do not run. A server that fails is left out,
    with a note; so are tools that the owner never allows.
    """
    servers = [server for server in usable_servers(state, owner) if is_chosen(server, settings)]
    if not servers:
        return NOTHING
    listings = await asyncio.gather(*(state.mcp.tools(server.name) for server in servers), return_exceptions=True)
    never = {
        (consent.server, consent.tool)
        for consent in await state.store.call(Chats.consents, owner)
        if consent.choice == "never"
    }
    tools, notes = list[ServerTool](), list[str]()
    for server, listing in zip(servers, listings, strict=True):
        if isinstance(listing, LocalLLMError):
            notes.append(f"The tools of {server.name} are left out. {listing} {listing.hint}".rstrip())
        elif isinstance(listing, BaseException):
            raise listing
        else:
            tools += [tool for tool in listing.tools if (tool.server, tool.name) not in never]
    by_name = {f"{tool.server} {tool.name}": tool for tool in tools}
    return replace(NOTHING, by_name=by_name, notes=tuple(notes))
