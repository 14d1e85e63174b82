"""Detects the answer format of a model from its chat template.

The template prints earlier calls as the model was trained to write them. It is therefore given a conversation with one
call, and the format whose parser finds that call in the prompt is the model's. If a template does not print calls, the
markers in its source decide.
Does not know: tokens, which model it is.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import LocalLLMError
from localllm.text.answers.formats import FORMATS
from localllm.text.answers.formats.messages import CHANNEL
from localllm.text.answers.parts import Content, ToolArguments, ToolCallStart
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PAIRS
from localllm.text.answers.values import parse_json
from localllm.text.chat_template import ChatTemplate, TemplateWithoutEnd

_ARGUMENTS = {"qzkey": "qzvalue"}
_PARAMETERS = {"type": "object", "properties": {"qzkey": {"type": "string", "description": "qz"}}}
_TOOL = {"type": "function", "function": {"name": "qzprobe", "description": "qz", "parameters": _PARAMETERS}}
_CALL = {"id": "qzprobe00", "type": "function", "function": {"name": "qzprobe", "arguments": _ARGUMENTS}}
_ASKED: dict[str, Any] = {"role": "user", "content": "qzasked"}
_CALLED: dict[str, Any] = {"role": "assistant", "tool_calls": [_CALL]}
_TOLD: dict[str, Any] = {"role": "tool", "tool_call_id": "qzprobe00", "name": "qzprobe", "content": "qztold"}

_SOURCE_MARKS = (
    ("harmony", CHANNEL),
    ("muse", "<atem:function_calls>"),
    ("inkling", "<|content_invoke_tool_json|>"),
    ("minimax-m3", "]<]minimax[>["),
    ("kimi-k2", "<|tool_calls_section_begin|>"),
    ("deepseek-v3", "<｜tool▁calls▁begin｜>"),
    ("mistral", "[TOOL_CALLS]"),
    ("seed-oss", "<seed:tool_call>"),
    ("function-gemma", "<start_function_call>"),
    ("qwen3-coder", "<function="),
    ("hunyuan-v3-preview", "<tool_sep>"),
    ("glm4", "<arg_key>"),
    ("phi4", "<|/tool|>"),  # around the tools; their templates do not show the markers of a call
    ("granite", "<|tool_call|>"),
    ("hermes", "<tool_call>"),
    ("llama3-json", "<|python_tag|>"),
    ("pythonic", "<|tool_call_start|>"),
    ("pythonic", "<|tool_list_start|>"),
    ("pythonic", "<|python_start|>"),
    ("pythonic", "List of tools: ["),  # LFM2.5, whose template contains no marker
)
_FRAMES: dict[str, tuple[str, ...]] = {
    "<|START_RESPONSE|>": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "<|START_TEXT|>": ("<|START_TEXT|>", "<|END_TEXT|>"),
    "<|content|>": ("<|content|>", "<|begin|>assistant", "<|end|>"),
    "<|message_sep|>": ("<|message_sep|>",),
    "</answer>": ("<answer>\n", "\n</answer>"),  # Hunyuan, whose template splits earlier answers there
}
"""What a template's source contains -> the markers around content."""


def answer_format(template: ChatTemplate) -> AnswerFormat:
    """Return how a model with this template writes tool calls and reasoning."""
    source = template.source()
    behind, own = _printed_call(template) or ("", "")
    name = _reader_of(behind, own) if behind else next((name for name, mark in _SOURCE_MARKS if mark in source), None)
    tools = FORMATS[name] if name else None
    named = source + behind  # a template that builds its markers from parts shows them only in its output
    pair = next((pair for pair in PAIRS if pair.opener in named or pair.closer in named), None)
    if tools and tools.reasoning:
        pair = tools.reasoning
    return AnswerFormat(tools, pair, next((frame for mark, frame in _FRAMES.items() if mark in source), ()))


def _printed_call(template: ChatTemplate) -> tuple[str, str] | None:
    """Return the prompt after the question that contains the call, and the part of it that the model would write."""
    for messages in ([_ASKED, _CALLED], [_ASKED, _CALLED, _TOLD]):
        for tools in ([_TOOL], None):
            printed = _render(template, messages, tools)
            behind = printed.partition("qzasked")[2]
            if "qzprobe" in behind and "qzvalue" in behind:
                prompt = _render(template, messages[:1], tools, add_generation_prompt=True)
                return behind, printed.removeprefix(prompt) if printed.startswith(prompt) else ""
    return None


def _render(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, **options: bool) -> str:
    try:
        return template.render(messages, tools=tools, **{"add_generation_prompt": False, **options})
    except TemplateWithoutEnd:
        raise  # further attempts would take as long
    except LocalLLMError:  # no template, or it does not support these messages
        return ""


def _reader_of(behind: str, own: str) -> str | None:
    """Return the format that parses the printed call and leaves the least text around it."""
    texts = {name: own if format.bare else behind for name, format in FORMATS.items()}
    left = {name: length for name in FORMATS if (length := _num_left(name, texts[name])) is not None}
    return min(left, key=left.__getitem__, default=None)


def _num_left(name: str, text: str) -> int | None:
    """Return the number of characters outside the call; None if the call is not found."""
    reader = AnswerReader(AnswerFormat(FORMATS[name]), tools=[_TOOL])
    parts = [*reader.feed(text), *reader.end()]
    arguments = "".join(part.text for part in parts if isinstance(part, ToolArguments))
    if not any(isinstance(part, ToolCallStart) for part in parts) or not _is_probe(arguments):
        return None
    return sum(len(part.text) for part in parts if isinstance(part, Content))


def _is_probe(arguments: str) -> bool:
    try:
        return bool(parse_json(arguments) == _ARGUMENTS)
    except ValueError:
        return False
