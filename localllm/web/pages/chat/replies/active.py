"""Replies that are being written: in memory while they grow, saved every few seconds and at their end.

If the server is killed, at most the last `SAVE_S` seconds are lost. If the store cannot be written, saving is retried;
until it succeeds, the reply stays in memory and on the page. A round is the calls of one reply to tools of servers:
which ask for consent, which run, and what they returned. After a restart each call asks again.
Does not know: HTTP, templates, how a reply is generated (reply.py), how a call is run (tools/runs.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localllm.engine.stats import generation_rate
from localllm.mcp.values import ServerTool
from localllm.text.answers.whole import ToolCall
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.replies.reply import Reply
from localllm.web.pages.chat.store import Chats, ChatStore, StoredMessage
from localllm.web.pages.chat.store.chats import UNDO_S
from localllm.web.pages.chat.store.records import ChatsUnavailable
from localllm.web.pages.frame.errors import StillWriting

CallState = Literal["asks", "running", "done"]


@dataclass(slots=True)
class CallRun:
    """One call of a reply."""

    state: CallState = "asks"
    text: str = ""  # the result, once it is done
    note: str = ""  # why it asks again
    task: asyncio.Task[None] | None = None


class Round:
    """The calls of one reply. `runs` has the calls to servers, by their number in the reply."""

    def __init__(self, owner: str, chat_id: str, message: StoredMessage, num_before: int = 0) -> None:
        self.owner, self.chat_id, self.message = owner, chat_id, message
        self.num_before = num_before  # rounds before this one that nobody was asked about
        self.runs = {number: CallRun() for number, call in enumerate(server_calls(message.details)) if call}
        self.was_asked = False  # the user decided about one of the calls
        self.starting = False  # consents are being looked up, or the results are being sent
        self.next_id = ""  # the message of the reply to the results
        self.failure: tuple[str, str, str] | None = None  # why the results could not be sent
        self.version = 0
        self._changed = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Return whether it will change by itself."""
        return self.starting or any(run.state == "running" for run in self.runs.values())

    def change(self) -> None:
        """Tell those who follow the round that it has changed."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def next_change(self, seen_version: int) -> None:
        while self.version == seen_version and self.busy:
            await self._changed.wait()

    def shown(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Return the details of the message with the present state of its calls. Results that were sent are in the next
        message.
        """
        if self.next_id:
            return dict(details)
        calls = [dict(call) for call in details.get("calls", [])]
        for number, run in self.runs.items():
            calls[number] |= {"state": run.state, "note": run.note}
            if run.state == "done":
                calls[number]["result"] = run.text
        found = {**details, "calls": calls, "calls_busy": self.busy}
        return found | ({"calls_failure": self.failure} if self.failure else {})


def server_calls(details: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """Return each call of a reply that goes to a server; None for one whose result is typed."""
    return [call if call.get("server") else None for call in details.get("calls", [])]


def stored_call(call: ToolCall, offered: Mapping[str, ServerTool | None]) -> dict[str, Any]:
    """Return a call as it is stored: with its server, the tool's name there and the digest of what was offered."""
    found: dict[str, Any] = {"id": call.id, "name": call.name, "arguments": call.arguments}
    tool = offered.get(call.name)
    if call.name not in offered:
        found["not_offered"] = True
    elif tool is not None and call.arguments_object() is not None:
        found |= {"server": tool.server, "tool": tool.name, "digest": tool.digest}
    return found


log = logging.getLogger(__name__)

SAVE_S = 3.0


@dataclass(slots=True)
class ActiveReply:
    """A reply, with its chat and message."""

    owner: str
    chat_id: str
    message: StoredMessage
    reply: Reply
    before: Mapping[str, Any] = field(default_factory=dict)  # statistics of the reply that this one continues
    save_task: asyncio.Task[None] | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)  # details that the reply does not change

    @property
    def now(self) -> StoredMessage:
        """The message in its current state."""
        it = self.message
        details = {**self.kept, **details_of(self.reply, self.before)}
        return StoredMessage(it.id, it.parent_id, it.role, self.reply.text, details, it.created_s, it.versions)


class ActiveReplies:
    """Every reply that is not completely saved yet."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store
        self._writings: dict[str, ActiveReply] = {}
        self._taken: set[str] = set()
        self._purges: set[asyncio.Task[None]] = set()
        self.rounds: dict[str, Round] = {}  # calls to servers of tools, by the message that makes them
        self.when_ended: Callable[[ActiveReply], None] = lambda writing: None  # called once a reply is saved

    def get(self, message_id: str) -> ActiveReply | None:
        return self._writings.get(message_id)

    @property
    def is_writing(self) -> bool:
        """Return whether any reply is being written."""
        return any(not each.reply.done for each in self._writings.values())

    def writing_chats(self, owner: str) -> list[str]:
        """Return the ids of an owner's chats in which a reply is being written."""
        return sorted({each.chat_id for each in self._writings.values() if each.owner == owner and not each.reply.done})

    def unfinished(self, chat_id: str) -> list[ActiveReply]:
        """Return the unfinished replies of a chat: one, or both of a comparison."""
        return [each for each in self._writings.values() if each.chat_id == chat_id and not each.reply.done]

    def current(self, message: StoredMessage) -> StoredMessage:
        """Return the message in its current state, with that of its calls; the store may be seconds behind."""
        writing, round_ = self.get(message.id), self.rounds.get(message.id)
        if writing is not None:
            return replace(writing.now, versions=message.versions)
        return message if round_ is None else replace(message, details=round_.shown(message.details))

    def is_changing(self, chat_id: str) -> bool:
        """Return whether messages of a chat are being added or changed at this moment."""
        return chat_id in self._taken

    @contextlib.contextmanager
    def lock(self, chat_id: str, *, beside: str = "") -> Iterator[None]:
        """Allow only one change of a chat at a time, and none while a reply is being written. `beside`: the message of
        a reply that may continue meanwhile. Raises `StillWriting`.
        """
        if chat_id in self._taken or any(each.message.id != beside for each in self.unfinished(chat_id)):
            raise StillWriting("A reply is still being written.", hint="Stop it, or wait until it ends.")
        self._taken.add(chat_id)
        try:
            yield
        finally:
            self._taken.discard(chat_id)

    def add(self, writing: ActiveReply) -> None:
        """Save this reply from now on."""
        self._writings[writing.message.id] = writing
        writing.save_task = asyncio.create_task(self._save_while_growing(writing), name=f"save {writing.message.id}")

    def cancel(self, *, chat_id: str = "", owner: str | None = None) -> None:
        """Stop the replies of a chat, or of an owner."""
        for writing in self._writings.values():
            if writing.chat_id == chat_id or writing.owner == owner:
                writing.reply.cancel()

    def stop(self, owner: str, chat_id: str) -> bool:
        """Stop the owner's replies in a chat; return whether there are any. The store is not used, so a locked one
        blocks nothing.
        """
        found = [each for each in self.unfinished(chat_id) if each.owner == owner]
        for writing in found:
            writing.reply.cancel()
        return bool(found)

    def purge_later(self) -> None:
        """Schedule a purge, because something was deleted now or before the last shutdown."""
        task = asyncio.create_task(self._purge())
        self._purges.add(task)
        task.add_done_callback(self._purges.discard)

    async def close(self) -> None:
        """Save everything; nothing is saved after this."""
        tasks = [each.save_task for each in self._writings.values() if each.save_task is not None]
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

    async def _save_while_growing(self, writing: ActiveReply) -> None:
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
                self.when_ended(writing)
                return

    async def _purge(self) -> None:
        await asyncio.sleep(UNDO_S)
        with contextlib.suppress(ChatsUnavailable):
            await self._store.call(Chats.purge, time.time() - UNDO_S)


def details_of(reply: Reply, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details stored beside the text. While the reply grows its finish reason is empty."""
    found: dict[str, Any] = {"model": reply.model, "finish_reason": reply.finish_reason or ""}
    if "edited" in before:
        found["edited"] = True
    if reply.remote is not None:
        found["server"] = reply.remote.answered_by
    if reply.thinking.text:
        found |= {
            "reasoning": reply.thinking.text,
            "reasoning_s": round(reply.thought_s, 3),
            "reasoning_tokens": reply.reasoning_tokens,
        }
    if reply.calls:
        found["calls"] = [stored_call(call, reply.offered) for call in reply.calls]
    if reply.tool_notes:
        found["tool_notes"] = list(reply.tool_notes)
    if reply.error is not None:
        found["error"] = [reply.error.what, reply.error.why, reply.error.hint]
    if isinstance(reply.error, ChatFull):
        found |= {"full_tokens": reply.error.used_tokens, "context_tokens": reply.error.context_tokens}
    usage, timings = reply.usage, reply.timings
    if usage is None:
        return {**before, **found}
    # A continued reply has its own beginning in the prompt; for the reader that is still output.
    prompt_tokens = before.get("prompt_tokens", usage.prompt_tokens)
    found |= {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": min(usage.cached_tokens, prompt_tokens),
        "completion_tokens": before.get("completion_tokens", 0) + usage.completion_tokens,
        "context_tokens": reply.context_tokens,
    }
    if usage.drafts.checked or "drafted_tokens" in before:
        found["drafted_tokens"] = before.get("drafted_tokens", 0) + usage.drafts.checked
        found["accepted_tokens"] = before.get("accepted_tokens", 0) + usage.drafts.accepted
    if timings is not None and usage.completion_tokens:
        found["ttft_s"] = before.get("ttft_s", timings.ttft_s)
        if (rate := generation_rate(usage.completion_tokens, timings.decode_s)) is not None:
            found["tokens_per_s"] = rate
    return found
