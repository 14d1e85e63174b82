"""Bounds of the schema that a server sends for a tool, and the check of a call's arguments against it.

A schema comes from another program, so it may be huge, refer to other addresses, or hold a regular expression that
takes for ever. Patterns are not checked here (the server checks them), and references outside the schema are refused.
Does not know: the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localllm.units import format_count

MAX_SCHEMA_CHARS = 32_768
MAX_DEPTH = 24
MAX_REFERENCES = 2_000
UNCHECKED = frozenset({"pattern", "patternProperties", "propertyNames", "format", "$schema"})
"""Keywords that are left out of the check. Regular expressions of others could keep this process busy for ever."""
_NAMED = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose keys are names, not keywords."""
_DATA = frozenset({"const", "enum", "default", "examples"})


def refusal(schema: object) -> str:
    """Return why a schema cannot be used; empty: it can."""
    if not isinstance(schema, dict):
        return "its schema is not an object"
    if schema.get("type", "object") != "object":
        return f"its schema is of type {str(schema['type'])[:40]!r}; arguments are an object"
    if (depth := _depth(schema)) > MAX_DEPTH:
        return f"its schema is nested deeper than {MAX_DEPTH} levels ({depth})"
    length = len(json.dumps(schema))
    if length > MAX_SCHEMA_CHARS:
        return f"its schema has {format_count(length)} characters; at most {format_count(MAX_SCHEMA_CHARS)} are allowed"
    if outside := _outside(schema):
        return f"its schema refers to {outside[:80]!r}, outside the schema"
    return _invalid(schema)


def wrong_argument(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a call; empty: they fit. Needs the package `jsonschema`, which `mcp`
    brings along.
    """
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_validator(schema).iter_errors(arguments))
    except (Unresolvable, RecursionError, _TooManyReferences) as wrong:
        return f"the schema cannot be applied ({type(wrong).__name__.strip('_')})"
    if error is None:
        return ""
    where = ".".join(map(str, error.absolute_path))
    return f"{where + ': ' if where else ''}{error.message[:300]}"


def _validator(schema: Mapping[str, Any]) -> Any:
    """Return a validator that follows at most MAX_REFERENCES references, all of them inside the schema: references to
    references can double the work with each level.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    left = iter(range(MAX_REFERENCES))

    def counted(keyword: str) -> Callable[..., Iterator[Any]]:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            if next(left, None) is None:
                raise _TooManyReferences
            yield from Draft202012Validator.VALIDATORS[keyword](validator, value, instance, schema) or ()

        return check

    kind = extend(Draft202012Validator, {keyword: counted(keyword) for keyword in ("$ref", "$dynamicRef")})
    return kind(checkable(schema), registry=Registry())


class _TooManyReferences(Exception):
    """The check of the arguments would follow too many references."""


def checkable(schema: Any) -> Any:
    """Return the schema without the keywords that are not checked."""
    if isinstance(schema, list):
        return [checkable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: checkable(each) for name, each in value.items()}
        elif key not in UNCHECKED:
            found[key] = value if key in _DATA else checkable(value)
    return found


def _depth(value: Any) -> int:
    """Return the nesting, without recursion; counting ends one level above the bound."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [inner for each in level for inner in _inside(each)]
        depth += 1
    return depth


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _outside(schema: Any) -> str:
    """Return the first reference to elsewhere."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            for key in ("$ref", "$dynamicRef", "$id"):
                target = each.get(key)
                if isinstance(target, str) and not target.startswith("#"):
                    return target
        left += _inside(each)
    return ""


def _invalid(schema: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(checkable(schema))
    except (SchemaError, RecursionError) as error:
        return f"its schema is not a JSON schema ({str(getattr(error, 'message', error))[:120]})"
    return ""
