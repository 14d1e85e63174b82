"""The parts of a model's answer, in the order in which they were written.

Does not know: markers, formats, the APIs' representation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning, written before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a call of the tool `name`: the `index`-th of this answer, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the arguments of call `index`. All its pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Text that looked like a call but was not valid. If `index` is None, the text up to the next call became content.

    Otherwise the call had already started: its arguments were passed on unchanged, and are not one JSON object.
    """

    index: int | None
    why: str


Part: TypeAlias = Content | Reasoning | ToolCallStart | ToolArguments | BrokenCall


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge neighbouring parts of the same kind."""
    out: list[Part] = []
    for _, group in groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        first, *others = group
        if others and isinstance(first, Content | Reasoning | ToolArguments):
            text = "".join([first.text, *(part.text for part in others if isinstance(part, type(first)))])
            out.append(replace(first, text=text))
        else:
            out += [first, *others]
    return out
