"""All servers of tools that the user added: each is started when its tools are first needed, runs as one process or
one HTTP session, and is ended when it is idle, when it is changed, and at shutdown.

A server that failed to start is not tried again for a while, so that each message does not wait for it anew.
Does not know: the protocol (connection.py), who may use which server, chats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from localllm.config.mcp_servers import McpServer
from localllm.errors import LocalLLMError
from localllm.machine.install_kind import how_to_install
from localllm.mcp.values import CallResult, Listing, McpMissing, ServerTool, ToolOutcome, ToolRefused, ToolServerFailed

if TYPE_CHECKING:
    from localllm.mcp.connection import ToolServerConnection

log = logging.getLogger(__name__)

IDLE_S = 300.0
RETRY_S = 60.0
LISTED_S = 30.0
"""How long a list of tools is used before it is read again; a server may also say that it has changed."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server as a page shows it."""

    server: McpServer
    state: Literal["disabled", "not started", "starting", "running", "failed"]
    failure: ToolServerFailed | None = None
    listing: Listing | None = None  # of the last start; None: it was not started yet
    tail: tuple[str, ...] = ()  # the last lines of its standard error


@dataclass(slots=True)
class _Slot:
    """A server, with the connection to it if it runs."""

    server: McpServer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: ToolServerConnection | None = None
    listing: Listing | None = None
    listed_s: float = 0.0
    used_s: float = 0.0
    failure: ToolServerFailed | None = None
    failed_s: float = 0.0
    tail: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.connection is not None and not self.connection.ended


def require_mcp() -> None:
    """Raise `McpMissing` unless the package `mcp` is installed."""
    if find_spec("mcp") is None:
        raise McpMissing(
            "Tools of MCP servers need the package mcp.", "It is not installed.", how_to_install("localllm[mcp]")
        )


class McpServers:
    """The servers by name. All methods belong to one event loop."""

    def __init__(self, servers: Mapping[str, McpServer], idle_s: float = IDLE_S) -> None:
        self._slots = {name: _Slot(server) for name, server in servers.items()}
        self._idle_s = idle_s
        self._ends_idle: asyncio.Task[None] | None = None

    @property
    def servers(self) -> tuple[McpServer, ...]:
        return tuple(slot.server for slot in self._slots.values())

    def find(self, name: str) -> McpServer | None:
        slot = self._slots.get(name)
        return slot.server if slot is not None else None

    def state(self, name: str) -> ServerState:
        slot = self._slots[name]
        connection = slot.connection
        tail = connection.tail.lines if connection is not None else slot.tail
        failure = slot.failure
        if connection is not None and connection.ended:
            failure = connection.failure
        if not slot.server.enabled:
            return ServerState(slot.server, "disabled", None, slot.listing, tail)
        if slot.is_running:
            return ServerState(slot.server, "running", None, slot.listing, tail)
        if slot.lock.locked():
            return ServerState(slot.server, "starting", None, slot.listing, tail)
        return ServerState(slot.server, "failed" if failure else "not started", failure, slot.listing, tail)

    async def put(self, server: McpServer) -> None:
        """Add a server, or replace the one of this name, which ends."""
        await self.stop(server.name)
        self._slots[server.name] = _Slot(server)

    async def remove(self, name: str) -> None:
        await self.stop(name)
        self._slots.pop(name, None)

    async def tools(self, name: str, *, again: bool = False) -> Listing:
        """Return the tools of a server, which is started if it does not run. `again`: try a server that failed a
        moment ago, and read the list anew. Raises `ToolServerFailed`, `McpMissing`.
        """
        slot = self._slot(name)
        if again:
            slot.failed_s = 0.0
        connection = await self._started(slot)
        is_old = time.monotonic() - slot.listed_s > LISTED_S
        if again or is_old or connection.tools_changed or slot.listing is None:
            async with slot.lock:
                slot.listing = await self._noting(slot, connection.list_tools())
                slot.listed_s = time.monotonic()
        return slot.listing

    async def call(self, server: str, tool_name: str, digest: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool. Raises `ToolRefused` if it is gone or is not the one with this digest, and
        `ToolServerFailed`.
        """
        tool = await self.find_tool(server, tool_name)
        if tool is None:
            raise ToolRefused(f"{server} no longer offers the tool {tool_name}.", hint="Send the message again.")
        if tool.digest != digest:
            why = "Its description or its schema is not what it was when the model called it."
            raise ToolRefused(f"The tool {tool_name} of {server} has changed.", why, "Regenerate the reply.")
        slot = self._slot(server)
        connection = await self._started(slot)
        try:
            result: CallResult = await self._noting(slot, connection.call(tool, arguments))
        finally:
            slot.used_s = time.monotonic()
        return result

    async def outcome(self, server: str, tool_name: str, digest: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call a tool as `call` does, but return a failure as text."""
        try:
            found = await self.call(server, tool_name, digest, arguments)
        except LocalLLMError as error:
            log.info("tool failed server=%s tool=%s code=%s", server, tool_name, error.code)
            return ToolOutcome(f"The call failed. {error}", "call")
        except Exception:
            log.exception("call failed server=%s", server)
            return ToolOutcome("The call failed with an internal error. The server's log has the details.", "call")
        log.info("tool called server=%s tool=%s characters=%d", server, tool_name, len(found.text))
        return ToolOutcome(found.text.strip() or "(empty)", "tool" if found.is_error else "")

    async def find_tool(self, server: str, name: str) -> ServerTool | None:
        """Return a tool as the server offers it now. Raises as `tools` does."""
        return (await self.tools(server)).find(name)

    async def stop(self, name: str) -> None:
        """End a server if it runs."""
        slot = self._slots.get(name)
        if slot is not None and slot.connection is not None:
            connection, slot.connection = slot.connection, None
            await connection.close()
            slot.tail, slot.failure = connection.tail.lines, None

    async def close(self) -> None:
        """End all servers, at shutdown."""
        if self._ends_idle is not None:
            self._ends_idle.cancel()
        await asyncio.gather(*(self.stop(name) for name in self._slots), return_exceptions=True)

    def _slot(self, name: str) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            raise ToolServerFailed(f"There is no server of tools named {name}.", hint="Open Settings, Tools.")
        if not slot.server.enabled:
            raise ToolServerFailed(f"The server {name} is disabled.", hint="Enable it in Settings, Tools.")
        return slot

    async def _started(self, slot: _Slot) -> ToolServerConnection:
        async with slot.lock:
            slot.used_s = time.monotonic()
            if slot.connection is not None and not slot.connection.ended:
                return slot.connection
            if slot.failure is not None and time.monotonic() - slot.failed_s < RETRY_S:
                raise slot.failure
            connection = (await asyncio.to_thread(_connection_type))(slot.server)
            slot.listing, slot.listed_s = None, 0.0
            try:
                await connection.open()
            except ToolServerFailed as failure:
                slot.failure, slot.failed_s, slot.tail = failure, time.monotonic(), connection.tail.lines
                raise
            if self._slots.get(slot.server.name) is not slot:  # removed or replaced meanwhile
                await connection.close()
                raise ToolServerFailed(f"The server {slot.server.name} was changed.", hint="Try again.")
            slot.connection, slot.failure = connection, None
            if self._ends_idle is None:
                self._ends_idle = asyncio.create_task(self._end_idle(), name="mcp idle")
            return connection

    async def _noting(self, slot: _Slot, asked: Any) -> Any:
        """Await an answer; remember why it failed."""
        try:
            return await asked
        except ToolServerFailed:
            if slot.connection is not None and slot.connection.ended:
                slot.failure = slot.connection.failure
                slot.tail = slot.connection.tail.lines
            raise

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / 4)
            for name, slot in list(self._slots.items()):
                idle_s = time.monotonic() - slot.used_s
                if slot.connection is not None and not slot.connection.calls and idle_s > self._idle_s:
                    await self.stop(name)


def _connection_type() -> type[ToolServerConnection]:
    """Import the client, which takes a second. Blocking. Raises `McpMissing`."""
    require_mcp()
    try:
        from localllm.mcp.connection import ToolServerConnection, quiet
    except ImportError as error:
        how = how_to_install("localllm[mcp]")
        raise McpMissing("Tools of MCP servers need the package mcp, version 2 or newer.", f"{error}.", how) from error
    quiet()
    return ToolServerConnection
