"""One running server: its session, which lives in a task of its own, the list of its tools, and single calls.

For a server at a URL the HTTP client has bounds: the `mcp` package bounds events, not whole answers.

Does not know: which servers there are, who may call a tool, chats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from localllm.config.mcp_servers import McpServer
from localllm.mcp import schemas
from localllm.mcp.stdio import MAX_BYTES, MAX_LINE_BYTES, StdioTransport, Tail
from localllm.mcp.values import CallResult, Listing, ServerTool, ToolRefused, ToolServerFailed, text_of
from localllm.units import format_bytes, format_count, format_seconds
from localllm.version import __version__

CONNECT_S = 30.0


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, which ends with an error once it is too long."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit_bytes: int) -> None:
        self._stream, self._left, self._limit_bytes = stream, limit_bytes, limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._left -= len(piece)
            if self._left < 0:
                raise httpx2.ReadError(f"The answer is longer than {format_bytes(self._limit_bytes)}.")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def bounded_client(headers: Mapping[str, str], limit_bytes: int, timeout_s: float) -> httpx2.AsyncClient:
    """Return a client with the user's headers, whose answers have at most `limit_bytes`. It reads no proxy and no
    credentials from the environment.
    """

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("The answer is compressed, which was not asked for.", request=response.request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, limit_bytes)

    timeout = httpx2.Timeout(CONNECT_S, read=timeout_s)
    own = {"Accept-Encoding": "identity", **headers}
    return httpx2.AsyncClient(headers=own, timeout=timeout, event_hooks={"response": [bound]}, trust_env=False)


log = logging.getLogger(__name__)

START_S = 60.0
"""Least time for a start: a first start may download the server."""
LIST_S = 30.0
CLOSE_S = 10.0
"""How long the end of a session may take: a server at a URL is told, and may not answer."""
MAX_TOOLS, MAX_PAGES = 128, 16
MAX_NAME_CHARS, MAX_DESCRIPTION_CHARS = 128, 4_000
MAX_ERROR_CHARS = 500


class ToolServerConnection:
    """A server that was started. It ends with `close`, or by itself; then `failure` tells why."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.failure: ToolServerFailed | None = None
        self.tail = Tail()
        self.calls = 0  # running at the moment
        self.tools_changed = True  # the list has to be read again
        self._client: Client | None = None
        self._transport: StdioTransport | None = None
        self._closing = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self._task is not None and self._task.done()

    async def open(self) -> None:
        """Start the server. Raises `ToolServerFailed`."""
        self._task = asyncio.create_task(self._run(), name=f"mcp {self.server.name}")
        ready = asyncio.create_task(self._ready.wait())
        start_s = max(START_S, self.server.timeout_s)
        try:
            await asyncio.wait({self._task, ready}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                failure = self._failed(f"It did not answer within {format_seconds(start_s)}.")
                raise failure
        except BaseException:
            await self.close()
            raise
        finally:
            ready.cancel()

    async def close(self) -> None:
        """End the server and wait until it is gone."""
        self._closing.set()
        if self._task is not None and not self._task.done():
            if self._ready.is_set():
                await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def list_tools(self) -> Listing:
        """Return the tools of the server now. Raises `ToolServerFailed`."""
        self.tools_changed = False
        found: dict[str, ServerTool] = {}
        refused: list[str] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._within(LIST_S, "the list of its tools", self._session.list_tools(params=params))
            await asyncio.to_thread(self._take_all, page.tools, found, refused)
            cursor = page.next_cursor
            if cursor is None or len(found) > MAX_TOOLS:
                break
        else:
            refused.append(f"its list has more than {MAX_PAGES} pages")
        if len(found) > MAX_TOOLS:
            refused.append(f"it offers more than {MAX_TOOLS} tools; the first {MAX_TOOLS} are used")
        return Listing(tuple(found.values())[:MAX_TOOLS], tuple(refused[:MAX_TOOLS]))

    async def call(self, tool: ServerTool, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool. Raises `ToolRefused` for arguments that do not fit, and `ToolServerFailed`."""
        if wrong := await asyncio.to_thread(schemas.wrong_argument, arguments, tool.schema):
            raise ToolRefused(f"The arguments do not fit the schema of {tool.name}.", f"{wrong}.")
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool.name, arguments=dict(arguments)))
        asked = self._session.send_request(request, types.CallToolResult, self.server.timeout_s + LIST_S)
        self.calls += 1
        try:
            result = await self._within(self.server.timeout_s, f"the call of {tool.name}", asked)
        finally:
            self.calls -= 1
        return CallResult(text_of(result.content, result.structured_content), result.is_error)

    def _take_all(self, tools: Sequence[types.Tool], found: dict[str, ServerTool], refused: list[str]) -> None:
        """Take the tools of a page, up to one more than is allowed. Blocking: schemas are checked."""
        for tool in tools:
            if len(found) <= MAX_TOOLS and len(refused) <= MAX_TOOLS:
                self._take(tool, found, refused)

    def _take(self, tool: types.Tool, found: dict[str, ServerTool], refused: list[str]) -> None:
        name = tool.name
        is_name = name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS
        why = schemas.refusal(tool.input_schema) if is_name else "its name is too long, empty or not printable"
        if why or name in found:
            refused.append(f"{name[:MAX_NAME_CHARS]!r} is left out: {why or 'another tool has the same name'}")
            return
        said = "".join(each for each in tool.description or "" if each.isprintable() or each == "\n")
        if len(said) > MAX_DESCRIPTION_CHARS:
            refused.append(f"the description of {name!r} is cut: it has {format_count(len(said))} characters")
        found[name] = ServerTool(
            self.server.name, name, said[:MAX_DESCRIPTION_CHARS], tool.input_schema, self.server.origin
        )

    @property
    def _session(self) -> ClientSession:
        if self._client is None or self.ended:
            raise self.failure or ToolServerFailed(f"{self.server.name} is not running.")
        return self._client.session

    async def _within(self, seconds: float, what: str, asked: Any) -> Any:
        """Wait for an answer, but not longer than the server runs. Raises `ToolServerFailed`."""
        assert self._task is not None
        answer = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({answer, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if not self._task.done():
                raise ToolServerFailed(
                    f"{self.server.name} did not answer {what} within {format_seconds(seconds)}.",
                    hint="Try again, or set a longer timeout_s for this server.",
                )
        except MCPError as error:
            if not await self._has_ended():
                why = _line(error.message)
                raise ToolServerFailed(f"{self.server.name} refused {what}.", why) from error
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            why = f"It does not follow the protocol: {_line('.'.join(map(str, first['loc'])))}: {_line(first['msg'])}."
            raise ToolServerFailed(f"The answer of {self.server.name} to {what} cannot be read.", why) from error
        except ToolServerFailed:
            raise
        except Exception as error:
            log.warning("mcp request failed server=%s error=%r", self.server.name, type(error).__name__)
            if not await self._has_ended():
                raise ToolServerFailed(f"{self.server.name} failed during {what}.", _line(str(error))) from error
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        raise self.failure or ToolServerFailed(f"{self.server.name} ended during {what}.")

    async def _has_ended(self) -> bool:
        """Return whether an error came from the end of the server, whose reason is known a moment later."""
        if self._transport is None or not self._transport.ends:
            return self.ended
        assert self._task is not None
        await asyncio.wait({self._task})
        return True

    async def _run(self) -> None:
        """Hold the session, from start to end: its cancel scopes belong to one task."""
        try:
            async with self._streams() as transport, self._opened(transport) as client:
                self._client = client
                self._ready.set()
                log.info("mcp server started name=%s", self.server.name)
                await self._until_end()
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        except BaseException as error:
            self._failed(*_reason(error))
        finally:
            if self.failure is None and self._transport is not None and self._transport.failure:
                self._failed(self._transport.failure)
            log.info("mcp server ended name=%s", self.server.name)

    async def _until_end(self) -> None:
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._closing.wait())]
        if self._transport is not None:
            waits.append(asyncio.create_task(self._transport.ended.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        if not self.server.url:
            self._transport = StdioTransport(self.server, self.tail)
            yield self._transport
            return
        async with bounded_client(self.server.headers, MAX_BYTES, max(START_S, self.server.timeout_s)) as http_client:
            yield streamable_http_client(self.server.url, http_client=http_client, max_sse_event_size=MAX_LINE_BYTES)

    @asynccontextmanager
    async def _opened(self, transport: Any) -> AsyncIterator[Client]:
        info = types.Implementation(name="localllm", version=__version__)
        start_s = max(START_S, self.server.timeout_s)
        async with Client(
            transport, cache=None, client_info=info, read_timeout_seconds=start_s, message_handler=self._on_message
        ) as client:
            yield client

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.tools_changed = True

    def _failed(self, why: str, hint: str = "Test the server in Settings, Tools.") -> ToolServerFailed:
        """Return the first reason for which the server ended, and keep it."""
        if self.failure is None:
            why = (self._transport.failure if self._transport is not None else "") or why
            what = "ended" if self._ready.is_set() else "did not start"
            last = f" The last line of its errors: {self.tail.lines[-1]}" if self.tail.lines else ""
            self.failure = ToolServerFailed(f"{self.server.name} {what}.", f"{why}{last}", hint)
            log.warning("mcp server failed name=%s reason=%r", self.server.name, why)
        return self.failure


def _reason(error: BaseException) -> tuple[str, ...]:
    """Return the first cause of a group of errors as a line, and what to do about it if that is known."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolServerFailed):
        return (error.what, error.hint) if error.hint else (error.what,)
    return (_line(str(error)) or f"{type(error).__name__}.",)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}…"


def quiet() -> None:
    """Keep the package's own log lines out of the log: they hold messages of servers, which may be prompts."""
    for name in ("mcp", "mcp.client", "httpx2"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
