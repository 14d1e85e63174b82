"""The several ways in which clients ask for structured output, as one: `StructuredOutputsParams`.

    response_format      OpenAI: {"type": "json_schema", "json_schema": {"schema": ...}}, json_object, text;
                         vLLM: structural_tag, with the tag's fields beside the type
    structured_outputs   vLLM: json, json_object, regex, choice, grammar, structural_tag
    guided_*             vLLM, until 0.12
    grammar, json_schema llama.cpp
Does not know: how any of it is kept to.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localllm.errors import InvalidParameter
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.openai.schema import GenerateBody
from localllm.web.errors import InvalidType, MissingParameter

ALONE = {
    "guided_json": "json", "guided_json_object": "json_object", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "structural_tag": "structural_tag", "grammar": "grammar", "json_schema": "json",
}  # fmt: skip
"""Fields that each set one kind of structured output."""


def structured_outputs(body: GenerateBody) -> StructuredOutputsParams | None:
    """Return the requested structured output. Raises `RequestError` if a request combines two of the ways, or one is
    invalid.
    """
    ways = {
        name: _alone(name, value, body) for name in ALONE if (value := getattr(body, name)) not in (None, False, "")
    }
    if body.response_format is not None and (asked := _response_format(body.response_format)) is not None:
        ways["response_format"] = asked
    if body.structured_outputs is not None:
        fields = msgspec.structs.asdict(body.structured_outputs)
        if asked := {name: value for name, value in fields.items() if value is not None}:
            ways["structured_outputs"] = asked
    if len(ways) > 1:
        first, second, *_ = ways
        raise InvalidParameter(f"{first} and {second} cannot be combined.", "Send only one of the two.", param=second)
    return next((StructuredOutputsParams(**asked, param=name) for name, asked in ways.items()), None)


def _alone(name: str, value: Any, body: GenerateBody) -> dict[str, Any]:
    pattern = {"whitespace_pattern": body.guided_whitespace_pattern} if body.guided_whitespace_pattern else {}
    return {ALONE[name]: value, **pattern}


def _response_format(asked: dict[str, Any]) -> dict[str, Any] | None:
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": _schema(asked)}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in asked.items() if name != "type"}}
    raise InvalidParameter(
        f"Unknown response_format type {kind!r}.",
        "Known: text, json_object, json_schema, structural_tag.",
        param="response_format.type",
    )


def _schema(asked: dict[str, Any]) -> Any:
    """Return the schema. `strict` changes nothing: a schema is either enforced completely or refused."""
    named = asked.get("json_schema")
    if named is None:
        raise MissingParameter(
            "Missing required parameter: 'response_format.json_schema'.", param="response_format.json_schema"
        )
    if not isinstance(named, dict):
        raise InvalidType(
            "Invalid type for 'response_format.json_schema'.", "Expected an object.", param="response_format"
        )
    for field in ("name", "schema"):  # an object without both is invalid; OpenAI's error asks for the name
        if named.get(field) is None:
            where = f"response_format.json_schema.{field}"
            raise MissingParameter(f"Missing required parameter: {where!r}.", param=where)
    schema = named["schema"]
    if not isinstance(schema, dict | bool):
        raise InvalidType(
            "Invalid type for 'response_format.json_schema.schema'.", "Expected an object.", param="response_format"
        )
    return schema
