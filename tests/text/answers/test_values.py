"""What a model writes as text or as Python becomes the JSON that it means."""

import json

import pytest

from localllm.text.answers.values import python_to_json, types_of, value_to_json

ROOT = {"$defs": {"Color": {"enum": ["red", 1]}, "Circle": {"$ref": "#/$defs/Circle"}}}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5", set(), 5),
        ("5", {"string", "null"}, "5"),
        ("5.0", {"integer", "string"}, 5.0),
        ("5.5", {"integer", "string"}, "5.5"),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("True", {"boolean"}, True),
        ("True", set(), True),
        (" true\n", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ('{"a": [1, null]}', {"object"}, {"a": [1, None]}),
        ("{'a': (1, None), 'b': \"it's\"}", {"object"}, {"a": [1, None], "b": "it's"}),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        ('"quoted"', set(), '"quoted"'),
        ("NaN", {"number"}, "NaN"),
        ("(fine)", set(), "(fine)"),
        ("", set(), ""),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 5000, {"integer"}, "9" * 5000),
    ],
)
def test_a_value_is_what_its_schema_or_its_look_says(text, types, value):
    assert json.loads(value_to_json(text, frozenset(types))) == value


@pytest.mark.parametrize(
    ("python", "value"),
    [
        (r"'it\'s'", "it's"),
        (r"'a\nb\tc\\d'", "a\nb\tc\\d"),
        (r"'\x41é\U0001F642'", "Aé🙂"),
        (r"'\ud83d\ude42'", "🙂"),
        (r"'\d+'", r"\d+"),
        ('"say \\"hi\\", True"', 'say "hi", True'),
        ("'\"'", '"'),
        ("[True, False, None,]", [True, False, None]),
        ("{'a': (1, 2.5e3), }", {"a": [1, 2500.0]}),
        ("-1", -1),
    ],
)
def test_a_python_literal_is_the_same_value_in_json(python, value):
    assert json.loads(python_to_json(python)) == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"$ref": "#/$defs/Color"}, {"string", "integer"}),
        ({"$ref": "#/$defs/Circle"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"const": True}, {"boolean"}),
        ({}, set()),
        (True, set()),
        (None, set()),
        ({"type": 5}, set()),
        ({"type": ["string", {}]}, {"string"}),
        ({"anyOf": 5}, set()),
        ({"enum": 5}, set()),
    ],
)
def test_a_schema_tells_types_or_nothing(schema, types):
    assert types_of(schema, ROOT) == types
