"""The output items of one response as they are generated, and their events.

Does not know: requests, the response around the items, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart
from localllm.web.api.responses import shapes
from localllm.web.api.responses.client_tools import input_of
from localllm.web.api.responses.items import Item, new_id
from localllm.web.api.responses.shapes import OutputText, ReasoningText
from localllm.web.shape import Shape, event_bytes

to_json = msgspec.json.encode
NO_CALLS: Mapping[str, Item] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of one type of item."""

    prefix: str  # prefix of its ids
    delta: Callable[..., Shape]  # the events of its text
    done: Callable[..., Shape]
    fields: Item  # fields beside its text
    part: shapes.TextPart | None = None  # its only part; None for a call, which has arguments instead
    extra: dict[str, list[Any]] = field(default_factory=dict)  # further fields of the events of its text


KINDS = {
    "message": _Kind(
        "msg",
        shapes.ResponseTextDelta,
        shapes.TextDone,
        {"role": "assistant"},
        OutputText("", [], []),
        {"logprobs": []},
    ),
    "reasoning": _Kind("rs", shapes.ReasoningDelta, shapes.ReasoningDone, {"summary": []}, ReasoningText("")),
    "function_call": _Kind("fc", shapes.ArgumentsDelta, shapes.ArgumentsDone, {}),
    "custom_tool_call": _Kind("ctc", shapes.CustomInputDelta, shapes.CustomInputDone, {}),
    "mcp_call": _Kind(
        "mcp",
        shapes.McpArgumentsDelta,
        shapes.McpArgumentsDone,
        {"arguments": "", "approval_request_id": None, "output": None, "error": None},
    ),
}


@dataclass(slots=True)
class _Open:
    """The item that is being generated."""

    item: Item
    place: Item  # the fields that identify it in events
    delta: bytes  # start of a delta event, up to the text
    texts: list[str] = field(default_factory=list)
    status: str = "completed"  # the status that it will end with


class OutputItems:
    def __init__(self, new_id: Callable[[str], str] = new_id, calls: Mapping[str, Item] = NO_CALLS) -> None:
        """`new_id` makes an id from its prefix. `calls`: the model's name of a tool -> the fields of a call's item, for
        tools that are not plain functions.
        """
        self.items: list[Item] = []
        self._calls: list[Item] = []
        self._open: _Open | None = None
        self._new_id, self._kinds_of_calls = new_id, calls
        self._next_number = 0

    def event(self, kind: Callable[..., Shape], **fields: Any) -> bytes:
        return event_bytes(kind(**fields, sequence_number=self._number()))

    def say(self, part: Part) -> bytes:
        """Add a part; return its events."""
        match part:
            case Content(text) if text:
                return self._within("message") + self._delta(text)
            case Reasoning(text) if text:
                return self._within("reasoning") + self._delta(text)
            case ToolCallStart(_, call_id, name):
                call = {"type": "function_call", "name": name, **self._kinds_of_calls.get(name, {})}
                call["input" if call["type"] == "custom_tool_call" else "arguments"] = ""
                return self.close() + self._start(call.pop("type"), call_id=call_id, **call)
            case ToolArguments(_, text):
                return self._delta(text)
            case BrokenCall(int(index)):
                self._break(self._calls[index])
        return b""

    def close(self, *, cut: bool = False) -> bytes:
        """End the open item; return its events. `cut`: the item is incomplete."""
        said, self._open = self._open, None
        if said is None:
            return b""
        item, text, kind = said.item, "".join(said.texts), KINDS[said.item["type"]]
        item["status"] = "incomplete" if cut else said.status
        if item["type"] == "custom_tool_call":  # its text is known once its arguments are complete
            item["input"] = input_of(text)
            written = self.event(kind.delta, **said.place, delta=item["input"])
            written += self.event(kind.done, **said.place, input=item["input"])
        elif kind.part is None:
            item["arguments"] = text
            written = self.event(kind.done, **said.place, arguments=text)
        else:
            part = replace(kind.part, text=text)
            item["content"] = [part]
            written = self.event(kind.done, **said.place, text=text, **kind.extra)
            written += self.event(shapes.PartDone, **said.place, part=part)
        return written + self.event(shapes.ItemDone, output_index=said.place["output_index"], item=item)

    def _within(self, type: str) -> bytes:
        """Return the events that open an item of this type, if none is open."""
        if self._open is not None and self._open.item["type"] == type:
            return b""
        return self.close() + self._start(type, content=[])

    def _start(self, type: str, **fields: Any) -> bytes:
        kind = KINDS[type]
        item = {"id": self._new_id(kind.prefix), "type": type, "status": "in_progress", **kind.fields, **fields}
        index = len(self.items)
        self.items.append(item)
        place: Item = {"item_id": item["id"], "output_index": index}
        written = self.event(shapes.ItemAdded, output_index=index, item=item)
        if kind.part is None:
            self._calls.append(item)
        else:
            place["content_index"] = 0
            written += self.event(shapes.PartAdded, **place, part=kind.part)
        empty = event_bytes(kind.delta(**place, **kind.extra, delta="", sequence_number=0))
        self._open = _Open(item, place, empty.removesuffix(b'"","sequence_number":0}\n\n'))
        return written

    def _delta(self, text: str) -> bytes:
        assert self._open is not None, "an item is open"
        self._open.texts.append(text)
        if self._open.item["type"] == "custom_tool_call":
            return b""
        return self._open.delta + to_json(text) + b',"sequence_number":%d}\n\n' % self._number()

    def _break(self, call: Item) -> None:
        """Mark a call as incomplete because its arguments are not one JSON object. Other items may have followed it."""
        if self._open is not None and self._open.item is call:
            self._open.status = "incomplete"
        else:
            call["status"] = "incomplete"

    def _number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number
