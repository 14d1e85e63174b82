"""Converts a value that a model wrote as plain text or Python to JSON, by its schema or, without one, by its form.

Does not know: formats, calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
_PYTHON_TOKEN = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>\b(?:True|False|None)\b)|(?P<bracket>[()])"""
    r"""|(?P<comma>,(?=\s*[\]})]))""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_PYTHON = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not say.
    `root`: the schema that references point into."""
    schema = resolve(schema, root)
    options = options_of(schema)
    if not options:
        return _own_types(schema)
    types = [_own_types(resolve(option, root)) for option in options]
    return frozenset().union(*types) if all(types) else frozenset()


def options_of(schema: object) -> list[Any]:
    """Return the alternative schemas of a schema; empty if it has none."""
    options = (schema.get("anyOf") or schema.get("oneOf")) if isinstance(schema, Mapping) else None
    return options if isinstance(options, list) else []


def values_of(schema: object) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if not isinstance(schema, Mapping) or not ("enum" in schema or "const" in schema):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return values if isinstance(values, list) else None


def resolve(schema: object, root: Mapping[str, Any]) -> object:
    """Return the schema, or the target of its reference; None if the target does not exist."""
    for _ in range(8):  # a reference to a reference; the limit ends cycles
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        path = schema["$ref"].removeprefix("#/").split("/")
        schema = root
        for key in path:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def value_to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON value of an argument's text. Text that fits none of the `types` is a string."""
    if types == {"string"}:
        return dump_string(text)
    value = text.strip()
    if value[:1] in ("[", "{") or value in _PYTHON:
        value = python_to_json(value)
    try:
        parsed = parse_json(value)
    except (ValueError, RecursionError):
        return dump_string(text)
    if isinstance(parsed, str) or ("string" in types and not _is_one_of(parsed, types)):
        return dump_string(text)
    return value


def parse_json(text: str) -> Any:
    """Parse JSON strictly: Python's parser without its extra number names. Raises `ValueError` or `RecursionError`."""
    return json.loads(text, parse_constant=_refuse_constant)


def python_to_json(text: str) -> str:
    """Convert a Python literal to JSON. JSON, and text that is neither, is unchanged."""
    return _PYTHON_TOKEN.sub(_token_to_json, text)


def dump_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token_to_json(match: re.Match[str]) -> str:
    token = match.group()
    if match.lastgroup != "string":
        return _PYTHON[token]
    try:
        if token[0] == '"':
            json.loads(token)
            return token
    except ValueError:
        pass
    unescaped = _ESCAPE.sub(_unescape, token[1:-1])
    return dump_string(unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _unescape(match: re.Match[str]) -> str:
    escape = match.group()
    if len(escape) > 2:
        code = int(escape[2:], 16)
        return chr(code) if code < 0x110000 else escape
    return _ESCAPED.get(escape[1], escape)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _own_types(schema: object) -> frozenset[str]:
    said = schema.get("type") if isinstance(schema, Mapping) else None
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    if not names:
        names = [_type_name(value) for value in values_of(schema) or []]
    return frozenset(name for name in names if isinstance(name, str))


def _type_name(value: object) -> str:
    if isinstance(value, str):
        return "string"
    return next(name for name, kind in _JSON_TYPES.items() if isinstance(value, kind))


def _is_one_of(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _JSON_TYPES[name]) for name in types if name in _JSON_TYPES)
