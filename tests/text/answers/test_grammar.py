"""Whatever a grammar lets through is read back as a call whose arguments fit the tool's schema."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher

from localllm.errors import InvalidParameter
from localllm.text.answers.formats import FORMATS
from localllm.text.structured import MAX_CHARACTERS, StructuredOutputsParams
from tests.text.answers.harness import CLOSERS, SCHEMAS, properties, tool, typed, vocabulary
from tests.text.answers.reading import ANSWERS, MESSAGES, TOOLS, TWO_CALLS, broken_in, calls_in, content_of, read

ONE_CALL = (*MESSAGES, "llama3-json", "gigachat", "deepseek-v3")  # the last is written in another way than its answer
WITHOUT_TOKENS = [name for name in FORMATS if name not in MESSAGES]
FRAMES = ("", "<|message_sep|>")  # which the model's own reader drops


def sample(grammar: str, with_markers: bool, seed: int) -> str:
    """A text that the grammar admits: any of its tokens at each place, and its end wherever that may be likely soon."""
    tokenizer, words = vocabulary(with_markers)
    end = words.eos_token
    assert LLMatcher.validate_grammar(grammar, words) == ""
    matcher, rng, ids = LLMatcher(words, grammar), random.Random(seed), []
    while not matcher.is_stopped():
        assert len(ids) < 4000
        bias = matcher.compute_logit_bias()
        allowed = [token_id for token_id in range(words.vocab_size) if bias[token_id]]
        assert allowed
        ending = [i for i in allowed if i == end or tokenizer.token_bytes(i) in (b'"', b"<", b"]", b"}", b",", b"\n")]
        token_id = rng.choice(ending if ending and rng.random() < 0.3 else allowed)
        closer = tokenizer.encode(rng.choice(CLOSERS), add_special_tokens=False)
        if len(allowed) > 100 and rng.random() < 0.3 and matcher.validate_tokens(closer) == len(closer):
            matcher.consume_tokens(closer)
            ids += closer
            continue
        if matcher.is_accepting() and end in allowed and rng.random() < 0.5:
            token_id = end
        assert matcher.consume_token(token_id), matcher.get_error()
        ids.append(token_id)
    return tokenizer.decode([token_id for token_id in ids if token_id != end], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "with_markers"), [*((name, True) for name in FORMATS), *((name, False) for name in WITHOUT_TOKENS)]
)
def test_forced_calls_are_read_back_and_fit_their_schema(name, with_markers):
    """Each schema where markers are text, half of them where they are tokens."""
    tokenizer, _ = vocabulary(with_markers)
    schemas = [*enumerate(SCHEMAS.items())]
    for seed, (function, schema) in schemas[len(name) % 2 :: 2] if with_markers and name not in MESSAGES else schemas:
        tools = [tool(function, schema), tool("other", SCHEMAS["scalars"])]
        choice = ("required", function)[seed % 2]
        grammar = FORMATS[name].call_grammar(tools, choice, parallel=choice == "required", tokenizer=tokenizer)
        assert grammar is not None, function
        text = sample(grammar, with_markers, seed)
        parts = read(name, [text], tools=tools)
        assert (content_of(parts).strip() in FRAMES, broken_in(parts)) == (True, []), text
        calls = calls_in(parts)
        assert calls
        assert {called for called, _ in calls} <= ({function, "other"} if choice == "required" else {choice})
        for called, arguments in calls:
            jsonschema.validate(arguments, {**SCHEMAS, "other": SCHEMAS["scalars"]}[called] or {})


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ONE_CALL])
def test_two_calls_as_templates_print_them_are_admitted(name):
    """Where the models make several; elsewhere one."""
    tokenizer, words = vocabulary(False)
    grammar = FORMATS[name].call_grammar(TOOLS, "required", parallel=True, tokenizer=tokenizer)
    text = ANSWERS[name]
    matcher = LLMatcher(words, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids), text[: matcher.validate_tokens(ids)]
    assert [called for called, _ in calls_in(read(name, [text], tools=TOOLS))] == [called for called, _ in TWO_CALLS]


YES = properties(["yes"], yes=typed("boolean")) | {"additionalProperties": False}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama3-json"])
def test_calls_or_a_text_that_fits_are_told_apart(name):
    tokenizer, words = vocabulary(True)
    answer = StructuredOutputsParams(json=YES)
    tools = [tool("now", properties([])), tool("other", SCHEMAS["scalars"])]
    grammar = FORMATS[name].call_grammar(tools, "required", parallel=True, tokenizer=tokenizer, answer=answer)
    text = getattr(FORMATS[name], "final", "") + '{"yes": true}'
    matcher = LLMatcher(words, grammar)
    assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert matcher.is_accepting()
    kinds = set()
    for seed in range(8):
        parts = read(name, [sample(grammar, True, seed)], tools=tools)
        calls, content = calls_in(parts), content_of(parts)
        assert broken_in(parts) == []
        if calls:
            assert content.strip() in FRAMES
        else:
            jsonschema.validate(json.loads(content), YES)
        kinds.add(bool(calls))
    assert kinds == {False, True}


@pytest.mark.parametrize(
    ("name", "answer", "known"),
    [
        ("hermes", {"json": YES}, True),
        ("hermes", {"json_object": True}, True),
        ("hermes", {"choice": ["yes", "no"]}, True),
        ("hermes", {"choice": ["yes", "<no>"]}, False),
        ("hermes", {"regex": "[a-z]+"}, False),
        ("llama3-json", {"json": YES}, False),
        ("pythonic", {"json": YES}, False),
        ("mistral", {"json": YES}, False),
        ("functionary", {"json": YES}, True),
    ],
)
def test_without_tokens_a_text_that_may_begin_as_a_call_cannot_be_told_from_one(name, answer, known):
    grammar = FORMATS[name].call_grammar(TOOLS, "required", parallel=True, answer=StructuredOutputsParams(**answer))
    assert (grammar is not None) == known


@pytest.mark.parametrize(
    "answer", [{"regex": "[a-z<_]+"}, {"choice": ["<|START_RESPONSE|>"]}, {"grammar": 'start: "yes" | "<tool"'}]
)
def test_a_token_tells_calls_from_any_text_and_markers_may_stand_around_that(answer):
    tokenizer, words = vocabulary(True)
    frame = ("<|START_ACTION|>", "<|END_ACTION|>")  # tokens of this vocabulary
    grammar = FORMATS["nemotron"].call_grammar(
        TOOLS, "required", parallel=True, tokenizer=tokenizer, answer=StructuredOutputsParams(**answer), frame=frame
    )
    begins = {"regex": "yes", "choice": "<|START_RES", "grammar": "yes"}
    [text] = [begins[kind] for kind in answer]
    for said in (text, f"{frame[0]}{text}", ANSWERS["nemotron"]):
        ids = tokenizer.encode(said, add_special_tokens=False)
        assert LLMatcher(words, grammar).validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_one_call_is_forced_where_they_may_not_be_parallel(name):
    grammar = FORMATS[name].call_grammar([tool("now", properties([]))], "now", parallel=False)
    for seed in range(3):
        assert len(calls_in(read(name, [sample(grammar, False, seed)]))) == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "string", "maxLength": 3},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"type": ["string", "array"]},
        {"allOf": [{"type": "string"}]},
        True,
    ],
)
def test_text_that_must_fit_more_than_a_type_cannot_be_forced_between_tags(schema):
    tools = [tool("f", properties(["a"], a=schema))]
    for name in ("qwen3-coder", "seed-oss", "glm4", "minimax-m2", "deepseek-v3.2"):
        assert FORMATS[name].call_grammar(tools, "required", parallel=True) is None
    assert FORMATS["hermes"].call_grammar(tools, "required", parallel=True)


@pytest.mark.parametrize("name", ["qwen3-coder", "glm4", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": {"a b": {"type": "integer"}}},
        {"anyOf": [properties(["a"], a=typed("integer"))]},
    ],
)
def test_an_object_that_is_more_than_a_list_of_properties_cannot_be_forced_without_json(name, schema):
    assert FORMATS[name].call_grammar([tool("f", schema)], "required", parallel=True) is None


def test_a_gemma_list_has_as_many_items_as_its_schema_wants():
    for least, most in ((0, None), (2, None), (0, 1), (1, 1), (2, 2), (1, 3)):
        array = {"type": "array", "items": typed("boolean"), "minItems": least}
        array |= {} if most is None else {"maxItems": most}
        tools = [tool("f", properties(["a"], a=array))]
        grammar = FORMATS["gemma4"].call_grammar(tools, "f", parallel=False)
        for seed in range(3):
            [(_, arguments)] = calls_in(read("gemma4", [sample(grammar, False, seed)], tools=tools))
            jsonschema.validate(arguments, {"properties": {"a": array}})
    wrong = {"type": "array", "items": typed("boolean"), "minItems": 3, "maxItems": 2}
    assert FORMATS["gemma4"].call_grammar([tool("f", properties(["a"], a=wrong))], "f", parallel=False) is None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        "text",
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"city": 5}, "required": 5},
        {"type": "object", "properties": {"city": {"type": 5}}, "required": [{}]},
        {"type": "object", "properties": {"city": {"enum": 5}}},
        {"type": "object", "properties": {"city": {"anyOf": [{"$ref": "#/properties/city"}] * 9}}},
        {"type": "object", "properties": {"city": {"$ref": "#/properties/city"}}},
    ],
)
def test_a_schema_that_is_none_raises_nothing(name, schema):
    """llguidance says what is wrong with it; the reader goes by the look of values."""
    tools = [tool("get_weather", schema), tool("now", None)]
    FORMATS[name].call_grammar(tools, "required", parallel=True)
    assert [called for called, _ in calls_in(read(name, [ANSWERS[name]], tools=tools))] == ["get_weather", "now"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_of_calls_does_not_outgrow_what_is_asked(name):
    """Definitions go along with each property, and each optional property may be followed by all others."""
    wide = {f"p{i}": {"type": "integer"} for i in range(5_000)}
    deep = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(2_000)}}
    deep["$defs"] = {"a": {"type": "integer"}, **{f"d{i}": {"type": "string", "title": "x" * 80} for i in range(1_000)}}
    for parameters in ({"type": "object", "properties": wide}, deep):
        try:
            grammar = FORMATS[name].call_grammar([tool("f", parameters)], "required", parallel=True, tokenizer=None)
        except InvalidParameter:
            continue
        assert grammar is None or len(grammar) < 2 * MAX_CHARACTERS
