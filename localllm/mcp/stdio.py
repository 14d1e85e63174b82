"""A server as a child process: messages over its pipes, one JSON object a line, and the last lines of its errors.

Everything that the server sends is bounded: the length of a line, the number of messages and bytes between two of our
own, the lines of its errors that are kept. A server that breaks a bound is ended. watcher.py ends the server together
with this process.
Does not know: the meaning of a message (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from localllm.config.mcp_servers import McpServer
from localllm.mcp import watcher
from localllm.mcp.values import ToolServerFailed
from localllm.units import format_bytes, format_count

MAX_LINE_BYTES = 4 * 2**20
LONG_LINE_BYTES = 2**18  # parsed in a thread
MAX_BYTES, MAX_MESSAGES = 16 * 2**20, 2_000
"""What a server may send between two messages of ours."""
TAIL_LINES, TAIL_CHARS = 100, 500
END_S, KILL_S = 2.0, 1.0
"""How long a server may take to end once its input is closed, and after SIGTERM."""


class Tail:
    """The last lines that a server wrote to its standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    def add(self, line: bytes) -> None:
        text = "".join(each if each.isprintable() else " " for each in line.decode(errors="replace").rstrip())
        self._lines.append(text if len(text) <= TAIL_CHARS else f"{text[:TAIL_CHARS]}…")

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)


class _Allowance:
    """The messages and bytes that a server may still send before the next message of ours."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._bytes, self._messages = MAX_BYTES, MAX_MESSAGES

    def spend(self, num_bytes: int) -> None:
        self._bytes, self._messages = self._bytes - num_bytes, self._messages - 1
        if self._messages < 0:
            raise ToolServerFailed(f"It sent more than {format_count(MAX_MESSAGES)} messages for one of ours.")
        if self._bytes < 0:
            raise ToolServerFailed(f"It sent more than {format_bytes(MAX_BYTES)} for one message of ours.")


Streams = tuple[
    "anyio.abc.ObjectReceiveStream[SessionMessage | Exception]", "anyio.abc.ObjectSendStream[SessionMessage]"
]


class StdioTransport:
    """The child process of one server, as a transport of the `mcp` package. `failure` tells why it ended by itself."""

    def __init__(self, server: McpServer, tail: Tail) -> None:
        self._server, self._tail = server, tail
        self.failure = ""
        self.ended = anyio.Event()
        self.ends = False  # the server has closed its output, or is about to be ended

    async def __aenter__(self) -> Streams:
        self._context = self._run()
        return await self._context.__aenter__()

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._context.__aexit__(*error)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Streams]:
        process, lifeline = await self._start()
        budget = _Allowance()
        try:
            incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
            async with anyio.create_task_group() as tasks, incoming, read, write, outgoing:
                tasks.start_soon(self._read, process, incoming, budget)
                tasks.start_soon(_write, process, outgoing, budget)
                tasks.start_soon(self._read_errors, process)
                try:
                    yield read, write
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            os.close(lifeline)

    async def _start(self) -> tuple[Process, int]:
        """Return the running watcher, and the end of the lifeline that this process holds."""
        environ = {**get_default_environment(), **self._server.env}
        command: tuple[str, ...] = (self._server.command, *self._server.args)
        if self._server.searxng:  # -P: the folder of the script holds modules that others would find by their names
            script = Path(__file__).with_name("web_search.py")
            command = (sys.executable, "-P", str(script), self._server.searxng)
        program = shutil.which(command[0], path=environ.get("PATH"))
        if program is None:
            hint = "Check the command, or install the program."
            raise ToolServerFailed(f"The program {self._server.command!r} is not on this machine.", hint=hint)
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(Path(watcher.__file__)), str(theirs), program, *command[1:],
                stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environ, pass_fds=(theirs,), start_new_session=True,
                limit=MAX_LINE_BYTES,
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return process, ours

    async def _read(
        self, process: Process, incoming: anyio.abc.ObjectSendStream[SessionMessage | Exception], budget: _Allowance
    ) -> None:
        """Pass messages on until the server closes its output or breaks a bound; then the session sees the end."""
        assert process.stdout is not None
        async with incoming:
            try:
                while line := await process.stdout.readline():
                    budget.spend(len(line))
                    if line.strip():
                        is_long = len(line) >= LONG_LINE_BYTES
                        await incoming.send(
                            await anyio.to_thread.run_sync(_message, line) if is_long else _message(line)
                        )
                self.ends = True
                self.failure = await _how_it_ended(process)
            except ValueError:  # of asyncio, about the length of a line
                self.failure = f"It sent a line of more than {format_bytes(MAX_LINE_BYTES)}."
            except ToolServerFailed as error:
                self.failure = error.what
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the session has ended
            self.ends = True
            self.ended.set()

    async def _read_errors(self, process: Process) -> None:
        assert process.stderr is not None
        begun = b""
        while piece := await process.stderr.read(65_536):
            *lines, begun = (begun + piece).split(b"\n")
            for line in lines[-TAIL_LINES:]:
                self._tail.add(line[: 4 * TAIL_CHARS])
            if len(begun) > 65_536:
                self._tail.add(begun[: 4 * TAIL_CHARS])
                begun = b""
        if begun:
            self._tail.add(begun[: 4 * TAIL_CHARS])


def _message(line: bytes) -> SessionMessage | Exception:
    """Parse a line. A line that is not a message, such as a log line, is passed on as an error, which is ignored.

    Raises `ToolServerFailed` for a message that cannot be read: it may be an answer that is waited for.
    """
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        if b'"jsonrpc"' in line[:LONG_LINE_BYTES]:
            raise ToolServerFailed("It sent a message that cannot be read.") from error
        return error


async def _write(process: Process, outgoing: anyio.abc.ObjectReceiveStream[SessionMessage], budget: _Allowance) -> None:
    assert process.stdin is not None
    async for message in outgoing:
        budget.renew()
        line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        with contextlib.suppress(ConnectionError):  # the reader sees the end as well
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()


async def _how_it_ended(process: Process) -> str:
    """Return how a server that closed its output ended."""
    if not await _wait(process, END_S):
        return "It closed its output."
    status = process.returncode or 0
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"Its process was ended by {signal.Signals(status - 128).name}."
    return f"Its process ended with status {status}."


async def _end(process: Process) -> None:
    """End the server and what it started: close its input, wait, then signal the whole group."""
    assert process.stdin is not None
    process.stdin.close()
    await _wait(process, END_S)
    for number, wait_s in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        await _wait(process, wait_s)
    transport = getattr(process, "_transport", None)  # a process that survived in another group may hold the pipes
    if transport is not None:
        transport.close()


async def _wait(process: Process, seconds: float) -> bool:
    """Wait for the end of the process, whoever holds its pipes: `Process.wait` waits for them too."""
    until = asyncio.get_running_loop().time() + seconds
    while process.returncode is None:
        if asyncio.get_running_loop().time() >= until:
            return False
        await asyncio.sleep(0.01)
    return True
