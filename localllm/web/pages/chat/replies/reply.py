"""A reply that is being written. It belongs to the server; tabs follow it and can return to it.

`Reply` reads a generation's events in a task of its own, and keeps everything that a late or returning follower needs:
reasoning, content and calls. A dropped connection loses nothing. A reply without followers for
`DETACHED_LIMIT_S` is cancelled, so that a forgotten tab does not hold KV blocks for ever.
Does not know: HTTP, templates, how conversations are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Literal

from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.errors import EngineError, LocalLLMError
from localllm.fleet.upstreams import RemoteModel
from localllm.mcp.values import ServerTool
from localllm.serving.answers.generation import Answering, Generation, Progress, parts_of
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.text.answers.whole import ToolCall
from localllm.web.pages.chat.markdown.stream import MarkdownStream, OpenKind, ReadPosition, TextUpdate

log = logging.getLogger(__name__)

BATCH_S = 0.04
"""Least time between two updates of a follower: one browser update for many tokens."""

DETACHED_LIMIT_S = 600.0
"""How long a reply continues without a follower."""


@dataclass(frozen=True, slots=True)
class ReplyUpdate:
    """The part of a reply that a follower has not seen yet: of its reasoning and of its text."""

    body: TextUpdate | None
    thinking: TextUpdate | None
    thinking_turns: bool = False  # reasoning began or ended: its whole block is drawn again


class Reply:
    """One reply, from the request to its last event."""

    def __init__(self, request_id: str, model: str, context_tokens: int) -> None:
        self.request_id, self.model, self.context_tokens = request_id, model, context_tokens
        self.body, self.thinking = MarkdownStream(), MarkdownStream()
        self.calls: list[ToolCall] = []
        self.offered: Mapping[str, ServerTool | None] = {}  # tools by the name that the model uses; None: a typed one
        self.remote: RemoteModel | None = None  # the model of another server that writes it; None: one of this server
        self.tool_notes: tuple[str, ...] = ()  # why tools that the chat has chosen were not offered
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.error: LocalLLMError | None = None
        self._counts = Progress(1, 0, 1)
        self._before = (0.0, 0)  # (seconds, tokens) of reasoning in the reply that this one continues
        self._writes: Literal["", "content", "reasoning", "call"] = ""
        self._thinks_since: float | None = None
        self._thought_s = 0.0
        self._note = ""
        self._version = 0
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._followers = 0
        self._alone_since = time.monotonic()
        self._generation: Generation | None = None
        self._stops = False
        self._task: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The content of the reply, without reasoning."""
        return self.body.text

    @property
    def thinks(self) -> bool:
        return self._thinks_since is not None

    @property
    def thought_s(self) -> float:
        """Seconds of reasoning so far."""
        since = time.monotonic() - self._thinks_since if self._thinks_since is not None else 0.0
        return self._before[0] + self._thought_s + since

    @property
    def reasoning_tokens(self) -> int:
        return self._before[1] + self._counts.reasoning_tokens

    def announce(self, text: str) -> None:
        """Show why there is no text yet, in place of the text."""
        self._note = text
        self._publish()

    async def continue_from(self, text: str, reasoning: str = "", thought_s: float = 0.0, tokens: int = 0) -> None:
        """Begin with the text of an earlier reply."""
        if reasoning:
            await self.thinking.add(reasoning, ends=True)
        self._before = (thought_s, tokens)
        await self.body.add(text)
        self._publish()

    def prepare(self, work: Coroutine[None, None, None]) -> None:
        """Run the work that comes before `start`. A reply that is cancelled meanwhile never starts."""
        self._preparing = asyncio.create_task(work, name=f"prepare {self.request_id}")
        self._preparing.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the reply if its task was cancelled before the request was submitted, or failed."""
        if task.cancelled():
            if not self.done:
                self.finish_reason = "abort"
                self._publish()
        elif (error := task.exception()) is not None:
            log.error("reply failed id=%s", self.request_id, exc_info=error)
            self.fail(EngineError("The reply failed with an internal error.", "The server's log has the details."))

    def start(self, generation: Answering) -> None:
        """Submit the generation and write what it yields; the reply continues with or without followers."""
        self._counts, self._note = generation.progress, ""
        # The answer of another server has no last event after a cancellation: the task that reads it is cancelled.
        self._generation = generation if isinstance(generation, Generation) else None
        self._task = asyncio.create_task(self._run(generation), name=f"reply {self.request_id}")
        self._task.add_done_callback(self._task_ended)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once the engine has finished the request."""
        if self._task is None:
            call()
        else:
            self._task.add_done_callback(lambda _: call())

    def fail(self, error: LocalLLMError) -> None:
        """End the reply before or instead of the engine's last event."""
        self._turn_to("")
        self.error, self.finish_reason = error, "error"
        self._publish()

    def cancel(self) -> None:
        """Ask the engine to stop; the reply ends with its text so far."""
        task = self._task or self._preparing
        if self._generation is not None and self._generation.is_open and not self.done:
            self._generation.cancel()
        elif task is not None and not self.done:
            self._stops = True
            task.cancel()

    async def wait(self) -> None:
        """Wait until the reply is complete; counts as following it."""
        async with self._following():
            while not self.done:
                await self._next_change(self._version)

    async def follow(self) -> AsyncIterator[ReplyUpdate]:
        """Yield everything so far, then updates until the reply is complete."""
        body, thinking, turn = ReadPosition(), ReadPosition(), (False, False)
        async with self._following():
            while True:
                done, version = self.done, self._version
                turned = (bool(self.thinking.text), self.thinks)
                if turned != turn:
                    thinking = ReadPosition()
                progress = ReplyUpdate(
                    self.body.update_for(body),
                    self.thinking.update_for(thinking) if turned[0] else None,
                    turned != turn,
                )
                turn = turned
                if progress.body or progress.thinking:
                    yield progress
                if done:
                    return
                await self._next_change(version)
                await asyncio.sleep(BATCH_S)

    async def _run(self, generation: Answering) -> None:
        try:
            async with generation:
                async for batch in generation.batches():
                    for event in batch:
                        self._counts.count(event)
                        await self._handle_event(event)
                    if not self._followers and time.monotonic() - self._alone_since > DETACHED_LIMIT_S:
                        log.info("reply cancelled id=%s reason=nobody-follows", self.request_id)
                        self.cancel()
            if not self.done:
                self.fail(EngineError("The engine ended the reply without a reason.", hint="Send the message again."))
        except LocalLLMError as error:
            if self._counts.finish_reasons:
                self.usage, self.timings = self._counts.usage(), self._counts.timings
            self.fail(error)
        except asyncio.CancelledError:
            if not self._stops:
                down = EngineError("The server is shutting down.", hint="Start it again, then send the message again.")
                self.fail(down)
            raise
        except Exception:
            log.exception("reply failed id=%s", self.request_id)
            self.fail(EngineError("The reply failed with an internal error.", "The server's log has the details."))

    async def _handle_event(self, event: GenerationEvent) -> None:
        for part in parts_of(event):
            await self._handle_part(part)
        if event.finish_reason is not None:
            self._turn_to("")
            await self.thinking.add("", ends=True)
            await self.body.add("", ends=True)
            self.usage, self.timings = self._counts.usage(), self._counts.timings
            self.finish_reason = event.finish_reason
        self._publish()

    async def _handle_part(self, part: Part) -> None:
        match part:
            case Reasoning(text):
                resumes = self._writes != "reasoning" and self.thinking.text
                self._turn_to("reasoning")
                await self.thinking.add(f"\n\n{_lines(text)}" if resumes else _lines(text))
            case Content(text):
                if self._writes == "reasoning":
                    await self.thinking.add("", ends=True)
                self._turn_to("content")
                await self.body.add(_lines(text))
            case ToolCallStart(_, id, name):
                self._turn_to("call")
                await self.thinking.add("", ends=True)
                await self.body.add("", ends=True)
                self.calls.append(ToolCall(id, name))
            case ToolArguments(index, text):
                self.calls[index].arguments += text

    def _turn_to(self, writes: Literal["", "content", "reasoning", "call"]) -> None:
        """Set what is being written; the reasoning clock runs during reasoning only."""
        if writes == "reasoning" and self._thinks_since is None:
            self._thinks_since = time.monotonic()
        elif writes != "reasoning" and self._thinks_since is not None:
            self._thought_s += time.monotonic() - self._thinks_since
            self._thinks_since = None
        self._writes = writes

    def _publish(self) -> None:
        """Publish the current state to followers; finished blocks and open block change together."""
        self._version += 1
        self.thinking.settle()
        self.body.settle(self._instead_of_open_block())
        if self.done:
            self.ended.set()
        self._changed.set()
        self._changed = asyncio.Event()

    def _instead_of_open_block(self) -> tuple[OpenKind, str, str] | None:
        """Return the replacement of the open block: a note, or the call that is being written."""
        if self.done:
            return None
        if self._writes == "call":
            return "code", self.calls[-1].arguments, self.calls[-1].name
        return ("note", self._note, "") if self._note else None

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


def _lines(text: str) -> str:
    """Return a piece of text with the line ends that Markdown knows."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
