"""JSON Schemas of request bodies: the structs that parse them, plus the rules for every other field.

Both are the objects that parse requests: `schema.py` and `fields.py` of a dialect.
Does not know: routes, answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from localllm.web.api.fields import FieldRules, ListOf, OneOf, Refused

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
UNKNOWN = "Fields that are not listed are accepted; the answer's header x-localllm-warning names them."


@dataclass(frozen=True, slots=True)
class Body:
    """A request body with its field rules. `inside`: fields whose objects, or lists of objects, have rules of their
    own.
    """

    kind: type[msgspec.Struct]
    rules: FieldRules | None = None  # None: fields that the struct does not have are refused
    inside: Mapping[str, Body] = field(default_factory=lambda: MappingProxyType({}))
    example: Mapping[str, Any] | None = None


def named(dialect: str, name: str) -> str:
    """Return a component's name; the prefix separates structs of the same name in different dialects."""
    return f"{dialect}.{name}"


def reference(dialect: str, kind: type) -> Schema:
    return {"$ref": REFERENCE.format(name=named(dialect, kind.__name__))}


def struct_schemas(dialect: str, kind: Any) -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of a type, and the components that the schema refers to."""
    [schema], components = msgspec.json.schema_components(
        [kind], ref_template=REFERENCE.format(name=named(dialect, "{name}"))
    )
    return schema, {named(dialect, name): component for name, component in components.items()}


def body_schemas(dialect: str, body: Body) -> dict[str, Schema]:
    """Return the components of a body; the body's own component is named after its struct."""
    components = struct_schemas(dialect, body.kind)[1]
    schema = components[named(dialect, body.kind.__name__)]
    properties: dict[str, Schema] = schema["properties"]
    for name, inner in body.inside.items():
        components |= body_schemas(dialect, inner)
        properties[name] = _pointing(properties[name], reference(dialect, inner.kind))
    if body.rules is not None:
        schema["description"] = " ".join(filter(None, (schema.get("description"), UNKNOWN)))
        _add_rules(properties, body.rules)
    if body.example is not None:
        schema["examples"] = [body.example]
    return components


def _pointing(schema: Any, target: Schema) -> Any:
    """Return the schema with `target` in place of every plain object."""
    if isinstance(schema, list):
        return [_pointing(each, target) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return target if schema == {"type": "object"} else {name: _pointing(each, target) for name, each in schema.items()}


def _add_rules(properties: dict[str, Schema], rules: FieldRules) -> None:
    for name in rules.harmless:
        properties.setdefault(name, {"description": "Accepted; it has no effect."})
    for name, why in rules.late.items():
        properties.setdefault(name, {"description": f"Accepted with a warning; it has no effect: {why}."})
    for name, rule in rules.refused.items():
        schema = _refused(rule)
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema


def _refused(rule: Refused) -> Schema:
    told = {"description": f"Refused with status 400 unless its value has no effect. {rule.why}", "x-refused": True}
    match rule.harmless:
        case OneOf(values):
            return {"enum": [None, *values], **told}
        case ListOf(words):
            return {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": sorted(words)}}], **told}
