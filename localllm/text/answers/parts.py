"""What a model's answer consists of, in the order in which it was written.

Does not know: markers, formats, how an API says any of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
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


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, neighbours of one kind as one."""
    out: list[Part] = []
    for _, group in groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        first, *others = group
        if others and isinstance(first, Content | Reasoning | ToolArguments):
            text = "".join([first.text, *(part.text for part in others if isinstance(part, type(first)))])
            out.append(replace(first, text=text))
        else:
            out += [first, *others]
    return out
