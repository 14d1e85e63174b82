"""Collects the parts of one answer: checks tool names, tracks the open call, records broken calls.

Does not know: markers, where the text comes from.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart, joined
from localllm.text.answers.scanner import NotACall
from localllm.text.answers.values import parse_json

_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_ALPHANUMERIC = string.ascii_letters + string.digits
_random = random.SystemRandom()


def call_id() -> str:
    return "call_" + "".join(_random.choices(_ALPHANUMERIC, k=24))


def short_call_id() -> str:
    """Return an id of nine characters: Mistral's templates refuse any other."""
    return "".join(_random.choices(_ALPHANUMERIC, k=9))


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's parameters, by tool name."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}


class Enough(Exception):
    """The only allowed call is complete; the rest of the answer is not read."""


class PartCollector:
    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None, new_id: Callable[[], str], *, parallel: bool = True,
        any_name: bool = False,
    ) -> None:  # fmt: skip
        """parallel: if False, the end of the first call raises `Enough`. any_name: a call may have the name of a tool
        that is not among `tools`."""
        self._schemas = None if tools is None else tool_schemas(tools)
        self._any_name = any_name or tools is None
        self._new_id = new_id
        self._parts: list[Part] = []
        self._broken: list[BrokenCall] = []
        self._space = ""  # whitespace since the start or the last call, kept if content follows it
        self._in_content = False
        self._unread = False  # text since the last call looked like a call but was not one
        self._arguments: list[str] | None = None  # of the open call
        self._brackets = None if parallel else _Brackets()
        self.num_calls = 0

    def take(self) -> list[Part]:
        """Return the parts since the last `take`."""
        parts, self._parts = self._parts, []
        return joined(parts)

    def end(self) -> list[Part]:
        if self._space and not self.num_calls:
            self._parts.append(Content(self._space))
        self._close_call()
        self._parts += self._broken
        return self.take()

    def content(self, text: str) -> None:
        if not self._in_content:
            self._space += text
            if not self._space.strip():
                return
            self._close_call()
            text, self._space, self._in_content = self._space, "", True
        self._parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's parameters. Raises `NotACall` if the request has no such tool."""
        if not name:
            raise NotACall("it has no name")
        found = (self._schemas or {}).get(name)
        if found is None and not self._any_name:
            raise NotACall(f"there is no tool named {name!r}")
        return {} if found is None else found

    def begins_name(self, text: str) -> bool:
        """Return whether a call may have a name that begins with `text`."""
        return self._any_name or any(name.startswith(text) for name in self._schemas or ())

    def start_call(self, name: str, id: str | None = None) -> None:
        self.schema(name)
        if self._brackets and self.num_calls:
            raise Enough
        self._close_call()
        self._space, self._in_content, self._unread = "", False, False
        self._parts.append(ToolCallStart(self.num_calls, id or self._new_id(), name))
        self._arguments = []
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        assert self._arguments is not None, "a call is open"
        end = self._brackets.end_in(text) if self._brackets else None
        self._arguments.append(text[:end])
        self._parts.append(ToolArguments(self.num_calls - 1, text[:end]))
        if end is not None:
            raise Enough

    def no_call(self, why: NotACall) -> None:
        """Record text that began with a call's marker but is content.
        Further markers inside it are not recorded again."""
        if not self._unread:
            self._broken.append(BrokenCall(None, str(why)))
        self._unread = True

    def _close_call(self) -> None:
        if self._arguments is None:
            return
        try:
            whole = isinstance(parse_json("".join(self._arguments)), dict)
            why = "" if whole else "its arguments are not a JSON object"
        except (ValueError, RecursionError) as error:
            why = f"its arguments are not JSON: {error}"
        if why:
            self._broken.append(BrokenCall(self.num_calls - 1, why))
        self._arguments = None


class _Brackets:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end_in(self, text: str) -> int | None:
        """Return the index in the next piece at which the object ends, or None."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
