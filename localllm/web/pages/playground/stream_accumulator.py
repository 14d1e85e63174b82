"""Reassemble a streamed answer from its events: the text so far, and at the end the whole response.

Does not know: HTTP, how a response is shown.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = "[DONE]"


class StreamedAnswer:
    """The events of one choice, with the fields of a response that is not streamed."""

    def __init__(self, tab: str) -> None:
        self.is_chat = tab == "chat"
        self.events: list[str] = []  # as received
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.error = ""  # error message, if the stream ended with one
        self._logprobs: dict[str, list[Any]] = {}
        self._last: dict[str, Any] = {}  # usage and timings

    def add(self, written: bytes) -> None:
        """Add one write of the stream, which may contain several events."""
        for event in written.decode().split("\n\n"):
            if not event.startswith("data: "):
                continue
            self.events.append(event)
            data = event.removeprefix("data: ")
            if data != DONE:
                self._add_chunk(msgspec.json.decode(data))

    def response(self) -> dict[str, Any]:
        """Return the response; complete once all events have arrived."""
        choice: dict[str, Any] = {"finish_reason": self.finish_reason, "logprobs": self._logprobs or None}
        if self.is_chat:
            calls = [{"function": call} for call in self.calls]
            choice["message"] = {"content": self.text, "reasoning_content": self.reasoning, "tool_calls": calls}
        else:
            choice["text"] = self.text
        return {"choices": [choice], **self._last}

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            self.error = error["message"]
        elif not chunk["choices"]:
            self._last = {"usage": chunk["usage"], "timings": chunk["timings"]}
        else:
            self._add_delta(chunk["choices"][0])

    def _add_delta(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {"content": choice.get("text")}
        self.text += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            self._add_call(call["index"], call["function"])
        for name, values in (choice.get("logprobs") or {}).items():
            if values:
                self._logprobs.setdefault(name, []).extend(values)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _add_call(self, index: int, function: dict[str, str]) -> None:
        if index == len(self.calls):
            self.calls.append({"name": function["name"], "arguments": ""})
        self.calls[index]["arguments"] += function["arguments"]
