"""Reading an answer in pieces, and answers that hold two calls in every format."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localllm.text.answers.formats import FORMATS
from localllm.text.answers.parts import BrokenCall, Content, Part, Reasoning, ToolArguments, ToolCallStart, joined
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PromptEnd, ReasoningPair

WEATHER = {"city": 'Zürich "süd"', "days": 3}
TWO_CALLS = [("get_weather", WEATHER), ("now", {})]
_WEATHER_JSON = json.dumps(WEATHER, ensure_ascii=False)
_LIST = f'[{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}, {{"name": "now", "arguments": {{}}}}]'

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
OTHER_TOOLS = [{"type": "function", "function": {"name": "something_else"}}]

ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3-coder": '<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "süd"\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mimo": '<tool_call><function=get_weather><parameter=city>Zürich "süd"</parameter><parameter=days>3</parameter>'
    "</function></tool_call>\n<tool_call><function=now></function></tool_call>",
    "seed-oss": '<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich "süd"</parameter>\n'
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "glm4": '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "süd"</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_WEATHER_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich "süd"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek-v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich "süd"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "kimi-k2": "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_WEATHER_JSON}<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "solar": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather"
    f"<|tool_call:args|>{_WEATHER_JSON}<|tool_call:end|>"
    "<|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    "functionary": f"<function=get_weather>{_WEATHER_JSON}</function><function=now>{{}}</function>",
    "minimax-m1": f'<tool_calls>\n{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}\n'
    '{"name": "now", "arguments": {}}\n</tool_calls>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Zürich "süd"</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "minimax-m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Zürich "süd"'
    "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
    ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
    "minicpm": '<function name="get_weather"><param name="city">Zürich "süd"</param><param name="days">3</param>'
    '</function>\n<function name="now"></function>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Zürich "süd"<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "function-gemma": '<start_function_call>call:get_weather{city:<escape>Zürich "süd"<escape>,days:3}'
    "<end_function_call><start_function_call>call:now{}<end_function_call>",
    "command": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_WEATHER_JSON}}}, '
    '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "apertus": f'<|tools_prefix|>[{{"get_weather": {_WEATHER_JSON}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "gigachat": f'<|function_call|>{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}'
    '<|function_call|>{"name": "now", "arguments": {}}<|message_sep|>',
    "hunyuan-v3": "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    '<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Zürich "süd"</arg_value:opensource>\n'
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
    "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "hunyuan-v3-preview": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
    '<arg_value>Zürich "süd"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n'
    "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_WEATHER_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_WEATHER_JSON}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "muse": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Zürich "süd"</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
    "inkling": 'get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": '
    f"{_WEATHER_JSON}}}<|end_message|>"
    '<|message_model|>now<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>'
    "<|content_model_end_sampling|>",
    "mistral": f"[TOOL_CALLS]{_LIST}",
    "granite": f"<|tool_call|>{_LIST}",
    "phi4": f"<|tool_call|>{_LIST}<|/tool_call|>",
    "nemotron": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "apriel": f"<tool_calls>{_LIST}</tool_calls>",
    "llama3-json": f'{{"name": "get_weather", "parameters": {_WEATHER_JSON}}}; {{"name": "now", "parameters": null}}',
    "pythonic": '[get_weather(city="Zürich \\"süd\\"", days=3), now()]',
}
MESSAGES = ("harmony", "muse", "inkling")
"""Formats whose answers are messages, with markers that are tokens."""
OTHER_ANSWERS = {
    ("qwen3-coder", "no tag around it"): "<function=get_weather>\n<parameter=city>\nZürich \"süd\"\n</parameter>\n"
    "<parameter=days>\n3</parameter>\n</function>\n<function=now></function>",
    ("hermes", "arguments before the name"): "<tool_call>"
    f'{{"arguments": {_WEATHER_JSON}, "name": "get_weather"}}</tool_call><tool_call>{{"name": "now"}}</tool_call>',
    ("mistral", "ids"): f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_WEATHER_JSON}, "id": "a1B2c3D4e"}}, '
    '{"name": "now", "arguments": {}, "id": "f5G6h7I8j"}]',
    ("mistral", "names before arguments"): f"[TOOL_CALLS]get_weather[ARGS]{_WEATHER_JSON}[TOOL_CALLS]now{{}}",
    ("granite", "another marker"): f'<tool_call> [{{"name": "get_weather", "arguments": {_WEATHER_JSON}}},'
    '{"name": "now", "arguments": "{}"}]',
    ("phi4", "another marker"): f'functools[{{"name": "get_weather", "arguments": {_WEATHER_JSON}}},'
    '{"name": "now"}]',
    ("llama3-json", "a marker"): '<|python_tag|>{"type": "function", '
    f'"name": "get_weather", "parameters": {_WEATHER_JSON}}}'
    '\n{"name": "now", "parameters": {}}',
    ("pythonic", "single quotes"): "[get_weather(city='Zürich \"süd\"', days=3,), now( )]",
    ("pythonic", "markers"): "<|tool_call_start|>"
    '[get_weather(city="Zürich \\"süd\\"", days=3), now()]<|tool_call_end|>',
    ("minicpm", "text in a block"): '<function name="get_weather"><param name="city"><![CDATA[Zürich "süd"]]></param>'
    '<param name="days">3</param></function><function name="now"></function>',
    ("minimax-m2", "line breaks around values"): '<minimax:tool_call>\n<invoke name="get_weather">'
    '<parameter name="city">\nZürich "süd"\n</parameter><parameter name="days">\n3</parameter></invoke>'
    '</minimax:tool_call>\n<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    ("muse", "in one message, without the outer tag"): '<|start|>assistant to=get_weather<|message|>'
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Zürich "süd"</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n<atem:invoke name="now">\n</atem:invoke><|eot|>',
    ("inkling", "arguments first, and no name before them"): '<|message_model|><|content_invoke_tool_json|>'
    f'{{"args": {_WEATHER_JSON}, "name": "get_weather"}}<|end_message|>now<|content_invoke_tool_json|>'
    '{"args": {}, "name": "now"}<|content_model_end_sampling|>',
    ("minimax-m3", "a call in each outer tag"): ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="get_weather">\n'
    ']<]minimax[>[<city>Zürich "süd"]<]minimax[>[</city>\n]<]minimax[>[<days>\n3\n]<]minimax[>[</days>\n'
    ']<]minimax[>[</invoke>]<]minimax[>[</tool_call>\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="now">\n'
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ("glm4", "the end of a value for the end of a call"): '<tool_call>get_weather<arg_key>city</arg_key>'
    '<arg_value>Zürich "süd"</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>'
    "<tool_call>now</arg_value>",
    ("hunyuan-v3", "the end of a value for the end of a call"): "<tool_call:opensource>get_weather<tool_sep:opensource>"
    '<arg_key:opensource>city</arg_key:opensource><arg_value:opensource>Zürich "süd"</arg_value:opensource>'
    "<arg_key:opensource>days</arg_key:opensource><arg_value:opensource>3</arg_value:opensource>"
    "</tool_call:opensource><tool_call:opensource>now</arg_value:opensource></tool_call:opensource>",
    ("kimi-k2", "no section, no numbers"): "<|tool_call_begin|>get_weather<|tool_call_argument_begin|>"
    f"{_WEATHER_JSON}<|tool_call_end|>\n<|tool_call_begin|>now<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
    ("gemma4", "quoted keys"): '<|tool_call>call:get_weather{<|"|>city<|"|>: <|"|>Zürich "süd"<|"|>, days: 3}'
    "<tool_call|><|tool_call>call:now{}<tool_call|>",
    ("gigachat", "messages of their own"): "function call<|role_sep|>\n"
    f'{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}<|message_sep|>\n\nfunction call<|role_sep|>\n'
    '{"name": "now", "arguments": {}}',
    ("command", "on lines of their own"): '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    f'"parameters": {_WEATHER_JSON}}},\n    {{"tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
    ("glm4", "without line breaks"): '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich "süd"</arg_value>'
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
}  # fmt: skip


def read(
    name: str | None,
    pieces: Iterable[str],
    *,
    reasoning: ReasoningPair | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prompt: str = "",
    continued: str = "",
    parallel: bool = True,
) -> list[Part]:
    """The parts of an answer, neighbours of one kind as one; the ids of its calls are "0", "1", ..."""
    format = AnswerFormat(FORMATS[name] if name else None, reasoning)
    ids = map(str, itertools.count())
    reader = AnswerReader(
        format, tools=tools, prompt=PromptEnd(prompt, continued), parallel=parallel, new_id=lambda: next(ids)
    )
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return joined([*parts, *reader.end()])


def calls_in(parts: Iterable[Part]) -> list[tuple[str, Any]]:
    """Name and arguments of each call, whose indices count from 0."""
    parts = list(parts)
    starts = [part for part in parts if isinstance(part, ToolCallStart)]
    assert [part.index for part in starts] == list(range(len(starts)))
    arguments = dict.fromkeys(range(len(starts)), "")
    for part in parts:
        if isinstance(part, ToolArguments):
            arguments[part.index] += part.text
    return [(part.name, json.loads(arguments[part.index])) for part in starts]


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def broken_in(parts: Iterable[Part]) -> list[int | None]:
    return [part.index for part in parts if isinstance(part, BrokenCall)]
