"""Replies that are being written: in memory while they grow, in the store every few seconds and when they end.

A killed server loses what was written in the last `SAVE_S`. A store that cannot be written is tried again until it
can; the reply stays here, and on the page, for so long.
Does not know: HTTP, templates, how a reply is generated (replies.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.web.pages.chat.replies import Reply
from localllm.web.pages.errors import StillWriting
from localllm.web.store import Chats, ChatStore, Message
from localllm.web.store.chats import UNDO_S
from localllm.web.store.records import ChatsUnavailable

log = logging.getLogger(__name__)

SAVE_S = 3.0


@dataclass(slots=True)
class Writing:
    """A reply with its place."""

    owner: str
    chat_id: str
    message: Message
    reply: Reply
    before: Mapping[str, Any] = field(default_factory=dict)  # figures of the reply that this one goes on with
    keeper: asyncio.Task[None] | None = None

    @property
    def now(self) -> Message:
        """The message as it stands."""
        it = self.message
        details = details_of(self.reply, self.before)
        return Message(it.id, it.parent_id, it.role, self.reply.text, details, it.created_s, it.versions)


class Desk:
    """Every reply that the store does not hold to its end yet."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._writings: dict[str, Writing] = {}
        self._taken: set[str] = set()
        self._purges: set[asyncio.Task[None]] = set()

    def of(self, message_id: str) -> Writing | None:
        return self._writings.get(message_id)

    def writing(self, chat_id: str) -> Writing | None:
        """The reply of a chat that has not ended."""
        found = (each for each in self._writings.values() if each.chat_id == chat_id and not each.reply.done)
        return next(found, None)

    def current(self, message: Message) -> Message:
        """As it stands: the store may be seconds behind."""
        writing = self.of(message.id)
        if writing is None:
            return message
        now = writing.now
        return Message(now.id, now.parent_id, now.role, now.text, now.details, now.created_s, message.versions)

    @contextlib.contextmanager
    def turn(self, chat_id: str) -> Iterator[None]:
        """One change of a chat at a time. Raises `StillWriting`."""
        if chat_id in self._taken or self.writing(chat_id) is not None:
            raise StillWriting("A reply is still being written.", hint="Stop it, or wait until it ends.")
        self._taken.add(chat_id)
        try:
            yield
        finally:
            self._taken.discard(chat_id)

    def take(self, writing: Writing) -> None:
        """Keep this reply from now on."""
        self._writings[writing.message.id] = writing
        writing.keeper = asyncio.create_task(self._keep(writing), name=f"keep {writing.message.id}")

    def cancel(self, *, chat_id: str = "", owner: str | None = None) -> None:
        """Stop what is being written in a chat, or for an owner."""
        for writing in self._writings.values():
            if writing.chat_id == chat_id or writing.owner == owner:
                writing.reply.cancel()

    def purge_later(self) -> None:
        """Something was deleted, or had been when the last server ended."""
        task = asyncio.create_task(self._purge())
        self._purges.add(task)
        task.add_done_callback(self._purges.discard)

    async def close(self) -> None:
        """Write down what there is; nothing is kept after this."""
        tasks = [each.keeper for each in self._writings.values() if each.keeper is not None]
        for task in (*tasks, *self._purges):
            task.cancel()
        await asyncio.gather(*tasks, *self._purges, return_exceptions=True)
        for writing in list(self._writings.values()):
            details = writing.now.details
            reason = details["finish_reason"] or "interrupted"
            with contextlib.suppress(ChatsUnavailable):
                await self._store.call(
                    Chats.write, writing.message.id, writing.reply.text, {**details, "finish_reason": reason}
                )
        self._writings.clear()
        await self._store.close()

    async def _keep(self, writing: Writing) -> None:
        reply, saved = writing.reply, ("", "")
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_S):
                    await reply.ended.wait()
            ended, now = reply.done, writing.now
            written = (now.text, reply.thinking.text)
            if ended or written != saved:
                try:
                    await self._store.call(Chats.write, now.id, now.text, now.details)
                    saved = written
                except ChatsUnavailable as error:
                    log.warning("reply not saved yet id=%s error=%s", now.id, error)
                    await asyncio.sleep(SAVE_S)
                    continue
            if ended:
                del self._writings[now.id]
                return

    async def _purge(self) -> None:
        await asyncio.sleep(UNDO_S)
        with contextlib.suppress(ChatsUnavailable):
            await self._store.call(Chats.purge, time.time() - UNDO_S)


def details_of(reply: Reply, before: Mapping[str, Any]) -> dict[str, Any]:
    """What the store keeps beside the text. While the reply grows its finish reason is empty."""
    found: dict[str, Any] = {"model": reply.model, "finish_reason": reply.finish_reason or ""}
    if reply.thinking.text:
        found |= {
            "reasoning": reply.thinking.text,
            "reasoning_s": round(reply.thought_s, 3),
            "reasoning_tokens": reply.reasoning_tokens,
        }
    if reply.calls:
        found["calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in reply.calls]
    if reply.error is not None:
        found["error"] = [reply.error.what, reply.error.why, reply.error.hint]
    usage, timings = reply.usage, reply.timings
    if usage is None:
        return {**before, **found}
    # A reply that goes on has read its own beginning as prompt: to the reader that is still output.
    prompt_tokens = before.get("prompt_tokens", usage.prompt_tokens)
    found |= {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": min(usage.cached_tokens, prompt_tokens),
        "completion_tokens": before.get("completion_tokens", 0) + usage.completion_tokens,
        "context_tokens": reply.context_tokens,
    }
    if timings is not None and usage.completion_tokens:
        found["ttft_s"] = before.get("ttft_s", timings.ttft_s)
        if timings.decode_s > 0 and usage.completion_tokens > 1:
            found["tokens_per_s"] = (usage.completion_tokens - 1) / timings.decode_s
    return found
