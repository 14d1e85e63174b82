"""A model's template tells how it writes calls and reasoning: by printing a call, or by the markers it names."""

from pathlib import Path

import pytest

from localllm.text.answers.detect import answer_format
from localllm.text.answers.formats import FORMATS
from localllm.text.answers.reader import AnswerReader
from localllm.text.answers.reasoning import PAIRS, PromptEnd
from localllm.text.chat_template import ChatTemplate
from tests.text import templates
from tests.text.answers.reading import TOOLS, content_of, reasoning_of

PREFACE = "{% if tools %}Tools: {{ tools | tojson }} Write a call as {{ 'TOOL' }}.{% endif %}"


def printing(call: str, before: str = "", after: str = "") -> str:
    """The shortest template that prints each call as `call` says; `c` is its function."""
    return (
        PREFACE + "{% for m in messages %}\n<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}" + before + "{% "
        "for t in m.tool_calls %}{% set c = t.function %}" + call + "{% endfor %}" + after + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
    )


OBJECT = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
ITEMS = "{% for k, v in c.arguments.items() %}"
DSML = (
    '<｜DSML｜invoke name="{{ c.name }}">\n' + ITEMS + '<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}'
    "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
)
PRINTED = {
    "hermes": [
        printing(f"\n<tool_call>\n{OBJECT}\n</tool_call>"),
        templates.CHATML,
    ],
    "qwen3-coder": [
        printing(
            "\n<tool_call>\n<function={{ c.name }}>\n" + ITEMS + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
            "{% endfor %}</function>\n</tool_call>"
        )
    ],
    "mimo": [
        printing(
            "<tool_call><function={{ c.name }}>" + ITEMS + "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
            "</function></tool_call>"
        )
    ],
    "seed-oss": [
        printing(
            "<seed:tool_call>\n<function={{ c.name }}>\n" + ITEMS + "<parameter={{ k }}>{{ v }}</parameter>\n"
            "{% endfor %}</function>\n</seed:tool_call>"
        )
    ],
    "glm4": [
        printing(
            "\n<tool_call>{{ c.name }}\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
            "{% endfor %}</tool_call>"
        )
    ],
    "hunyuan-v3": [
        printing(
            "<tool_call:opensource>{{ c.name }}<tool_sep:opensource>\n" + ITEMS + "<arg_key:opensource>{{ k }}"
            "</arg_key:opensource>\n<arg_value:opensource>{{ v }}</arg_value:opensource>\n{% endfor %}"
            "</tool_call:opensource>\n",
            before="<tool_calls:opensource>\n",
            after="</tool_calls:opensource>",
        )
    ],
    "hunyuan-v3-preview": [
        printing(
            "<tool_call>{{ c.name }}<tool_sep>\n" + ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}"
            "</arg_value>\n{% endfor %}</tool_call>\n",
            before="<tool_calls>\n",
            after="</tool_calls>",
        )
    ],
    "minimax-m1": [printing(f"{OBJECT}\n", before="<tool_calls>\n", after="</tool_calls>")],
    "minimax-m2": [
        printing(
            '<invoke name="{{ c.name }}">\n' + ITEMS + '<parameter name="{{ k }}">{{ v }}</parameter>\n'
            "{% endfor %}</invoke>\n",
            before="\n<minimax:tool_call>\n",
            after="</minimax:tool_call>[e~[\n",
        )
    ],
    "minimax-m3": [
        printing(
            ']<]minimax[>[<invoke name="{{ c.name }}">' + ITEMS + "]<]minimax[>[<{{ k }}>{{ v }}]<]minimax[>["
            "</{{ k }}>{% endfor %}]<]minimax[>[</invoke>\n",
            before="]<]minimax[>[<tool_call>\n",
            after="]<]minimax[>[</tool_call>[e~[\n",
        )
    ],
    "minicpm": [
        printing(
            '<function name="{{ c.name }}">' + ITEMS + '<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>'
        )
    ],
    "deepseek-v3.1": [
        printing(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>",
            before="<think></think><｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ],
    "deepseek-v3.2": [printing(DSML, before="\n\n<｜DSML｜function_calls>\n", after="</｜DSML｜function_calls>")],
    "deepseek-v4": [printing(DSML, before="\n\n<｜DSML｜tool_calls>\n", after="</｜DSML｜tool_calls>")],
    "kimi-k2": [
        printing(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
            "{{ c.arguments | tojson }}<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        )
    ],
    "solar": [
        printing(
            "<|tool_call:begin|>{{ t.id }}<|tool_call:name|>{{ c.name }}<|tool_call:args|>{{ c.arguments | tojson }}"
            "<|tool_call:end|>",
            before="<|tool_calls|>",
            after="<|calls|>",
        )
    ],
    "functionary": [printing("<function={{ c.name }}>{{ c.arguments | tojson }}</function>", after="<|eom_id|>")],
    "gemma4": [
        printing(
            "<|tool_call>call:{{ c.name }}{{ '{' }}" + ITEMS + '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}'
            "{{ '}<tool_call|>' }}"
        )
    ],
    "function-gemma": [
        printing(
            "<start_function_call>call:{{ c.name }}{{ '{' }}" + ITEMS + "{{ k }}:<escape>{{ v }}<escape>{% endfor %}"
            "{{ '}<end_function_call>' }}"
        )
    ],
    "command": [
        printing(
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
            '"parameters": {{ c.arguments | tojson }}}',
            before="<|START_ACTION|>[\n    ",
            after="\n]<|END_ACTION|>",
        )
    ],
    "apertus": [
        printing(
            "{{ '{' }}\"{{ c.name }}\": {{ c.arguments | tojson }}}",
            before="<|tools_prefix|>[",
            after="]<|tools_suffix|>",
        )
    ],
    "gigachat": [
        printing(f"<|function_call|>{OBJECT}<|message_sep|>"),
        printing(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}<|message_sep|>"),
    ],
    "deepseek-v3": [
        printing(
            "<｜tool▁call▁begin｜>{{ t.type }}<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
            "<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ],
    "harmony": [
        printing(
            "{{ c.arguments | tojson }}<|call|>",
            before="<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary <|message|>",  # noqa: E501
        )
    ],
    "muse": [
        printing(
            '<atem:invoke name="{{ c.name }}">\n' + ITEMS + '<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n'
            "{% endfor %}</atem:invoke>\n",
            before="<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|><atem:function_calls>\n",
            after="</atem:function_calls><|eot|>",
        )
    ],
    "inkling": [
        printing(
            '<|message_model|>{{ c.name }}<|content_invoke_tool_json|>{"args": {{ c.arguments | tojson }}, '
            '"name": "{{ c.name }}"}<|end_message|>',
            before="<|end_message|>",
            after="<|content_model_end_sampling|>",
        )
    ],
    "mistral": [
        printing('{{ (c | tojson)[:-1] }}, "id": "{{ t.id }}"}', before="[TOOL_CALLS][", after="]</s>"),
        printing("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    ],
    "granite": [printing(OBJECT, before="<|tool_call|>[", after="]<|end_of_text|>")],
    "phi4": [printing(OBJECT, before="<|tool_call|>[", after="]<|/tool_call|>")],
    "nemotron": [printing(OBJECT, before="<TOOLCALL>[", after="]</TOOLCALL>")],
    "apriel": [printing(OBJECT, before="<tool_calls>[", after="]</tool_calls>")],
    "llama3-json": [
        printing('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'),
        templates.LLAMA3,
    ],
    "pythonic": [
        printing("{{ c.name }}(" + ITEMS + "{{ k }}={{ v | tojson }}{% endfor %})", before="[", after="]<|eot|>"),
        printing(
            "{{ c.name }}(" + ITEMS + "{{ k }}='{{ v }}'{% endfor %})",
            before="<|tool_call_start|>[",
            after="]<|tool_call_end|>",
        ),
    ],
}


def test_every_format_has_a_template_that_tells_it():
    assert PRINTED.keys() == FORMATS.keys()


def test_every_format_has_a_row_in_the_docs():
    page = (Path(__file__).parents[3] / "docs/concepts/tool-calls.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(("name", "source"), [(name, source) for name, all_ in PRINTED.items() for source in all_])
def test_the_printed_call_tells_the_format(name, source):
    found = answer_format(ChatTemplate(source, {"bos_token": "<s>"})).tools
    assert found is FORMATS[name]


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("granite", "respond only with <|tool_call|> followed by a JSON list"),
        ("hermes", "within <tool_call></tool_call> tags"),
        ("qwen3-coder", "as <tool_call><function=name></function></tool_call>"),
        ("phi4", "<|tool|>[]<|/tool|>"),
        ("kimi-k2", "<|tool_calls_section_begin|>"),
        ("inkling", "<|content_invoke_tool_json|>"),
        ("minimax-m3", "in one ]<]minimax[>[<tool_call>]<]minimax[>[</tool_call> block"),
        ("hunyuan-v3-preview", "<tool_call>name<tool_sep><arg_key>"),
        ("function-gemma", "<start_function_call>call:f{}"),
        ("pythonic", "List of tools: [{}]"),
        ("pythonic", "List of tools: <|tool_list_start|>"),
        (None, "with a tool if you like"),
    ],
)
def test_markers_tell_the_format_where_no_call_is_printed(name, instruction):
    source = PREFACE.replace("TOOL", instruction) + "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = answer_format(ChatTemplate(source)).tools
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    "call",
    ["<tool={{ c.name }}>{{ c.arguments | tojson }}</tool>", f"<tool_call>call: {OBJECT}", f"<TOOL>{OBJECT}"],
)
def test_a_call_printed_in_no_known_format_is_of_no_format(call):
    """Even though it has markers of one: reading it as that would find no call."""
    assert answer_format(ChatTemplate(printing(call))).tools is None


UNKNOWN = {
    "Command R+": printing(
        '{"tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', "Action:\n```json\n[", "]```"
    ),
    "Functionary 3.2": printing(">>>{{ c.name }}\n{{ c.arguments | tojson }}"),
    "Kimi K3": printing(
        '<|open|>call tool="{{ c.name }}" index="1"<|sep|>' + ITEMS + '<|open|>argument key="{{ k }}" type="string"'
        "<|sep|>{{ v }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>"
    ),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_that_is_not_known_is_taken_for_no_other_and_named_in_the_docs(family):
    page = (Path(__file__).parents[3] / "docs/concepts/tool-calls.md").read_text(encoding="utf-8")
    assert answer_format(ChatTemplate(UNKNOWN[family])).tools is None
    assert family in page.partition("Unsupported formats")[2].partition("\n\n")[0]


@pytest.mark.parametrize("source", [None, "", templates.GEMMA, templates.MISTRAL, templates.PARTS_ONLY])
def test_a_template_without_tools_or_reasoning_tells_so(source):
    format = answer_format(ChatTemplate(source))
    assert (format.tools, format.reasoning) == (None, None)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.opener)
def test_reasoning_is_told_by_its_markers(pair):
    source = "{% for m in messages %}{{ m.content.split('" + pair.closer + "')[-1] }}{% endfor %}"
    assert answer_format(ChatTemplate(source)).reasoning == pair


def test_the_prompt_tells_whether_the_answer_begins_inside_reasoning():
    opens = "{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>{% if not off %}<think>\n{% else %}"
    template = ChatTemplate(opens + "<think>\n\n</think>\n\n{% endif %}")
    pair = answer_format(template).reasoning
    ask = [{"role": "user", "content": "What does <think> do?"}]
    assert pair is not None
    assert PromptEnd(template.render(ask)).opens(pair)
    assert not PromptEnd(template.render(ask, off=True)).opens(pair)


def test_messages_have_markers_of_reasoning_of_their_own():
    assert answer_format(ChatTemplate(PRINTED["harmony"][0])).reasoning == ("<|channel|>analysis<|message|>", "<|end|>")
    inkling = answer_format(ChatTemplate(PRINTED["inkling"][0])).reasoning
    assert inkling == ("<|content_thinking|>", "<|end_message|>")
    assert answer_format(ChatTemplate(PRINTED["muse"][0])).reasoning == (" to=self<|message|>", "<|eom|>")


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("command", "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"),
        ("command", "<|START_TEXT|>{{ m.content }}<|END_TEXT|>"),
        ("solar", "<|begin|>assistant<|content|>{{ m.content }}<|end|>"),
        ("gigachat", "{{ m.content }}<|message_sep|>"),
        ("apriel", "<answer>\n{{ m.content }}\n</answer>"),
    ],
)
def test_markers_around_content_are_told_and_dropped(name, frame):
    """Also where the model reasons first, and where it was given no tools."""
    source = PRINTED[name][0].replace("{{ m.content or '' }}", "{% if m.content %}" + frame + "{% endif %}")
    format = answer_format(ChatTemplate(source + "{# <|START_THINKING|> #}"))
    text = "Hello, <b>world</b>."
    said = frame.replace("{{ m.content }}", text)
    for tools in ([], TOOLS):
        reader = AnswerReader(format, tools=tools)
        parts = [
            *(
                part
                for char in "".join((format.reasoning[0], "Hm.", format.reasoning[1], said))
                for part in reader.feed(char)
            ),
            *reader.end(),
        ]
        assert (reasoning_of(parts), content_of(parts)) == ("Hm.", text)


def test_a_pair_of_markers_that_is_put_together_is_told_by_what_is_printed():
    source = PRINTED["hunyuan-v3"][0].replace("<|{{ m.role }}|>", "{{ '<think{}>'.format(':opensource') }}")
    assert answer_format(ChatTemplate(source)).reasoning == ("<think:opensource>", "</think:opensource>")


def test_a_template_that_refuses_everything_tells_nothing():
    assert answer_format(ChatTemplate("{{ raise_exception('no') }}")).tools is None
