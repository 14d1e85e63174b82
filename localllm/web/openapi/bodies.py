"""What a request may hold, as JSON Schema: the structs that read it, and what becomes of every other field.

Both come from where requests are read with them, `schema.py` and `fields.py` of a dialect.
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
UNKNOWN = "A field that is not listed is accepted; the header x-localllm-warning of the answer names it."


@dataclass(frozen=True, slots=True)
class Body:
    """An object that is read with rules. `inside`: fields with objects, or lists of them, that are read likewise."""

    kind: type[msgspec.Struct]
    rules: FieldRules | None = None  # None: a field that the struct does not know is refused
    inside: Mapping[str, Body] = field(default_factory=lambda: MappingProxyType({}))
    example: Mapping[str, Any] | None = None


def named(dialect: str, name: str) -> str:
    """How components are called: dialects have structs of the same name."""
    return f"{dialect}.{name}"


def reference(dialect: str, kind: type) -> Schema:
    return {"$ref": REFERENCE.format(name=named(dialect, kind.__name__))}


def struct_schemas(dialect: str, kind: Any) -> tuple[Schema, dict[str, Schema]]:
    """The schema of a type, and the components that it refers to."""
    [schema], components = msgspec.json.schema_components(
        [kind], ref_template=REFERENCE.format(name=named(dialect, "{name}"))
    )
    return schema, {named(dialect, name): component for name, component in components.items()}


def body_schemas(dialect: str, body: Body) -> dict[str, Schema]:
    """The components of a body; its own goes by its struct's name."""
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
    """The same with `target` where any object may stand."""
    if isinstance(schema, list):
        return [_pointing(each, target) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return target if schema == {"type": "object"} else {name: _pointing(each, target) for name, each in schema.items()}


def _add_rules(properties: dict[str, Schema], rules: FieldRules) -> None:
    for name in rules.harmless:
        properties.setdefault(name, {"description": "Accepted; it changes nothing."})
    for name, why in rules.late.items():
        properties.setdefault(name, {"description": f"Accepted with a warning; it has no effect: {why}."})
    for name, rule in rules.refused.items():
        schema = _refused(rule)
        properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema


def _refused(rule: Refused) -> Schema:
    told = {"description": f"Refused with status 400 unless it asks for nothing. {rule.why}", "x-refused": True}
    match rule.harmless:
        case OneOf(values):
            return {"enum": [None, *values], **told}
        case ListOf(words):
            return {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": sorted(words)}}], **told}
