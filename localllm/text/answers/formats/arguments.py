"""Arguments written one by one between tags: a string as plain text, any other value as JSON.

The tool's schema decides what a value means, or its form if there is no schema. If the schema allows only a string, the
value is passed on as it arrives.
Does not know: the tags of any specific format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localllm.text.answers.grammar import GrammarBuilder, Schema, checked_name, plain_properties
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import dump_string, types_of, value_to_json

LINE = "\n"


def pairs_rule(
    grammar: GrammarBuilder,
    schema: Schema,
    end: str,
    pair: Callable[[str, str, bool], str],
    *,
    space: str = "",
    typed: bool = False,
) -> str:
    """Return the arguments in the schema's order; arguments that are not required may be missing.

    `pair`: takes an argument's name, the expression of its value with the marker `end`, and whether the value is text.
    """
    pairs = []
    for key, value, required in plain_properties(schema):
        ways = grammar.values_until(end, value, schema, space, typed=typed)
        one = grammar.one_of([pair(checked_name(key), written, is_text) for is_text, written in ways])
        pairs.append(one if required else f"{one}?")
    return " ".join(pairs)


class TaggedArguments:
    """Converts one call's tagged arguments to JSON.
    The call starts with the first argument, or at the end if there is none."""

    def __init__(self, scan: Scanner, output: PartCollector, name: str) -> None:
        self._scan, self._output, self._name = scan, output, name
        self._schema = output.schema(name)
        self._begun = False

    def read(self, key: str, *ends: str, types: frozenset[str] | None = None) -> Read[bool]:
        """Read one value up to the marker that ends it. Return False if none comes.
        `types`: overrides the schema's types."""
        self._begin()
        self._give(f"{dump_string(key)}: ")
        if types is None:
            properties = self._schema.get("properties")
            schema: Any = properties.get(key) if isinstance(properties, Mapping) else None
            types = types_of(schema, self._schema)
        if types == {"string"}:
            self._give('"')
            end = yield from self._scan.give_until(ends, lambda text: self._give(dump_string(text)[1:-1]))
            self._scan.at += len(end)
            self._give('"' if end else "")
        else:
            taken: list[str] = []

            def hold(text: str) -> None:
                taken.append(text)
                self._scan.commit()

            end = yield from self._scan.give_until(ends, hold)
            self._scan.at += len(end)
            self._give(value_to_json("".join(taken), types) if end else "".join(taken))
        return bool(end)

    def end(self) -> None:
        if not self._begun:
            self._output.start_call(self._name)
            self._output.arguments("{")
        self._give("}")

    def end_without_marker(self, *closers: str) -> Read[None]:
        """End the call after its last argument:
        at a closer, at text that is not part of the call, or at the end of the text."""
        if (yield from self._scan.accept(*closers)):
            self.end()
        elif not self._begun:
            raise NotACall("it ends before its arguments")
        elif (yield from self._scan.peek()):
            self._scan.rewind()
            self.end()

    def _begin(self) -> None:
        if self._begun:
            self._output.arguments(", ")
        else:
            self._output.start_call(self._name)
            self._output.arguments("{")
        self._begun = True

    def _give(self, text: str) -> None:
        if text:
            self._output.arguments(text)
        self._scan.commit()
