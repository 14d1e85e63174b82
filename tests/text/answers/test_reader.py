"""Whatever the format: pieces do not matter, nothing is lost, nothing raises."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.text.answers.formats import FORMATS
from localllm.text.answers.output import call_id, short_call_id
from localllm.text.answers.parts import Content, Reasoning, ToolArguments, ToolCallStart
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PAIRS
from tests.draws import draws
from tests.text.answers.reading import (
    ANSWERS,
    MESSAGES,
    OTHER_ANSWERS,
    OTHER_TOOLS,
    TOOLS,
    TWO_CALLS,
    broken_in,
    calls_in,
    content_of,
    read,
    reasoning_of,
)
from tests.text.vocabularies import tokenizer

THINK = PAIRS[0]
ALL_ANSWERS = [*ANSWERS.items(), *((name, text) for (name, _), text in OTHER_ANSWERS.items())]
FRAGMENTS = [
    '{"name": "get_weather", "arguments": {"city": "a"}}', '{"name": "now"', ', "parameters": ',
    '{"a": [1, {"b": "]}"}',
    "get_weather", "now", "f(a=", "[", "]", "(", ")", "{", "}", '"', "'", "\\", ",", ";", ":", "=", "<", ">", "\n", " ",
    "text", "null", "1.5", "```json\n", "```", "<function=now>", "<parameter=city>\n", "functions.now",
    " to=functions.now", "analysis", "é", "<tool", "tool_call>",
]  # fmt: skip


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@st.composite
def soups(draw: st.DrawFn) -> tuple[str, str]:
    """A format's markers and pieces of calls in any order."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    format = FORMATS[name]
    pieces = [*format.openers, *format.openers, *format.closers, *THINK, *FRAGMENTS]
    return name, "".join(draw(st.lists(st.sampled_from(pieces), max_size=24)))


@pytest.mark.parametrize(("name", "text"), ALL_ANSWERS)
def test_two_calls_are_read(name, text):
    parts = read(name, [text], tools=TOOLS)
    assert calls_in(parts) == TWO_CALLS
    assert content_of(parts) == ""
    assert broken_in(parts) == []


@pytest.mark.parametrize(("name", "text"), ALL_ANSWERS)
@given(places=st.lists(st.integers(0, 10**6), max_size=12))
@draws(12)
def test_pieces_do_not_matter(name, text, places):
    text = f"<think>\nWhy not {text}?\n</think>\n\n{text}"
    whole = read(name, [text], reasoning=THINK, tools=TOOLS)
    assert read(name, cut(text, places), reasoning=THINK, tools=TOOLS) == whole
    assert read(name, text, reasoning=THINK, tools=TOOLS) == whole


@given(soup=soups(), places=st.lists(st.integers(0, 10**6), max_size=12), prompt=st.sampled_from(["", "<think>\n"]))
@draws(400)
def test_broken_text_never_raises_and_pieces_do_not_matter(soup, places, prompt):
    name, text = soup
    whole = read(name, [text], reasoning=THINK, tools=TOOLS, prompt=prompt)
    assert read(name, cut(text, places), reasoning=THINK, tools=TOOLS, prompt=prompt) == whole
    assert read(name, text, reasoning=THINK, tools=TOOLS, prompt=prompt) == whole


@given(soup=soups())
@draws(200)
def test_calls_of_unknown_tools_are_content_to_the_letter(soup):
    name, text = soup
    if name not in MESSAGES:  # whose markers the model does not write as text
        assert content_of(read(name, [text], tools=OTHER_TOOLS)) == text


@pytest.mark.parametrize(("name", "text"), ANSWERS.items())
def test_a_call_cut_off_anywhere_loses_no_text(name, text):
    """As content before its name is known, as arguments as they stand after it; and the end says which."""
    for length in range(1, len(text)):
        parts = read(name, [text[:length]], tools=TOOLS)
        starts = [part for part in parts if isinstance(part, ToolCallStart)]
        arguments = [part.text for part in parts if isinstance(part, ToolArguments)]
        assert len(arguments) == len(starts)
        assert "Zür" not in text[:length] or "Zür" in arguments[0] if starts else True
        if not starts and name not in (*MESSAGES, "deepseek-v3"):
            assert content_of(parts) == text[:length]
        if not starts and any(text[:length].startswith(opener) for opener in FORMATS[name].openers):
            assert broken_in(parts) == [None]


@pytest.mark.parametrize("name", [None, *FORMATS])
@pytest.mark.parametrize("text", ["Hello, world.", "  padded\n", "a < b [1] {x} `f(y)`", "{", "[", " ", ""])
def test_plain_text_stays_as_it_is(name, text):
    assert read(name, text, reasoning=THINK, tools=TOOLS) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_passes_at_once(name):
    reader = AnswerReader(AnswerFormat(FORMATS[name], THINK), tools=TOOLS)
    assert [reader.feed(word) for word in ("Well", ", the", " sky", " is [")][:3] == [
        [Content("Well")], [Content(", the")], [Content(" sky")]
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pythonic"])
def test_arguments_pass_before_they_are_whole(name):
    text = ANSWERS[name]
    reader = AnswerReader(AnswerFormat(FORMATS[name]), tools=TOOLS)
    parts = reader.feed(text[: text.index("Zür") + 3])
    assert [type(part) for part in parts] == [ToolCallStart, ToolArguments]
    assert parts[1].text.replace(" ", "") == '{"city":"Zür'


@pytest.mark.parametrize(("name", "text"), ALL_ANSWERS)
def test_the_first_whole_call_ends_an_answer_that_may_hold_one(name, text):
    """Wherever it is cut: a piece may hold the end of the first call and the next."""
    for pieces in ([text], text, [text[i : i + 7] for i in range(0, len(text), 7)]):
        parts = read(name, [*pieces, "\nSo."], tools=TOOLS, parallel=False)
        assert (calls_in(parts), content_of(parts), broken_in(parts)) == (TWO_CALLS[:1], "", [])


def test_an_answer_that_may_hold_one_call_says_when_it_is_over():
    reader = AnswerReader(AnswerFormat(FORMATS["harmony"]), tools=TOOLS, parallel=False)
    before, escape = '<|channel|>commentary to=functions.now<|message|>{"a": ["}\\', '\\\\"", {}]'
    for piece in (before, escape):
        reader.feed(piece)
        assert not reader.is_over
    assert reader.feed("} and so on") == [ToolArguments(0, "}")]
    assert reader.is_over
    assert reader.feed("<|call|>") == []
    assert reader.end() == []


def test_content_and_calls_keep_their_order():
    parts = read("hermes", ["Let me see.\n", ANSWERS["hermes"], "\nDone."])
    assert [type(part) for part in parts] == [
        Content, ToolCallStart, ToolArguments, ToolCallStart, ToolArguments, Content
    ]  # fmt: skip
    assert content_of(parts) == "Let me see.\n\nDone."


def test_without_tools_everything_is_content():
    assert read("hermes", [ANSWERS["hermes"]], tools=[]) == [Content(ANSWERS["hermes"])]


@pytest.mark.parametrize(("name", "text"), ALL_ANSWERS)
def test_calls_of_tools_that_nobody_offered_are_read_on_wish_if_a_marker_says_that_they_are_calls(name, text):
    reader = AnswerReader(AnswerFormat(FORMATS[name]), tools=[], any_name=True)
    parts = [*reader.feed(text), *reader.end()]
    names = [] if FORMATS[name].bare else [call for call, _ in TWO_CALLS]
    assert [call for call, _ in calls_in(parts)] == names


def test_the_call_after_a_broken_one_is_read():
    parts = read("hermes", ['<tool_call>{"name": oops <tool_call>{"name": "now", "arguments": {}}</tool_call>'])
    assert content_of(parts) == '<tool_call>{"name": oops '
    assert calls_in(parts) == [("now", {})]
    assert broken_in(parts) == [None]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ('{"a": "</tool_call>"}', {"a": "</tool_call>"}),
        ('{"a": "\\\\"}', {"a": "\\"}),
    ],
)
def test_arguments_that_are_nearly_json_are_mended(written, arguments):
    text = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    assert calls_in(read("hermes", text)) == [("now", arguments)]


@pytest.mark.parametrize("written", ["[1]", "1", '"text"', "NaN"])
def test_arguments_that_are_no_object_are_no_call(written):
    text = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    parts = read("hermes", text)
    assert (content_of(parts), broken_in(parts)) == (text, [None])


def test_a_number_that_json_does_not_have_breaks_the_call():
    parts = read("hermes", ['<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'])
    assert broken_in(parts) == [0]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.opener)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_first_and_a_call_inside_it_is_none(pair, opened):
    call = ANSWERS["hermes"]
    text = f"{'' if opened else pair.opener}\nWhy not {call}?\n{pair.closer}\n\nSure. {call}"
    parts = read("hermes", text, reasoning=pair, prompt=f"<|assistant|>{pair.opener}\n" if opened else "<|assistant|>")
    assert reasoning_of(parts) == f"Why not {call}?"
    assert content_of(parts) == "Sure. "
    assert calls_in(parts) == TWO_CALLS


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("Hi<|assistant|><think>\nLet me", "<think>\nLet me", True),
        ("Hi<|assistant|><think>\nLet me", "Let me", True),  # opened by the template
        ("Hi<|assistant|><think>\n\n</think>\n\n<think> Let", " <think> Let ", True),
        ("...of the tail it is " + "a long thought. " * 9, "<think>It is " + "a long thought. " * 9, True),
        ("Hi<|assistant|><think>A</think>It", "<think>A</think>It", False),
        ("Hi<|assistant|>It is a <think> that", "It is a <think> that", False),
        ("What is <think><|assistant|>Well", "Well", False),
        ("<think> is what?<|assistant|>", "", False),
    ],
)
def test_reasoning_that_a_continued_message_has_opened_goes_on(prompt, continued, inside):
    parts = read(
        "hermes", " see.</think>Yes." if inside else " so.", reasoning=THINK, prompt=prompt, continued=continued
    )
    assert (reasoning_of(parts), content_of(parts)) == (("see.", "Yes.") if inside else ("", " so."))


def test_reasoning_that_is_cut_off_is_reasoning():
    assert read("hermes", "<think>Hmm, </thi", reasoning=THINK) == [Reasoning("Hmm, </thi")]
    assert read("hermes", "Hmm", reasoning=THINK, prompt="<think>") == [Reasoning("Hmm")]


def test_empty_reasoning_leaves_no_trace():
    assert read("hermes", "<think>\n\n</think>\n\nYes", reasoning=THINK) == [Content("Yes")]


def test_an_end_of_reasoning_that_nothing_began_is_dropped_once():
    """What came before it was given out as content already; inside a line it is what the answer talks about."""
    assert read("hermes", "Hmm.\n</think>\n\nYes.\n</think>\n", reasoning=THINK) == [Content("Hmm.\nYes.\n</think>\n")]
    assert read("hermes", "`</think>` ends it", reasoning=THINK) == [Content("`</think>` ends it")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.opener)
def test_an_answer_that_begins_with_the_end_of_reasoning_has_none(pair):
    """MiniMax M3 begins so where it decides not to reason."""
    assert read("hermes", f"{pair.closer}Yes. {pair.closer}", reasoning=pair) == [Content(f"Yes. {pair.closer}")]


def test_line_breaks_of_mimo_belong_to_the_value():
    text = "<tool_call><function=get_weather><parameter=city>\nZug\n</parameter></function></tool_call>"
    assert calls_in(read("mimo", text, tools=TOOLS)) == [("get_weather", {"city": "\nZug\n"})]
    assert calls_in(read("qwen3-coder", text, tools=TOOLS)) == [("get_weather", {"city": "Zug"})]


def test_the_word_think_later_in_an_answer_is_content():
    assert read(None, "Write <think> first.", reasoning=THINK) == [Content("Write <think> first.")]


def test_harmony_sorts_messages_by_channel():
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        f"<|start|>assistant{ANSWERS['harmony']}<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    )
    parts = read("harmony", text, tools=TOOLS)
    assert (reasoning_of(parts), content_of(parts)) == ("Need it.", "Looking.It rains.")
    assert calls_in(parts) == TWO_CALLS


def test_muse_sorts_messages_by_recipient():
    text = (
        " to=self<|message|>Need it.<|eom|><|start|>assistant to=user<|message|>Looking.<|eom|>"
        f"<|start|>assistant{ANSWERS['muse']}<|start|>assistant<|message|>It rains.<|eot|>"
    )
    parts = read("muse", text, tools=TOOLS)
    assert (reasoning_of(parts), content_of(parts)) == ("Need it.", "Looking.It rains.")
    assert calls_in(parts) == TWO_CALLS


def test_inkling_sorts_messages_by_kind():
    text = (
        "<|content_thinking|>Need it.<|end_message|><|message_model|><|content_text|>Looking.<|end_message|>"
        f"<|message_model|>{ANSWERS['inkling'].removesuffix('<|content_model_end_sampling|>')}"
        "<|message_model|><|content_text|>It rains.<|end_message|><|content_model_end_sampling|>"
    )
    parts = read("inkling", text, tools=TOOLS)
    assert (reasoning_of(parts), content_of(parts)) == ("Need it.", "Looking.It rains.")
    assert calls_in(parts) == TWO_CALLS


@pytest.mark.parametrize("tools", [[], TOOLS, None])
def test_inkling_text_without_a_marker_is_content(tools):
    """The prompt may have opened it."""
    text = "now it rains.<|end_message|><|content_model_end_sampling|>"
    assert read("inkling", text, tools=tools) == [Content("now it rains.")]


def test_an_inkling_call_inside_reasoning_that_is_not_closed_is_a_call():
    text = '<|content_thinking|>Hm.<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>'
    parts = read("inkling", text, tools=TOOLS)
    assert (reasoning_of(parts), calls_in(parts), content_of(parts)) == ("Hm.", [("now", {})], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("inkling", "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
        ("muse", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes."),
    ],
)
def test_messages_are_sorted_without_tools_too(name: str, text: str):
    assert read(name, text, tools=[]) == [Reasoning("Hm."), Content("Yes.")]


def test_ids_are_those_of_the_api_and_of_mistral():
    reader = AnswerReader(AnswerFormat(FORMATS["mistral"]))
    start = next(part for part in reader.feed(ANSWERS["mistral"]) if isinstance(part, ToolCallStart))
    assert (len(start.id), start.id.isalnum()) == (9, True)
    assert len(call_id()) == len("call_") + 24
    assert call_id() != call_id()
    assert len(short_call_id()) == 9


@pytest.mark.parametrize(
    ("name", "text", "id"),
    [
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", "a1B2c3D4e"),
        ("kimi-k2", "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}", "functions.now:7"),
        ("solar", "<|tool_call:begin|>a1b2<|tool_call:name|>now<|tool_call:args|>{}", "a1b2"),
    ],
)
def test_an_id_that_the_model_wrote_is_kept(name, text, id):
    assert read(name, [text])[0] == ToolCallStart(0, id, "now")


def test_tags_that_say_what_is_text_are_believed_before_the_look_and_the_schema():
    pair = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    pairs = [pair.format(*one) for one in (("a", "true", "1"), ("b", "false", "[1]"), ("days", "true", "3"))]
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">{"".join(pairs)}</｜DSML｜invoke>'
    assert calls_in(read("deepseek-v3.2", text, tools=TOOLS)) == [("get_weather", {"a": "1", "b": [1], "days": "3"})]


def test_gemma_arguments_nest():
    written = (
        '<|tool_call>call:f{a:{b:[1,-2.5,true,null,<|"|>x,}<|"|>,[]],<|"|>c d<|"|>:{}},e:<|"|>line\nbreak "q"<|"|>}'
    )
    arguments = {"a": {"b": [1, -2.5, True, None, "x,}", []], "c d": {}}, "e": 'line\nbreak "q"'}
    assert calls_in(read("gemma4", written + "<tool_call|>")) == [("f", arguments)]
    deep = "<|tool_call>call:f{a:" + "[" * 10_000
    assert broken_in(read("gemma4", [deep])) == [0]


def m3(text: str) -> str:
    """Write MiniMax M3's tags, with a bar for the token before each."""
    return text.replace("|", "]<]minimax[>[")


NESTED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "lists": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "one": {"type": "object", "properties": {"item": {"type": "string"}}},
        "none": {"type": "array"},
        "nothing": {"type": "object"},
        "maybe": {"anyOf": [{"type": "array", "items": {"type": "boolean"}}, {"type": "null"}]},
        "refers": {"$ref": "#/$defs/Pair"},
    },
    "$defs": {"Pair": {"type": "object", "properties": {"left": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    ("written", "schema", "arguments"),
    [
        ("|<text>1 <b> |</text>", NESTED, {"text": "1 <b> "}),
        (
            "|<lists>|<item>|<item>1|</item>|<item>2|</item>|</item>|<item>|</item>|</lists>",
            NESTED,
            {"lists": [[1, 2], []]},
        ),
        ("|<lists>[[1], []]|</lists>", NESTED, {"lists": [[1], []]}),
        ("|<one>|<item>1|</item>|</one>", NESTED, {"one": {"item": "1"}}),
        (
            "|<none>|</none>|<nothing>|</nothing>|<text>|</text>",
            NESTED,
            {"none": [], "nothing": {}, "text": ""},
        ),
        ("|<maybe>|<item>true|</item>|</maybe>", NESTED, {"maybe": [True]}),
        ("|<maybe>null|</maybe>", NESTED, {"maybe": None}),
        ("|<refers>|<left>7|</left>|<more>7|</more>|</refers>", NESTED, {"refers": {"left": "7", "more": 7}}),
        ("|<a>|<item>1|</item>|<item>b c|</item>|</a>|<d>|<e>2.5|</e>|</d>", {}, {"a": [1, "b c"], "d": {"e": 2.5}}),
        ("|<a b>1|</a b>\n |<invoke>2|</invoke>", {}, {"a b": 1, "invoke": 2}),
    ],
)  # fmt: skip
def test_minimax_arguments_nest(written, schema, arguments):
    text = m3(f'|<tool_call>\n|<invoke name="f">{written}|</invoke>\n|</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for pieces in ([text], text):
        parts = read("minimax-m3", pieces, tools=tools)
        assert (calls_in(parts), content_of(parts), broken_in(parts)) == ([("f", arguments)], "", [])


@pytest.mark.parametrize("written", ["|<a>1|</b>", "|<a>|<item>1|</item>", "|<a>" * 10_000, "text", "|<a"])
def test_a_minimax_call_that_does_not_close_its_tags_is_broken(written):
    parts = read("minimax-m3", [m3(f'|<tool_call>|<invoke name="now">|<z>1|</z>{written}')], tools=TOOLS)
    assert broken_in(parts) == [0]


def test_markers_that_are_special_tokens_are_told():
    words = tokenizer("byte_level")  # knows <|im_start|> as special and "<tool call>" as not
    assert not AnswerFormat(FORMATS["hermes"], THINK).needs_special_tokens(words)
    special = type("Special", (type(FORMATS["hermes"]),), {"openers": ("<|im_start|>",)})()
    assert AnswerFormat(special).needs_special_tokens(words)


def test_an_answer_of_any_length_is_read_in_linear_time():
    """A megabyte of content and one of arguments; a quadratic reader would take minutes."""
    text = (
        "a < b, [c] " * 50_000
        + '<tool_call>{"name": "now", "arguments": {"a": "'
        + 'x \\" {' * 100_000
        + '"}}</tool_call>'
    )
    for length in (20, len(text)):
        parts = read("hermes", (text[i : i + length] for i in range(0, len(text), length)))
        assert broken_in(parts) == []
        assert len(calls_in(parts)[0][1]["a"]) == 500_000


@pytest.mark.parametrize("name", {format.read_calls.__func__: name for name, format in FORMATS.items()}.values())
def test_many_broken_calls_are_read_in_linear_time(name):
    """Each could hold back everything behind it; after some of them nothing is taken for a call any more."""
    text = (FORMATS[name].openers[0] + '{"arguments": {<arg_key>[ARGS]now(a=') * 1000
    assert content_of(read(name, [text])) == text
