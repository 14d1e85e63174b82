"""The calls of one reply to tools of servers: which ask, which run, what they returned. In memory only: after a restart
each call asks again.

Does not know: how a call is run (tool_runs.py), templates, where messages are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.mcp.values import ServerTool
from localllm.text.answers.whole import ToolCall
from localllm.web.pages.chat.store import StoredMessage

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


def stored_call(call: ToolCall, offered: Mapping[str, ServerTool]) -> dict[str, str]:
    """Return a call as it is stored: with its server, the tool's name there and the digest of what was offered."""
    found = {"id": call.id, "name": call.name, "arguments": call.arguments}
    tool = offered.get(call.name)
    if tool is not None and call.arguments_object() is not None:
        found |= {"server": tool.server, "tool": tool.name, "digest": tool.digest}
    return found
