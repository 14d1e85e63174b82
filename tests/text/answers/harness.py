"""Tools, their schemas and a vocabulary for the tests of grammars of calls."""

from functools import cache
from typing import Any

import tokenizers
from llguidance import LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from localllm.text.answers.formats import FORMATS
from localllm.text.tokenizer import Tokenizer

CLOSERS = (
    "</parameter>",
    "\n</parameter>",
    "</arg_value>",
    "</arg_value:opensource>",
    "</param>",
    "<|end|>",
    '<|"|>',
    "<escape>",
    "</｜DSML｜parameter>",
    "]<]minimax[>[",
)  # which no chance would write
END = "<|end_of_turn|>"


@cache
def vocabulary(with_markers: bool) -> tuple[Tokenizer, LLTokenizer]:
    """A token for each byte, and one for each marker: special where it stands in bars."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([END])
    markers = {
        marker
        for format in FORMATS.values()
        for marker in (*format.openers, *format.closers, *format.tokens)
        if with_markers and not (set(" =\n") & set(marker) or marker in ("functools", ">"))
        if "DSML｜" not in marker[1:] and "minimax[>[<" not in marker
    }
    barred = {marker for marker in markers if "|" in marker or "｜" in marker}
    raw.add_special_tokens(sorted(barred))
    raw.add_tokens(sorted(markers - barred))
    return Tokenizer(raw), LLTokenizer(raw.to_str(), eos_token=raw.token_to_id(END))


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def typed(name: str) -> dict[str, Any]:
    return {"type": name}


def properties(required: list[str], **of: Any) -> dict[str, Any]:
    return {"type": "object", "properties": of, "required": required}


SCHEMAS: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "no_properties": properties([]),
    "strings": properties(["a"], a={"type": "string", "description": "text"}, b=typed("string")),
    "scalars": properties(["i", "b"], n=typed("number"), i=typed("integer"), z=typed("null"), b=typed("boolean")),
    "all_optional": properties([], a=typed("integer"), b={"enum": ["x", "y z"]}, c=typed("boolean")),
    "last_required": properties(["c"], a=typed("integer"), b=typed("integer"), c=typed("integer")),
    "enums": properties(["kind"], kind={"type": "string", "enum": ["a", 'q"', "1"]}, level={"enum": [1, None, "1x"]}),
    "nullable": properties(["a"], a={"anyOf": [{"type": "string"}, {"type": "null"}]}, b={"type": ["integer", "null"]}),
    "nested": properties(
        ["list"],
        list={"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        object={**properties(["x"], x=typed("boolean")), "additionalProperties": False},
    ),
    "referring": {
        **properties(["color", "inner"], color={"$ref": "#/$defs/Color"}, inner={"$ref": "#/$defs/Inner"}),
        "$defs": {
            "Color": {"type": "string", "enum": ["red", "green"]},
            "Inner": {**properties(["deep"], deep={"$ref": "#/$defs/Color"}), "additionalProperties": False},
        },
    },
}  # fmt: skip
