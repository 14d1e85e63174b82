"""A value that a model wrote as plain text or as Python, as JSON: by its schema where there is one, else by its look.

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
    """The JSON types that a schema admits; empty if it does not say. `root`: where its references point into."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return frozenset()
    said = schema.get("type")
    if said is not None:
        return frozenset([said] if isinstance(said, str) else said)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        types = [types_of(option, root) for option in options]
        return frozenset().union(*types) if all(types) else frozenset()
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    return frozenset(_type_name(value) for value in values)


def resolve(schema: object, root: Mapping[str, Any]) -> object:
    """A schema's own words, or those that its reference points to; None if it points nowhere."""
    for _ in range(8):  # a reference to a reference; a circle ends here
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        path = schema["$ref"].removeprefix("#/").split("/")
        schema = root
        for key in path:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def value_to_json(text: str, types: frozenset[str]) -> str:
    """What an argument's text means, as JSON. Text that is of none of the `types` is a string."""
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
    """Python's parser without the numbers that JSON does not have. Raises `ValueError` or `RecursionError`."""
    return json.loads(text, parse_constant=_refuse_constant)


def python_to_json(text: str) -> str:
    """A Python literal as JSON; JSON, and what is neither, stays as it is."""
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
