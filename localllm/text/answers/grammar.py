"""Grammars that force a tool call, in llguidance's Lark dialect, so that its arguments parse and fit their schema.

A marker that is a token of the vocabulary is required as that token, `<[151657]>`: text cannot express special tokens.
Does not know: any specific format, whether llguidance supports a schema (it reports that when it compiles the grammar).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import InvalidParameter
from localllm.text.answers.values import options_of, parse_json, resolve, types_of, value_to_json, values_of
from localllm.text.structured import MAX_CHARACTERS
from localllm.text.tokenizer import Tokenizer

Schema = Mapping[str, Any]

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$comment", "strict"})
_PLAIN_OBJECT = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_AS_TEMPLATES_PRINT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT, _NO_TEXT = frozenset({"string"}), frozenset[str]()
_NAME = re.compile(r"[\w.:/-]+")


class CannotForce(Exception):
    """No grammar guarantees that its texts are parsed as calls that fit their schema."""


class GrammarBuilder:
    """Rules of a grammar, added as needed. The methods return expressions for use in other rules."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._num_characters = 0  # total length of the rules

    def with_start(self, expression: str) -> str:
        return "\n".join([f"start: {expression}", *self._rules]) + "\n"

    def has_token(self, text: str) -> bool:
        return self._tokenizer is not None and self._tokenizer.token_id(text) is not None

    def marker(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def text(self, text: str) -> str:
        return dumps(text)

    def rule(self, *parts: str) -> str:
        """Add a rule and return its name. Raises `InvalidParameter` if the grammar becomes too long.

        Each value repeats its schema's definitions, and each optional value may be followed by all others.
        """
        name = f"r{len(self._rules)}"
        self._num_characters += sum(map(len, parts))
        if self._num_characters > MAX_CHARACTERS:
            raise InvalidParameter(
                "The schemas of these tools are too long for a grammar.",
                f"They would take more than {MAX_CHARACTERS:,} characters.",
                "Use tool_choice auto without a response format, or fewer tools, properties and definitions.",
                param="tools",
            )
        self._rules.append(f"{name}: {' '.join(parts)}")
        return name

    def one_of(self, options: Sequence[str]) -> str:
        if not options:
            raise CannotForce
        return self.rule(" | ".join(options))

    def json(self, schema: Schema) -> str:
        return self.rule(f"%json {dumps({**schema, 'x-guidance': _AS_TEMPLATES_PRINT})}")

    def text_until(self, end: str) -> str:
        """Return any text without the marker `end`, followed by the marker."""
        name, pieces = f"t{len(self._rules)}", self._pieces(end)
        if pieces == [self.text(end)]:
            self._rules.append(f"{name}[suffix={pieces[0]}]: /(?s:.*)/")
            return name
        before = (
            "" if pieces[0].startswith("<") else json.loads(pieces.pop(0))
        )  # only a token ends a terminal for certain
        terminal = name.upper()
        body = f"(?s:.*){regex_escape(before)}"
        self._rules.append(f"{terminal}: /{body}/ & ~/(?s:.*){regex_escape(end)}(?s:.*)/")
        return self.rule(terminal, *pieces)

    def arguments(self, schema: Schema) -> str:
        """Return a JSON object. Unless the schema allows unnamed properties, they are forbidden."""
        closed = "properties" in schema and schema.keys() <= _PLAIN_OBJECT and "additionalProperties" not in schema
        return self.json({**schema, "type": "object", **({"additionalProperties": False} if closed else {})})

    def values_until(
        self, end: str, schema: object, root: Schema, space: str = "", *, typed: bool = False
    ) -> list[tuple[bool, str]]:
        """Return the ways to write a value for `value_to_json`, followed by the marker `end`, each with whether it is
        text. Raises `CannotForce` if the value cannot be forced.

        A string is written as text, any other value as JSON. `typed`: the format states before the value which of both
        it is. `space` is required before `end`, unless any text is allowed.
        """
        schema = resolve(schema, root)
        if not isinstance(schema, Mapping):
            raise CannotForce
        types, values = types_of(schema, root), values_of(schema)
        if values is not None:
            kinds = [(_TEXT if isinstance(value, str) else _NO_TEXT) if typed else types for value in values]
            texts = [(kind, _plain(value, kind, end)) for value, kind in zip(values, kinds, strict=True)]
            ways = [(kind == _TEXT, self.text(text)) for kind, text in texts if text is not None]
        elif types and "string" not in types:
            ways = [(False, self.json(with_definitions(schema, root)))]
        elif _admits_text(schema, types, root):
            return [(True, self.text_until(end))]
        else:
            raise CannotForce
        return [(is_text, f"{value} {self.text(space)} {self.marker(end)}") for is_text, value in ways]

    def list_of(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the parts in order with the separator between them; parts that are not required may be missing."""
        rest, may_end = "", True  # what may follow, each with a leading separator; whether it may be empty
        first = ""
        for part, required in reversed(parts):
            follows = self.rule(part, f"({rest}){'?' if may_end else ''}" if rest else "")
            first = f"{follows} | {first}" if first and not required else follows
            rest = f"{separator} {follows} | {rest}" if rest and not required else f"{separator} {follows}"
            may_end = may_end and not required
        if not first:
            return ""
        return f"({first})?" if may_end else f"({first})"

    def _pieces(self, text: str) -> list[str]:
        """Split a marker into expressions: its tokens and the text between them."""
        if self._tokenizer is None:
            return [self.text(text)]
        token_id = self._tokenizer.token_id(text)
        if token_id is not None:
            return [f"<[{token_id}]>"]
        pieces = []
        for token_id in self._tokenizer.encode(text, add_special_tokens=False):
            if token_id in self._tokenizer.added_ids:
                before, _, text = text.partition(self._tokenizer.token_text(token_id))
                pieces += [self.text(before)] * bool(before) + [f"<[{token_id}]>"]
        return pieces + [self.text(text)] * bool(text)


def one_or_more(call: str, *, parallel: bool, between: str = "\n") -> str:
    """Return one call or, if `parallel`, one or more, by default on separate lines."""
    return f"{call} ({dumps(between)} {call})*" if parallel else call


def require_only(schema: Schema, *keys: str) -> None:
    """Raise `CannotForce` if a schema has any other key."""
    if not schema.keys() <= _NOTES | set(keys):
        raise CannotForce


def length_bounds(schema: Schema) -> tuple[int, int | None]:
    """Return the least and the most items of an array schema without other constraints; None: any number.
    Raises `CannotForce` for others, and if no list or only an empty one fits."""
    require_only(schema, "type", "items", "minItems", "maxItems")
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(least, int) or not isinstance(most, int | None) or most == 0:
        raise CannotForce
    if not 0 <= least <= (least if most is None else most):
        raise CannotForce
    return least, most


def plain_properties(schema: Schema) -> list[tuple[str, object, bool]]:
    """Return (name, schema, required) of each property, for an object schema without other constraints.
    Raises `CannotForce` for others."""
    if not schema.keys() <= _PLAIN_OBJECT:
        raise CannotForce
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise CannotForce
    if not all(isinstance(name, str) and name in properties for name in required):
        raise CannotForce
    return [(name, value, name in required) for name, value in properties.items()]


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a schema that stands alone, with the definitions that its references may need. Raises `CannotForce`."""
    references = re.findall(r'"\$ref": "([^"]*)"', dumps(schema))
    if not all(path.startswith(("#/$defs/", "#/definitions/")) for path in references):
        raise CannotForce
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


def checked_name(name: str) -> str:
    """Return a name that `Scanner.name` can parse. Raises `CannotForce` for others."""
    if not _NAME.fullmatch(name):
        raise CannotForce
    return name


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def regex_escape(text: str) -> str:
    return re.sub(r"[.*+?()\[\]{}|^$\\/]", r"\\\g<0>", text)


def _plain(value: object, types: frozenset[str], stop: str) -> str | None:
    """Return the text that is parsed as `value`; None if there is none."""
    for text in (value if isinstance(value, str) else dumps(value), dumps(value)):
        if stop not in text and text == text.strip("\n") and parse_json(value_to_json(text, types)) == value:
            return text
    return None


def _admits_text(schema: Schema, types: frozenset[str], root: Schema) -> bool:
    """Return whether any text is parsed as a value that fits: the schema has only types, and none with conditions."""
    options: list[object] = [schema]
    if schema.keys() <= _NOTES | {"anyOf", "oneOf"}:
        options = [resolve(option, root) for option in options_of(schema)] or options
    only_types = all(isinstance(option, Mapping) and option.keys() <= _NOTES | {"type"} for option in options)
    return only_types and types <= _SCALARS and not {"integer", "number"} <= types  # one number may fit both
