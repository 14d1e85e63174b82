"""Calls of MCP servers' tools: who may use a server, what its owner decided about its tools, and the limits that the
chat page and the Responses API share.

Does not know: how servers are called (localllm/mcp/), where decisions are stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, Protocol

from localllm.config.mcp_servers import McpServer

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
Choice = Literal["always", "changed", "never", ""]
"""What an owner decided about a tool. changed: it was always allowed, but is another tool now; empty: it asks."""


class ConsentPolicy:
    """An owner's decisions, by server and tool: the policy that the chat page and the Responses API share."""

    def __init__(self, decisions: Iterable[ToolDecision]) -> None:
        self._by_tool = {(each.server, each.tool): each for each in decisions}

    def choice(self, server: str, tool: str, digest: str) -> Choice:
        """Return the decision about a tool. `digest`: of the tool as it is now."""
        found = self._by_tool.get((server, tool))
        if found is None:
            return ""
        if found.choice == "never":
            return "never"
        return "always" if found.digest == digest else "changed"


async def no_decisions(owner: str) -> Sequence[ToolDecision]:
    """Return the decisions of an owner on a server without pages: none."""
    return ()


def may_use(owner: str, server: McpServer) -> bool:
    """Return whether an owner may use a server. The empty owner is that of admins, and of a server without keys."""
    return not owner or server.scope == "infer"
