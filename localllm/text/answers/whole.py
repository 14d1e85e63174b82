"""A complete answer: the sum of its parts.

Does not know: where the parts come from, the APIs' representation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""  # JSON

    def arguments_object(self) -> dict[str, Any] | None:
        """Return the arguments as an object;
        None if they are not one: the answer was cut off, or the model made an error."""
        try:
            read = msgspec.json.decode(self.arguments)
        except (ValueError, RecursionError):
            return None
        return read if isinstance(read, dict) else None


class Whole(Protocol):
    """A container to which parts can be added."""

    text: str  # content
    reasoning: str
    calls: list[ToolCall]


@dataclass(slots=True)
class ParsedAnswer:
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def add_up(whole: Whole, parts: Iterable[Part]) -> None:
    for part in parts:
        match part:
            case Content(text):
                whole.text += text
            case Reasoning(text):
                whole.reasoning += text
            case ToolCallStart(_, id, name):
                whole.calls.append(ToolCall(id, name))
            case ToolArguments(index, text):
                whole.calls[index].arguments += text
            case BrokenCall(index, why):
                log.info("broken tool call index=%s why=%r", index, why)
