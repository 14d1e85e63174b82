"""Tools of MCP servers: who may use a server, what was decided about its tools, and limits that all users share.

Does not know: how servers are called (localllm/mcp/), where decisions are stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from litestar import Litestar

from localllm.config.mcp_servers import McpServer
from localllm.mcp.servers import McpServers

MAX_ROUNDS = 8
"""Replies in a row that may call tools about which nobody is asked."""
MAX_CUTS = 4
"""How often results that do not fit into the context are cut to half their length."""


class ToolDecision(Protocol):
    """An owner's decision about a tool."""

    @property
    def server(self) -> str: ...

    @property
    def tool(self) -> str: ...

    @property
    def digest(self) -> str: ...  # of the tool at the time of the decision

    @property
    def choice(self) -> str: ...  # always or never


Decisions = Callable[[str], Awaitable[Sequence[ToolDecision]]]
"""Returns the decisions of an owner."""


async def no_decisions(owner: str) -> Sequence[ToolDecision]:
    """Return the decisions of an owner on a server without pages: none."""
    return ()


def mcp_of(app: Litestar) -> McpServers:
    """Return the servers of tools of the application."""
    servers: McpServers = app.state["mcp"]
    return servers


def may_use(owner: str, server: McpServer) -> bool:
    """Return whether an owner may use a server. The empty owner is that of admins, and of a server without keys."""
    return not owner or server.scope == "infer"
