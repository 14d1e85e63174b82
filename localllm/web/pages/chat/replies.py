"""A reply that is being written: it belongs to the server, tabs follow it and may come back to it.

`Reply` reads the engine's events in a task of its own, cuts them into Markdown blocks, and keeps everything a late
or returning follower needs. A dropped connection loses nothing; a reply that nobody has watched for
`DETACHED_LIMIT_S` is cancelled, so a forgotten tab does not hold KV blocks for ever.
Does not know: HTTP, templates, how conversations are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Literal

from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.errors import EngineError, LocalLLMError
from localllm.web.pages.chat.markdown import BlockSplitter, render_markdown

log = logging.getLogger(__name__)

BATCH_S = 0.04
"""Followers get news at most this often: one browser update for many tokens."""

OpenKind = Literal["text", "code", "note"]
"""Of the block that has not closed. A note says why nothing has been written yet."""

DETACHED_LIMIT_S = 600.0
"""How long a reply goes on with nobody following it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a follower has not seen yet. `restarts`: forget what you had."""

    html: str
    restarts: bool
    open_kind: OpenKind | None = None  # set when the open block must be drawn anew
    open_text: str = ""  # the whole open block, or with open_kind None its new end


class Reply:
    """One reply, from the request to its last event."""

    def __init__(self, request_id: str, model: str, context_tokens: int) -> None:
        self.request_id, self.model, self.context_tokens = request_id, model, context_tokens
        self.text = ""
        self.blocks: list[str] = []  # safe HTML of the blocks that closed
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.error: LocalLLMError | None = None
        self._splitter = BlockSplitter()
        self._open: tuple[OpenKind, str] = ("text", "")
        self._version = 0
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._followers = 0
        self._alone_since = time.monotonic()
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def html(self) -> str:
        return "".join(self.blocks)

    def open_block(self) -> tuple[OpenKind, str]:
        """The block that has not closed: text, the inside of a fenced code block, or a note."""
        return self._open

    def announce(self, text: str) -> None:
        """Say why nothing is written yet, in the place where the text will be."""
        self._wake()
        self._open = ("note", text)

    async def go_on_from(self, text: str) -> None:
        """Begin with what an earlier reply has written."""
        await self._take(GenerationEvent(0, text))

    def prepare(self, work: Coroutine[None, None, None]) -> None:
        """Do what comes before `start`; a reply that is cancelled meanwhile never starts."""
        self._preparing = asyncio.create_task(work, name=f"prepare {self.request_id}")
        self._preparing.add_done_callback(self._prepared)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.finish_reason = "abort"
            self._wake()
        elif (error := task.exception()) is not None:
            log.error("reply failed id=%s", self.request_id, exc_info=error)
            self.fail(EngineError("The reply failed inside the server.", "Its log has the details."))

    def start(self, client: EngineClient, request: GenerationRequest) -> None:
        """Begin; the reply goes on whether or not somebody follows it."""
        self._client = client
        self._task = asyncio.create_task(self._run(client, request), name=f"reply {self.request_id}")

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once the engine has nothing more to do with it."""
        if self._task is None:
            call()
        else:
            self._task.add_done_callback(lambda _: call())

    def fail(self, error: LocalLLMError) -> None:
        """End before or instead of the engine's own last event."""
        self.error, self.finish_reason = error, "error"
        self._wake()

    def cancel(self) -> None:
        """Ask the engine to stop; the reply ends with what it has."""
        if self._client is not None and not self.done:
            self._client.cancel(self.request_id)
        elif self._client is None and self._preparing is not None:
            self._preparing.cancel()

    async def wait(self) -> None:
        """Until the reply is complete; counts as following it."""
        async with self._following():
            while not self.done:
                await self._next_change(self._version)

    async def follow(self) -> AsyncIterator[Progress]:
        """Everything so far, then news until the reply is complete."""
        blocks, kind, chars = 0, "", 0
        first = True
        async with self._following():
            while True:
                done, version = self.done, self._version
                open_kind, open_text = self.open_block()
                html = "".join(self.blocks[blocks:])
                redraw = first or bool(html) or open_kind != kind or len(open_text) < chars
                if redraw:
                    yield Progress(html, first, open_kind, open_text)
                elif len(open_text) > chars:
                    yield Progress("", False, None, open_text[chars:])
                blocks, kind, chars, first = len(self.blocks) if redraw else blocks, open_kind, len(open_text), False
                if done:
                    return
                await self._next_change(version)
                await asyncio.sleep(BATCH_S)

    async def _run(self, client: EngineClient, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(client.generate(request)) as events:
                async for event in events:
                    await self._take(event)
                    self._cancel_if_forgotten()
            if not self.done:
                self.fail(EngineError("The engine ended the reply without saying why.", hint="Send the message again."))
        except LocalLLMError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.fail(EngineError("The server is shutting down.", hint="Start it again, then send the message again."))
            raise
        except Exception:
            log.exception("reply failed id=%s", self.request_id)
            self.fail(EngineError("The reply failed inside the server.", "Its log has the details."))

    async def _take(self, event: GenerationEvent) -> None:
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self.text += text
        closed = self._splitter.push(text)
        if event.finish_reason is not None:
            closed += self._splitter.finish()
        if closed.strip():
            # Rendering a long code block takes tens of milliseconds: other streams go on meanwhile.
            self.blocks.append(await asyncio.to_thread(render_markdown, closed))
        if event.finish_reason is not None:
            self.usage, self.timings, self.error = event.usage, event.timings, event.error
            self.finish_reason = event.finish_reason
        self._wake()

    def _cancel_if_forgotten(self) -> None:
        if not self._followers and time.monotonic() - self._alone_since > DETACHED_LIMIT_S:
            log.info("reply cancelled id=%s reason=nobody-follows", self.request_id)
            self.cancel()

    def _wake(self) -> None:
        """Show followers the state of now; blocks and open block change together."""
        self._version += 1
        self._open = self._splitter.open_block()
        if self.done:
            self.ended.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self, seen_version: int) -> None:
        while self._version == seen_version and not self.done:
            await self._changed.wait()

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[None]:
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            self._alone_since = time.monotonic()
