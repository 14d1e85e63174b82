"""MiniMax M3: tags that are named for the arguments, nested where a value is an object or a list.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">
    ]<]minimax[>[<a>text]<]minimax[>[</a>
    ]<]minimax[>[<b>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</b>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The invoke tag and its arguments are one line; here they are broken for width. Every tag begins with a token that no
text contains, so values are written as they are. The tag of a list's values is `item`. An argument that is null is left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localllm.text.answers.formats.arguments import LINE
from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.grammar import (
    CannotForce,
    GrammarBuilder,
    Schema,
    checked_name,
    length_bounds,
    one_or_more,
    plain_properties,
)
from localllm.text.answers.output import PartCollector
from localllm.text.answers.scanner import NotACall, Read, Scanner
from localllm.text.answers.values import dump_string, options_of, resolve, types_of, value_to_json
from localllm.text.structured import StructuredOutputsParams

MAX_DEPTH = 64
_SPACE = "]<]minimax[>["  # before every tag


class MiniMaxM3(ToolFormat):
    name = "minimax-m3"
    openers = (f"{_SPACE}<tool_call>", f'{_SPACE}<invoke name="')
    closers = (f"{_SPACE}</invoke>", f"{_SPACE}</tool_call>")
    tokens = (_SPACE,)

    def read_calls(self, scan: Scanner, output: PartCollector) -> Read[None]:
        """Read one call; a further one in the same tags begins with an opener too."""
        if (yield from scan.accept(self.openers[0])):
            yield from scan.skip_space()
        yield from scan.expect(self.openers[1])
        name = yield from scan.name()
        yield from scan.expect('">')
        schema = output.schema(name)
        yield from scan.skip_space()
        if not (yield from scan.next_of(self.closers[0])) and not (yield from self._next_tag(scan)):
            raise NotACall("it ends before its arguments")
        output.start_call(name)

        def give(text: str) -> None:
            output.arguments(text)
            scan.commit()

        if (yield from self._pass_members(scan, give, self.closers[0], schema, schema, 0, is_list=False)):
            yield from scan.accept_behind_space(self.closers[1])

    def _next_tag(self, scan: Scanner) -> Read[bool]:
        """Return whether a tag comes next that opens a value."""
        if not (yield from scan.next_of(f"{_SPACE}<")):
            return False
        return not (yield from scan.next_of(f"{_SPACE}</"))

    def _pass_members(
        self, scan: Scanner, give: Callable[[str], None], end: str, schema: object, root: Schema, depth: int, *,
        is_list: bool,
    ) -> Read[bool]:  # fmt: skip
        """Pass on the values up to the tag `end` as an object or a list of JSON. Return False if the text or the call
        ends first."""
        give("[" if is_list else "{")
        separator = ""
        while True:
            yield from scan.skip_space()
            if (yield from scan.accept(end)):
                give("]" if is_list else "}")
                return True
            if not (yield from self._next_tag(scan)):
                return False
            scan.at += len(_SPACE) + 1
            key, found = yield from scan.until(">")
            if not found:
                return False
            give(separator + ("" if is_list else f"{dump_string(key)}: "))
            own = _part_of(schema, root, None if is_list else key)
            if not (yield from self._pass_value(scan, give, f"{_SPACE}</{key}>", own, root, depth + 1)):
                return False
            separator = ", "

    def _pass_value(
        self, scan: Scanner, give: Callable[[str], None], end: str, schema: object, root: Schema, depth: int
    ) -> Read[bool]:
        """Pass on a value up to the tag `end`, which is read too. Return False if the text or the call ends first."""
        types = types_of(schema, root)
        if depth > MAX_DEPTH:
            return False
        may_be_list, may_be_object = "array" in types, "object" in types
        is_empty = bool((yield from scan.next_of(end)))
        if not is_empty and (yield from self._next_tag(scan)):
            is_list = may_be_list
            if may_be_list == may_be_object:  # the schema does not tell
                is_list = bool((yield from scan.next_of(f"{_SPACE}<item>")))
            return (yield from self._pass_members(scan, give, end, schema, root, depth, is_list=is_list))
        if is_empty and (may_be_list or may_be_object) and "string" not in types:
            scan.at += len(end)
            give("[]" if may_be_list else "{}")
            return True
        taken: list[str] = []

        def hold(text: str) -> None:
            taken.append(text)
            scan.commit()

        is_text = types == {"string"}
        give('"' if is_text else "")
        yield from scan.give_until((_SPACE,), (lambda text: give(dump_string(text)[1:-1])) if is_text else hold)
        is_whole = bool((yield from scan.accept(end)))
        if is_text:
            give('"' if is_whole else "")
        else:
            give(value_to_json("".join(taken), types) if is_whole else "".join(taken))
        return is_whole

    def write_calls(self, grammar: GrammarBuilder, tools: Mapping[str, Schema], *, parallel: bool) -> str:
        (begin, invoke), (close, end) = (
            [f"{grammar.marker(_SPACE)} {grammar.marker(tag.removeprefix(_SPACE))}" for tag in tags]
            for tags in (self.openers, self.closers)
        )
        calls, line = [], grammar.text(LINE)
        for name, schema in tools.items():
            head = f"{invoke} {grammar.text(f'{checked_name(name)}{chr(34)}>')}"
            calls.append(f"{head} {self._members(grammar, schema, schema)} {close}")
        return f"{begin} {line} {one_or_more(grammar.one_of(calls), parallel=parallel)} {line} {end}"

    def begins_apart(self, grammar: GrammarBuilder, answer: StructuredOutputsParams) -> bool:
        return grammar.has_token(_SPACE) or super().begins_apart(grammar, answer)

    def _members(self, grammar: GrammarBuilder, schema: Schema, root: Schema) -> str:
        """Return the values of an object in the schema's order; values that are not required may be missing."""
        members = []
        for key, value, required in plain_properties(schema):
            one = self._member(grammar, checked_name(key), value, root)
            members.append(one if required else f"{one}?")
        return " ".join(members)

    def _member(self, grammar: GrammarBuilder, key: str, schema: object, root: Schema) -> str:
        """Return a value between its tags."""
        schema = resolve(schema, root)
        types = types_of(schema, root)
        space, end = grammar.marker(_SPACE), grammar.text(f"</{key}>")
        begin = f"{space} {grammar.text(f'<{key}>')}"
        if not isinstance(schema, Mapping) or types not in ({"array"}, {"object"}) or options_of(schema):
            ways = grammar.values_until(_SPACE, schema, root)
            return grammar.rule(begin, grammar.one_of([written for _, written in ways]), end)
        if types == {"object"}:
            if "properties" not in schema:
                raise CannotForce
            return grammar.rule(begin, self._members(grammar, schema, root), space, end)
        least, most = length_bounds(schema)
        item = self._member(grammar, "item", schema.get("items"), root)
        return grammar.rule(begin, f"{item}{{{least},{'' if most is None else most}}}", space, end)


def _part_of(schema: object, root: Schema, key: str | None) -> Any:
    """Return the schema of an object's value, or of a list's values if `key` is None; None: there is none."""
    schema = resolve(schema, root)
    for one in (schema, *(resolve(option, root) for option in options_of(schema))):
        if not isinstance(one, Mapping):
            continue
        if key is None and one.get("items") is not None:
            return one["items"]
        properties = one.get("properties")
        if key is not None and isinstance(properties, Mapping) and key in properties:
            return properties[key]
    return None
