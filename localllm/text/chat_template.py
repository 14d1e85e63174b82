"""Renders messages to a prompt with the model's own chat template.

A small probe is rendered once to see what the template does. Content is then passed as a string or as parts, as the
template supports, and tools or keywords that it would ignore are refused by name.
Does not know: tokens, HTTP, which model it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from localllm.errors import CorruptModel, InvalidParameter, UnsupportedModel
from localllm.text.jinja_bounds import TemplateTooCostly
from localllm.text.jinja_sandbox import JinjaTemplate, TemplateRefusal
from localllm.text.messages import (
    MediaMarks,
    Message,
    TemplateTraits,
    for_template,
    images_of,
    plain_messages,
    with_empty_content,
    with_text_arguments,
    without_marks,
)
from localllm.text.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_ROLE_TEST = re.compile(
    r"""role\b["'\]]{0,4}\s{0,20}(?:==|!=|in|not in)\s{0,20}[\[(]?((?:[\s,]{0,20}["']\w{1,64}["']){1,64})"""
)
_MARK = "⟪the text to continue ends here⟫ "
"""Placed after the text to continue while rendering; its trailing space shows whether the template trims content."""


_FIRST, _SECOND = {"type": "text", "text": "qzfirst"}, {"type": "text", "text": "qzsecond"}
_IMAGES = ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}})
"""Forms of a picture's part that templates render."""
_SOUNDS = (
    {"type": "audio"}, {"type": "audio_url", "audio_url": {"url": ""}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
)  # fmt: skip
"""The same for a sound's part."""
_USER, _TOOL = {"role": "user"}, {"role": "tool", "tool_call_id": "123456789", "name": "look"}
_CALL = {"type": "function", "id": "123456789", "function": {"name": "look", "arguments": {}}}
_CALLED = ({"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [_CALL]})


class TemplateWithoutEnd(UnsupportedModel):
    """The template was stopped because it costs more to render than any real one."""


class ChatTemplate:
    """A model's chat template, or its templates by name ('default', 'tool_use'); None if the model has none."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        marks: MediaMarks | None = None,
    ) -> None:
        """marks: of a model that sees or hears."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens, self.marks = dict(special_tokens or {}), marks
        self._templates: dict[str, _Probed] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        return cls(tokenizer.chat_templates, tokenizer.special_tokens)

    def of_seeing(self, marks: MediaMarks) -> ChatTemplate:
        """Return this template for a model that sees or hears."""
        return ChatTemplate(self._sources, self._special_tokens, marks)

    def pictures(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool = False) -> list[Any]:
        """Return the media of the messages' pictures and sounds in the order of their marks in the prompt."""
        traits = self._template(with_tools=with_tools).traits
        plain = plain_messages(messages, traits, self.marks)
        return [part["media"] for message in plain for part in images_of(message)]

    def __bool__(self) -> bool:
        """True if the model has a template."""
        return bool(self._sources)

    def source(self) -> str:
        """Return the source of the template for messages with tools, or of the default one."""
        return self._sources.get("tool_use") or self._sources.get("default", "")

    def reads(self, variable: str) -> bool:
        """Return whether the template uses `variable` ('tools', 'enable_thinking', ...)."""
        if not self:
            return False
        return variable in self._template(with_tools=variable == "tools").jinja.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt, special tokens included: encode it with `add_special_tokens=False`.

        `continue_final_message` leaves the last message open, for the model to continue; it excludes
        `add_generation_prompt`. `kwargs` are the template's own switches, e.g. `enable_thinking=False`.
        Raises `InvalidParameter` (with the template's own message, if any), `CorruptModel`, `UnsupportedModel`.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt cannot be combined.",
                "The last message is either continued or followed by a new one.",
                "Set add_generation_prompt to false.",
                param="continue_final_message",
            )
        template = self._template(with_tools=bool(tools))
        self._check_known(template, tools, kwargs)
        plain = for_template(plain_messages(messages, template.traits, self.marks), template.traits, self.marks)
        if tools and self.marks is not None:
            tools = without_marks([*tools], self.marks)
        values = {
            **self._special_tokens,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            return _open_end(template.render([*plain[:-1], _marked(plain[-1])], values))
        return template.render(plain, values)

    def _template(self, *, with_tools: bool) -> _Probed:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            has = f"It has templates named {', '.join(self._sources)}." if self._sources else ""
            raise InvalidParameter(
                "This model has no chat template, so chat messages are not supported.",
                has or "It is probably a base model, which continues text.",
                "Send a prompt of your own to /v1/completions, or serve the model's instruct version.",
                param="messages",
            )
        if name not in self._templates:
            self._templates[name] = _Probed(_compile(self._sources[name]), self._special_tokens, self.marks)
        return self._templates[name]

    def _check_known(self, template: _Probed, tools: object, kwargs: Mapping[str, Any]) -> None:
        known = template.jinja.variables
        if tools and "tools" not in known:
            raise InvalidParameter(
                "This model's chat template does not support tools.",
                "It would omit them from the prompt.",
                "Leave out `tools`, or serve a model that was trained to call them.",
                param="tools",
            )
        for name in kwargs:
            if name in _RESERVED or name not in known:
                own = sorted(known - _RESERVED - self._special_tokens.keys() - {"raise_exception", "strftime_now"})
                raise InvalidParameter(
                    f"This model's chat template does not support {name!r}.",
                    f"Supported: {', '.join(own) or 'no arguments'}.",
                    param="chat_template_kwargs",
                )


class _Probed:
    """A compiled template and the behaviour that its probe showed."""

    def __init__(self, jinja: JinjaTemplate, special_tokens: Mapping[str, str], marks: MediaMarks | None) -> None:
        self.jinja = jinja
        self._special_tokens, self._marks = special_tokens, marks

    @cached_property
    def traits(self) -> TemplateTraits:
        source = self.jinja.source
        takes_parts = self._shows([_FIRST, _SECOND])
        marks = self._marks or MediaMarks("", "", ())
        image = next((part for part in _IMAGES if self._shows_media(part, marks.image, _USER)), None)
        audio = next((part for part in _SOUNDS if self._shows_media(part, marks.audio, _USER)), None)
        return TemplateTraits(
            named_roles=frozenset(re.findall(r"\w+", " ".join(_ROLE_TEST.findall(source)))),
            takes_strings=self._shows("qzfirst qzsecond") or not takes_parts,
            takes_parts=takes_parts,
            asks_for_none=bool(re.search(r"""\bcontent\b["'\]]*\s+is\s+(not\s+)?none""", source)),
            image_part=image,
            audio_part=audio,
            images_in_results=image is not None and self._shows_media(image, marks.image, _TOOL, _CALLED),
        )

    def _shows(self, content: object) -> bool:
        """Return whether a user's content is rendered as text: neither dropped nor printed as a Python object."""
        text = self._probe([{**_USER, "content": content}])
        return "qzfirst" in text and "qzsecond" in text and "'type'" not in text and '"type"' not in text

    def _shows_media(self, part: Message, mark: str, role: Message, before: Sequence[Message] = ()) -> bool:
        """Return whether a picture or sound among text is rendered as its mark."""
        if not mark:
            return False
        text = self._probe([*before, {**role, "content": [_FIRST, part, _SECOND]}])
        return text.count(mark) == 1 and "qzfirst" in text and "qzsecond" in text

    def _probe(self, messages: list[Message]) -> str:
        """Return the prompt of a probe; empty if the template does not support it."""
        values = {**self._special_tokens, "tools": None, "add_generation_prompt": True, "messages": messages}
        try:
            return self.jinja.render(values)
        except TemplateTooCostly as error:
            raise _too_costly(error) from error
        except Exception:  # any error means that the template does not support the probe
            return ""

    def render(self, messages: list[Message], values: Mapping[str, Any]) -> str:
        try:
            return self._render_calls_either_way(messages, values)
        except SecurityError as error:
            raise UnsupportedModel(
                "This model's chat template does something that the sandbox forbids.",
                f"{error}.",
                "Check where the model comes from before you use it in any program.",
            ) from error
        except TemplateTooCostly as error:
            raise _too_costly(error) from error
        except TemplateRefusal as error:
            raise InvalidParameter(
                "The model's chat template refuses these messages.", str(error), param="messages"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way on unexpected input
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise InvalidParameter(
                "The model's chat template cannot render these messages.", f"{kind}{error}", param="messages"
            ) from error

    def _render_calls_either_way(self, messages: list[Message], values: Mapping[str, Any]) -> str:
        """Render the messages, with tool arguments first as objects and then as text: a few templates concatenate them.

        A few others test whether content is none but take its length; they get an empty string.
        """
        try:
            return self.jinja.render({**values, "messages": messages})
        except TypeError:
            if not any("tool_calls" in message for message in messages):
                raise
        try:
            return self.jinja.render({**values, "messages": with_text_arguments(messages)})
        except TypeError:
            return self.jinja.render({**values, "messages": with_empty_content(messages)})


def _compile(source: str) -> JinjaTemplate:
    try:
        return JinjaTemplate(source)
    except TemplateSyntaxError as error:
        raise CorruptModel(
            "This model's chat template does not compile.",
            f"Line {error.lineno}: {error.message}",
            "/v1/completions still works; the template is in tokenizer_config.json or chat_template.jinja.",
        ) from error


def _too_costly(error: TemplateTooCostly) -> TemplateWithoutEnd:
    return TemplateWithoutEnd(
        "This model's chat template is too expensive to render.",
        f"While it renders some messages, {error.message}.",
        "Check where the model comes from before you use it in any program.",
    )


def _marked(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, list) and content and "text" in content[-1]:
        last = {**content[-1], "text": content[-1]["text"] + _MARK}
        return {**message, "content": [*content[:-1], last]}
    if not content or isinstance(content, list):
        raise InvalidParameter("The last message has no text to continue.", param="continue_final_message")
    return {**message, "content": content + _MARK}


def _open_end(prompt: str) -> str:
    """Return the prompt up to the mark.
    If the template trimmed the mark's space, it trims content, so the text before the mark is trimmed too."""
    before, mark, after = prompt.rpartition(_MARK.rstrip())
    if not mark:
        raise InvalidParameter(
            "The last message cannot be continued.",
            "The model's chat template omits its text from the prompt.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
