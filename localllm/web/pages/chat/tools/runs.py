"""Run the calls of a reply, each after consent, and continue the reply with the results.

A call runs if the owner allows the tool, or clicks. Once all calls of a reply have a result, the results are sent as
typed ones are, and the model continues. After MAX_ROUNDS replies in a row about which nobody was asked, the next call
asks although its tool is always allowed.
Does not know: HTTP, templates, the protocol of servers (localllm/mcp/).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from litestar import Litestar

from localllm.errors import InvalidParameter, LocalLLMError
from localllm.mcp.servers import require_mcp
from localllm.mcp.values import McpMissing, bounded, limit_for
from localllm.serving.answers.tool_calls import MAX_CUTS, MAX_ROUNDS, ConsentPolicy, may_use
from localllm.web.pages.chat.replies import turns
from localllm.web.pages.chat.replies.active import ActiveReply, CallRun, Round, server_calls
from localllm.web.pages.chat.replies.messages import awaited_calls, calls_of
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.state import ChatState, chat_state_of
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.frame.state import once_per_app

log = logging.getLogger(__name__)

MAX_KEPT = 200
"""Rounds in memory; of older ones the calls ask again."""
DECISIONS = ("once", "always", "later", "never", "stop")
DECLINED = {
    "later": "The user declined this call this time.",
    "never": "The user does not allow this tool. Do not call it again.",
}
WENT_ON = (
    "The results were not sent.",
    "The chat went on while the call ran.",
    "Send them from the reply's last version.",
)


class ToolRuns:
    """The running calls of all chats."""

    def __init__(self, state: ChatState) -> None:
        self._state = state
        self._automatic: dict[str, int] = {}  # rounds before a reply that nobody was asked about, by its message
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, message_id: str) -> Round | None:
        return self._state.replies.rounds.get(message_id)

    def reply_ended(self, writing: ActiveReply) -> None:
        """Begin with the calls of a finished reply. A reply that was stopped or cut off asks."""
        message = writing.now
        num_before = self._automatic.pop(message.id, 0)
        if writing.reply.finish_reason == "stop" and any(server_calls(message.details)):
            round_ = self._new_round(writing.owner, writing.chat_id, message, num_before)
            round_.starting = True  # before anybody can look at it
            self._spawn(self._begin(round_))

    async def decide(self, owner: str, chat: Chat, message: StoredMessage, number: int, decision: str) -> Round:
        """Apply what the user clicked at a call. Raises `RequestError`."""
        call = self._require(owner, chat, message, number, decision)
        if decision in ("always", "never"):
            consent = (owner, call["server"], call["tool"], call["digest"], decision)
            await self._state.store.call(Chats.set_consent, *consent)
        round_ = self.get(message.id)
        if round_ is None or round_.next_id:  # the messages after it were deleted
            round_ = self._new_round(owner, chat.id, message)
        round_.was_asked, round_.failure = True, None
        run = round_.runs[number]
        if decision == "stop":
            if run.task is not None and run.state == "running":
                run.task.cancel()
            return round_
        calls = server_calls(message.details)
        same = [
            n
            for n, each in enumerate(calls)
            if each and (each["server"], each["tool"]) == (call["server"], call["tool"])
        ]
        for n in [number] if decision in ("once", "later") else same:
            if round_.runs[n].state == "asks":
                self._answer(round_, n, decision)
        await self._advance(round_)
        return round_

    async def until_known(self, message_id: str) -> Round | None:
        """Return the round of a message. A reply that has just ended is saved first."""
        writing = self._state.replies.get(message_id)
        if writing is not None and writing.save_task is not None:
            await asyncio.wait({writing.save_task})
        return self.get(message_id)

    async def until_chat_rests(self, message_id: str) -> None:
        """Wait until a reply ends, its calls that need no consent have run, and the replies to them have ended."""
        while message_id:
            writing = self._state.replies.get(message_id)
            if writing is not None:
                await writing.reply.wait()
            round_ = await self.until_known(message_id)
            if round_ is None:
                return
            await self.until_done(round_)
            message_id = round_.next_id

    async def until_done(self, round_: Round) -> None:
        while round_.busy:
            await round_.next_change(round_.version)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Rounds -----------------------------------------------------------------------------------------------------

    def _require(self, owner: str, chat: Chat, message: StoredMessage, number: int, decision: str) -> Mapping[str, Any]:
        calls = server_calls(message.details)
        call = calls[number] if 0 <= number < len(calls) else None
        if decision not in DECISIONS or call is None:
            raise InvalidParameter("This reply has no such call.", hint="Reload the page.")
        if chat.leaf != message.id:
            raise InvalidParameter("The chat has gone on after this call.", hint="Regenerate the reply.")
        server = self._state.mcp.find(call["server"])
        if server is None or not server.enabled:
            raise InvalidParameter(f"The server {call['server']} is not there any more.", hint="Type the result.")
        if not may_use(owner, server):
            why = f"The tools of {server.name} are for keys with the scope admin."
            raise InvalidParameter("Your key may not use this tool.", why, "Type the result.")
        return call

    def _new_round(self, owner: str, chat_id: str, message: StoredMessage, num_before: int = 0) -> Round:
        rounds = self._state.replies.rounds
        for old in [key for key, each in rounds.items() if not each.busy][: max(0, len(rounds) + 1 - MAX_KEPT)]:
            del rounds[old]
        rounds[message.id] = Round(owner, chat_id, message, num_before)
        return rounds[message.id]

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin(self, round_: Round) -> None:
        """Look up the consents, and run what is allowed."""
        try:
            consents = ConsentPolicy(await self._state.store.call(Chats.consents, round_.owner))
            for number, call in enumerate(server_calls(round_.message.details)):
                choice = consents.choice(call["server"], call["tool"], call["digest"]) if call is not None else ""
                if choice == "changed":
                    round_.runs[number].note = "The tool has changed since you allowed it."
                elif choice == "always" and round_.num_before >= MAX_ROUNDS:
                    round_.runs[number].note = f"{MAX_ROUNDS} replies in a row have called tools by themselves."
                elif choice:
                    self._answer(round_, number, choice)
        except LocalLLMError as error:
            log.warning("consents not read chat=%s error=%s", round_.chat_id, error)
        finally:
            round_.starting = False
            round_.change()
        await self._advance(round_)

    def _answer(self, round_: Round, number: int, decision: str) -> None:
        run = round_.runs[number]
        run.note = ""
        if decision in DECLINED:
            run.state, run.text = "done", DECLINED[decision]
        else:
            run.state = "running"
            run.task = self._spawn(self._run(round_, number, run))
        round_.change()

    async def _run(self, round_: Round, number: int, run: CallRun) -> None:
        """Run one call. A failure is a result as well: the model and the user read what happened."""
        call = server_calls(round_.message.details)[number]
        assert call is not None
        arguments = calls_of(round_.message.details)[number].arguments_object() or {}
        try:
            outcome = await self._state.mcp.outcome(call["server"], call["tool"], call["digest"], arguments)
        except asyncio.CancelledError:
            run.state, run.note = "asks", "You stopped this call."
            round_.change()
            raise
        text = f"Error: {outcome.text}" if outcome.fails == "tool" else outcome.text
        run.text = bounded(text, limit_for(round_.message.details.get("context_tokens", 0)))
        run.state = "done"
        round_.change()
        await self._advance(round_)

    async def _advance(self, round_: Round) -> None:
        """Send the results once every call has one."""
        state, done = self._state, all(run.state == "done" for run in round_.runs.values())
        typed = set(awaited_calls(round_.message.details)) - round_.runs.keys()
        if not done or typed or round_.starting or round_.next_id:
            return
        round_.starting = True
        try:
            chat = await state.store.call(Chats.get, round_.owner, round_.chat_id)
            if chat.leaf != round_.message.id:
                round_.failure = WENT_ON
                return
            turn = await self._sent(round_, chat)
            self._automatic[turn.writing.message.id] = 0 if round_.was_asked else round_.num_before + 1
            round_.next_id = turn.writing.message.id
        except LocalLLMError as error:
            round_.failure = (error.what, error.why, error.hint)
        finally:
            round_.starting = False
            round_.change()

    async def _sent(self, round_: Round, chat: Chat) -> turns.Turn:
        """Send the results; those that do not fit into the context are cut to half their length, a few times."""
        for _ in range(MAX_CUTS):
            try:
                return await turns.send_results(self._state, round_.owner, chat, round_.message, {})
            except ChatFull:
                for run in round_.runs.values():
                    run.text = bounded(run.text, len(run.text) // 2)
        return await turns.send_results(self._state, round_.owner, chat, round_.message, {})


def tool_runs_of(app: Litestar) -> ToolRuns:
    """Return the application's running calls, made at first use."""
    return once_per_app(app, "tool_runs", lambda: ToolRuns(chat_state_of(app)))


async def open_tools(app: Litestar) -> None:
    """Begin with the calls of each reply that finishes from now on. Say what to install if servers cannot be used."""
    if chat_state_of(app).mcp.servers:
        try:
            require_mcp()
        except McpMissing as error:
            log.warning("%s Install it with: %s", error, error.hint)
    state = chat_state_of(app)
    state.replies.when_ended = tool_runs_of(app).reply_ended
    app.state["tool_decisions"] = lambda owner: state.store.call(Chats.consents, owner)


async def close_tools(app: Litestar) -> None:
    """Stop the running calls."""
    await tool_runs_of(app).close()
