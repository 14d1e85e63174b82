"""Validates a client's messages and converts them to the form that a chat template expects.

Templates differ in what they accept: content as a string or as parts, a developer role, tool arguments as objects.
`TemplateTraits` describes the template; this module makes a list of plain dicts for it, and refuses messages that the
template cannot render. The caller's objects are never changed.

A picture is a part {"type": "image", "media": anything}, a sound {"type": "audio", "media": anything}. A template gets
it in the form that it renders as the family's mark, or the mark in the text if it renders none. Marks in the texts of a
request are broken up, so that no text can stand for a picture or a sound.
Does not know: Jinja, tokens, HTTP, what a picture or a sound is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localllm.errors import InvalidParameter, UnsupportedParameter

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
OTHER_MEDIA = {
    "video": "a video", "video_url": "a video", "input_video": "a video", "audio": "sound", "audio_url": "sound",
    "input_audio": "sound", "image_embeds": "embeddings of a picture", "file": "a file", "input_file": "a file",
}  # fmt: skip
MEDIA = ("image", "audio")
"""Parts of other media, which are refused by name."""
BREAK = "\u200b"
"""Zero-width space behind the first character of a mark that a text contains."""
Message = dict[str, Any]


class MediaMarks(NamedTuple):
    """The special texts of a family of models that see or hear."""

    image: str  # what a chat template writes for a picture; empty: the model does not see
    audio: str  # the same for a sound
    all: tuple[str, ...]  # all texts that no message may contain

    def of(self, part: Mapping[str, Any]) -> str:
        return self.audio if part["type"] == "audio" else self.image


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The features that one chat template supports."""

    named_roles: frozenset[str] = frozenset()  # roles named in its source
    takes_strings: bool = True  # renders content that is a string
    takes_parts: bool = False  # renders content that is a list of parts
    asks_for_none: bool = False  # expects None, not an empty string, for "no content"
    image_part: Message | None = None  # the part that it renders as a picture's mark; None: it renders none
    audio_part: Message | None = None  # the same for a sound
    images_in_results: bool = False  # renders pictures in a tool's result, too

    def part_of(self, part: Mapping[str, Any]) -> Message | None:
        return self.audio_part if part["type"] == "audio" else self.image_part


def plain_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits, marks: MediaMarks | None = None
) -> list[Message]:
    """Return plain messages, in which pictures are still parts (`for_template` shows them). Raises `InvalidParameter`
    that names the wrong message.

    marks: of a model that sees or hears. Pictures in results of tools get a message of their own if the template would
    drop them.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _refusal("messages must be a list.", f"Got {type(messages).__name__}.")
    if not messages:
        raise _refusal("messages is empty: there is nothing to answer.")
    plain = [_plain_message(message, f"messages[{i}]", traits, marks) for i, message in enumerate(messages)]
    if marks is None:
        return plain
    plain = [without_marks(message, marks) for message in plain]
    return plain if traits.images_in_results else _with_images_behind_results(plain)


def without_marks(value: Any, marks: MediaMarks) -> Any:
    """Return a message or tool in which every mark in a text is broken up. Pictures are left as they are."""
    if isinstance(value, str):
        for mark in marks.all:
            value = value.replace(mark, mark[0] + BREAK + mark[1:])
        return value
    if isinstance(value, list):
        return [without_marks(each, marks) for each in value]
    if isinstance(value, dict):
        return {key: each if key == "media" else without_marks(each, marks) for key, each in value.items()}
    return value


def _with_images_behind_results(messages: list[Message]) -> list[Message]:
    """Return the messages with the pictures of consecutive results of tools in a user's message behind them."""
    found, moved = list[Message](), list[Message]()
    for message in [*messages, {"role": ""}]:
        if moved and message["role"] != "tool":
            found.append({"role": "user", "content": moved})
            moved = []
        images = images_of(message) if message["role"] == "tool" else []
        if images:
            name = f" of {message['name']}" if message.get("name") else ""
            what = "Pictures" if any(part["type"] == "image" for part in images) else "Sound"
            moved += [{"type": "text", "text": f"{what} from the result{name}:"}, *images]
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            message = {**message, "content": "\n".join(texts) or f"See the {what.lower()} below."}
        found.append(message)
    return found[:-1]


def images_of(message: Mapping[str, Any]) -> list[Message]:
    """Return the parts of a message that are pictures or sounds."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") in MEDIA and "media" in part]


def for_template(messages: Sequence[Message], traits: TemplateTraits, marks: MediaMarks | None) -> list[Message]:
    """Return plain messages with their pictures in the form that the template renders."""
    if marks is None:
        return list(messages)
    return [{**message, "content": _shown(message["content"], traits, marks)} if images_of(message) else message
            for message in messages]  # fmt: skip


def _shown(parts: list[Message], traits: TemplateTraits, marks: MediaMarks) -> list[Message] | str:
    media = [part for part in parts if part["type"] in MEDIA]
    if all(traits.part_of(part) for part in media):
        return [traits.part_of(part) or part if part in media else part for part in parts]
    text = ""
    for part in parts:  # text follows the mark of a sound directly
        text += (marks.of(part) if part in media else part["text"]) + ("" if part["type"] == "audio" else "\n")
    return text.removesuffix("\n")


def _plain_message(message: Mapping[str, Any], where: str, traits: TemplateTraits, marks: MediaMarks | None) -> Message:
    if not isinstance(message, Mapping):
        raise _refusal(f"{where} must be an object with a role and content.", f"Got {type(message).__name__}.")
    # Clients send absent fields as null, while templates test whether a key exists.
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = _role(plain.get("role"), where, traits)
    calls = _tool_calls(plain.pop("tool_calls", None), where)
    if calls:
        plain["tool_calls"] = calls
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    if reasoning is not None:
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    may_be_absent = plain["role"] == "assistant" and (bool(calls) or reasoning is not None)
    plain["content"] = _content(plain.get("content"), where, traits, marks, may_be_absent)
    return plain


def _role(role: object, where: str, traits: TemplateTraits) -> str:
    if isinstance(role, str):
        if role == "developer" and role not in traits.named_roles:
            return "system"
        if role == "function":  # the name of tool messages until 2023
            return "tool"
        if role in ROLES or role in traits.named_roles:
            return role
    got = "It has none." if role is None else f"Got {role!r}."
    raise _refusal(f"{where} has an unknown role.", got, f"Use one of: {', '.join(ROLES[:5])}.")


def _content(
    content: object, where: str, traits: TemplateTraits, marks: MediaMarks | None, may_be_absent: bool
) -> str | list[Message] | None:
    if content is None:
        if not may_be_absent:
            raise _refusal(f"{where} has no content.", "Only an assistant message with tool calls may omit it.")
        return None if traits.asks_for_none else ""
    if isinstance(content, str):
        return content if traits.takes_strings else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise _refusal(f"{where}.content must be text or a list of parts.", f"Got {type(content).__name__}.")
    images = images_of({"content": content}) if marks is not None else []
    parts = [
        dict(part) if part in images else {"type": "text", "text": _part_text(part, f"{where}.content[{i}]")}
        for i, part in enumerate(content)
    ]
    return parts if traits.takes_parts or images else "\n".join([part["text"] for part in parts])


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refusal(f"{where} must be an object with a type.", f"Got {type(part).__name__}.")
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if isinstance(kind, str) and kind in OTHER_MEDIA:
        hint = "Send some of its frames as pictures." if "video" in kind else ""
        why = "This model does not hear." if OTHER_MEDIA[kind] == "sound" else "Only pictures are read."
        raise UnsupportedParameter(f"{where} is {OTHER_MEDIA[kind]}.", why, hint, param=where)
    if kind not in (*TEXT_PARTS, "refusal"):
        raise _refusal(f"{where} is of type {kind!r}.", "Supported: text.", 'Send {"type": "text", "text": ...}.')
    if not isinstance(text, str):
        raise _refusal(f"{where}.text must be a string.", f"Got {type(text).__name__}.")
    return text


def _tool_calls(calls: object, where: str) -> list[Message]:
    """Return the calls with arguments as objects, which templates print as JSON themselves."""
    if calls is None:
        return []
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise _refusal(f"{where}.tool_calls must be a list.", f"Got {type(calls).__name__}.")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refusal(f"{where} must name a function.", 'Expected {"type": "function", "function": {"name": ...}}.')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise _refusal(f"{where}.function.arguments is not JSON.", f"{error}.") from error
    return {**call, "function": {**function, "arguments": arguments}}


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool arguments as JSON text, for templates that concatenate them."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def with_empty_content(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an empty string for missing content."""
    return [{**message, "content": ""} if message["content"] is None else message for message in messages]


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _refusal(what: str, why: str = "", hint: str = "") -> InvalidParameter:
    return InvalidParameter(what, why, hint, param="messages")


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, leaving out parts of other types."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join([text for part in parts if isinstance(text := part.get("text"), str)])
