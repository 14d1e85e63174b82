"""Calls of a tool server and what the tests expect of its refusals."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.mcp.servers import McpServers
from localllm.mcp.values import CallResult, ToolRefused, ToolServerFailed

N = {"n": 1}


def using(server: McpServer, use: Callable[[McpServers], Awaitable[Any]], idle_s: float = 300.0) -> Any:
    """Run `use` with one server, and end it."""

    async def run() -> Any:
        all_servers = McpServers({server.name: server}, idle_s)
        try:
            return await use(all_servers)
        finally:
            await all_servers.close()

    return asyncio.run(run())


async def call(all_servers: McpServers, tool: str, arguments: dict[str, Any], name: str = "") -> CallResult:
    name = name or all_servers.servers[0].name
    found = await all_servers.find_tool(name, tool)
    assert found is not None
    return await all_servers.call(name, tool, found.digest, arguments)


def calling(server: McpServer, tool: str = "tool", arguments: dict[str, Any] = N) -> CallResult:
    result = using(server, lambda each: call(each, tool, arguments))
    assert isinstance(result, CallResult)
    return result


def refusal(server: McpServer, tool: str = "tool", arguments: dict[str, Any] = N) -> ToolServerFailed | ToolRefused:
    with pytest.raises((ToolServerFailed, ToolRefused)) as caught:
        calling(server, tool, arguments)
    return caught.value
