"""What a model's answer consists of, in the order in which it was written.

Does not know: markers, formats, how an API says any of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the person who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model wrote to itself before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of the tool `name` begins: the `index`-th of this answer, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the arguments of call `index`. All of its pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """What looked like a call and was none. `index` is None where its text, up to the next call, came out as content.

    Otherwise the call had begun: its arguments came out as they stand, and they are not one JSON object.
    """

    index: int | None
    why: str


Part: TypeAlias = Content | Reasoning | ToolCallStart | ToolArguments | BrokenCall


def joined(parts: list[Part]) -> list[Part]:
    """The same parts, neighbours of one kind as one."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolArguments) and isinstance(last, ToolArguments) and part.index == last.index:
            out[-1] = ToolArguments(part.index, last.text + part.text)
        else:
            out.append(part)
    return out
