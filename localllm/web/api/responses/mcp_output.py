"""The output items of a response whose tools run here: lists of tools, calls with their results, requests for approval.

A call ends in two steps: its arguments while they are generated, its result when it has run. A request for approval is
shown once its arguments are complete.
Does not know: how calls are run, the response around the items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.mcp.values import ServerTool
from localllm.text.answers.parts import Part, ToolCallStart
from localllm.web.api.responses import shapes
from localllm.web.api.responses.items import Item, new_id
from localllm.web.api.responses.mcp_items import arguments_of
from localllm.web.api.responses.mcp_tools import OfferedTool
from localllm.web.api.responses.output import NO_CALLS, OutputItems
from localllm.web.shape import Shape


@dataclass(slots=True)
class _Asking:
    """A call that needs approval, while its arguments are generated."""

    tool: ServerTool
    texts: list[str] = field(default_factory=list)


class McpOutput(OutputItems):
    def __init__(
        self,
        tools: Mapping[str, OfferedTool],
        approval_id: Callable[[ServerTool, str], str],
        calls: Mapping[str, Item] = NO_CALLS,
    ) -> None:
        """`tools`: by the name that the model uses. `approval_id` makes the id of a request for approval of a tool's
        call with these arguments. `calls`: as for `OutputItems`.
        """
        super().__init__(calls=calls)
        self.waiting: list[Item] = []  # calls whose arguments are complete, without a result
        self.asks = False  # a call waits for approval
        self._tools, self._approval_id = tools, approval_id
        self._asking: _Asking | None = None

    def next_round(self) -> list[Item]:
        """Return the calls to run, once the model has ended. Parts of its next reply count their calls anew."""
        waiting, self.waiting, self._calls = self.waiting, [], []
        return waiting

    def say(self, part: Part) -> bytes:
        match part:
            case ToolCallStart(_, _, name) if name in self._tools:
                return self.close() + self._begin(self._tools[name])
        return super().say(part)

    def close(self, *, cut: bool = False) -> bytes:
        asking, self._asking = self._asking, None
        if asking is not None:
            return b"" if cut else self._ask(asking.tool, "".join(asking.texts))
        if self._open is None or self._open.item["type"] != "mcp_call":
            return super().close(cut=cut)
        said, self._open = self._open, None
        said.item["arguments"] = "".join(said.texts)
        written = self.event(shapes.McpArgumentsDone, **said.place, arguments=said.item["arguments"])
        if cut:
            said.item["status"] = "incomplete"
            return written + self._done(said.item)
        self.waiting.append(said.item)
        return written

    def list_tools(self, label: str, tools: list[dict[str, Any]]) -> bytes:
        """Add the list of a server's tools; return its events."""
        item: Item = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}
        written = self._add(item) + self._event_of(shapes.McpListInProgress, item)
        item["tools"] = tools
        return written + self._event_of(shapes.McpListCompleted, item) + self._done(item)

    def approved(self, request: Item) -> bytes:
        """Add the call of an approved request; return its events."""
        label, name = request["server_label"], request["name"]
        written = self._start("mcp_call", server_label=label, name=name, approval_request_id=request["id"])
        return written + self._delta(request["arguments"]) + self.close()

    def finish(self, call: Item) -> bytes:
        """End a call that has its result; return its events."""
        call["status"] = "failed" if call["error"] else "completed"
        kind = shapes.McpCallFailed if call["error"] else shapes.McpCallCompleted
        return self._event_of(kind, call) + self._done(call)

    def unfinished(self) -> list[Item]:
        """Return the calls without a result."""
        return [each for each in self.items if each["type"] == "mcp_call" and each["status"] == "in_progress"]

    def abandon(self, calls: Sequence[Item]) -> bytes:
        """End calls that are not run, because the response ends before; return their events."""
        for call in calls:
            call["status"] = "incomplete"
        return b"".join([self._done(call) for call in calls])

    def _begin(self, offered: OfferedTool) -> bytes:
        if not offered.asks:
            return self._start("mcp_call", server_label=offered.tool.server, name=offered.tool.name)
        self._asking = _Asking(offered.tool)
        self._calls.append({})
        return b""

    def _start(self, type: str, **fields: Any) -> bytes:
        written = super()._start(type, **fields)
        return written + self._event_of(shapes.McpCallInProgress, self.items[-1]) if type == "mcp_call" else written

    def _delta(self, text: str) -> bytes:
        if self._asking is None:
            return super()._delta(text)
        self._asking.texts.append(text)
        return b""

    def _ask(self, tool: ServerTool, arguments: str) -> bytes:
        """Add a request for approval. Arguments that cannot be read are not worth asking about: the call will fail."""
        if arguments_of(arguments) is None:
            written = self._start("mcp_call", server_label=tool.server, name=tool.name)
            return written + self._delta(arguments) + self.close()
        self.asks = True
        item: Item = {"id": self._approval_id(tool, arguments), "type": "mcp_approval_request"}
        item |= {"server_label": tool.server, "name": tool.name, "arguments": arguments}
        return self._add(item) + self._done(item)

    def _add(self, item: Item) -> bytes:
        self.items.append(item)
        return self.event(shapes.ItemAdded, output_index=len(self.items) - 1, item=item)

    def _event_of(self, kind: Callable[..., Shape], item: Item) -> bytes:
        return self.event(kind, item_id=item["id"], output_index=self._index(item))

    def _done(self, item: Item) -> bytes:
        return self.event(shapes.ItemDone, output_index=self._index(item), item=item)

    def _index(self, item: Item) -> int:
        return next(index for index, each in enumerate(self.items) if each is item)
