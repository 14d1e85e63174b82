"""An OpenAI-compatible server of a few lines, whose manners and timing the tests choose."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Write = Callable[[bytes], Awaitable[None]]
Answer = Callable[[dict[str, Any], Write], Awaitable[None]]


@dataclass
class StubServer:
    """Counts what it sees. `answer` writes one response body's events."""

    answer: Answer
    requests_a_connection: int | None = None  # then it closes one unannounced, with the next request unanswered
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    connections: int = 0
    busy: int = 0
    most_busy: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in count() if self.requests_a_connection is None else range(self.requests_a_connection):
                await self._one(reader, writer)
            await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client is done, or the test is
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        body = await reader.readexactly(length)
        if head.startswith("GET"):
            return await _respond(writer, 200, {"data": [{"id": "stub"}]})
        self.bodies.append(json.loads(body))
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await self._complete(self.bodies[-1], writer)
        finally:
            self.busy -= 1
        if "connection: close" in head.lower():
            raise ConnectionError("as the client asked")

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if asked["max_tokens"] > 1000:
            return await _respond(writer, 400, {"error": {"message": "too many tokens"}})
        if not asked.get("stream"):
            whole = {"choices": [{"text": "x"}], "usage": {"completion_tokens": asked["max_tokens"]}}
            return await _respond(writer, 200, whole)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def write(piece: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

        await self.answer(asked, write)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _respond(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": "x", "finish_reason": finish_reason}])


def usage(asked: dict[str, Any], cached: int = 0) -> bytes:
    return event(
        choices=[],
        usage={
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    )


async def every_token_at_once(asked: dict[str, Any], write: Write) -> None:
    tokens = [token() for _ in range(asked["max_tokens"] - 1)]
    await write(b"".join([*tokens, token("length"), usage(asked), b"data: [DONE]\n\n"]))


@contextmanager
def running(answer: Answer = every_token_at_once, requests_a_connection: int | None = None) -> Iterator[StubServer]:
    """A stub on a free port, in a thread of its own."""
    stub, started, loop = StubServer(answer, requests_a_connection), threading.Event(), asyncio.new_event_loop()

    async def main(stop: asyncio.Event) -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stub.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        open_connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_connections:
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)
        await asyncio.sleep(0)  # closing a transport ends with a callback on the loop
        await asyncio.sleep(0)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main(stop)))
    thread.start()
    started.wait()
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
