"""Prompts with placeholders such as {{language}}, and the JSON file that holds prompts.

    {"format": "localllm-prompts", "version": 1, "prompts": [{"name", "text", "settings": {...}}]}

Does not know: HTTP, where prompts are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from localllm.errors import InvalidParameter, RequestError
from localllm.units import format_count
from localllm.web.pages.chat.composer.settings import MAX_MESSAGE_CHARS, NAMES, typed
from localllm.web.pages.chat.store import SavedPrompt
from localllm.web.pages.chat.store.saved_prompts import MAX_PROMPTS

MAX_NAME_CHARS = 60
MAX_PLACEHOLDERS = 20
FORMAT, VERSION = "localllm-prompts", 1
_PLACEHOLDER = re.compile(r"\{\{[ \t]*([^{}\s][^{}\n]{0,59}?)[ \t]*\}\}")


class NotPrompts(RequestError):
    """The file cannot be imported."""

    code = "not_prompts"


class _PromptItem(msgspec.Struct):
    name: str
    text: str = ""
    settings: dict[str, str] = {}


class _PromptFile(msgspec.Struct):
    prompts: list[_PromptItem]
    format: str = FORMAT
    version: int = VERSION


def placeholders(text: str) -> tuple[str, ...]:
    """Return the names of the placeholders, in order of their first use."""
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(text)))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with a value for each placeholder; one without a value stays."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1]) or match[0], text)


def checked_name(name: str, what: str = "prompt") -> str:
    """Return a name in one line. Raises `InvalidParameter` for an empty or a long one."""
    found = " ".join(name.split())
    if not found:
        raise InvalidParameter(f"The {what} has no name.", hint="Type one first.", param="name")
    if len(found) > MAX_NAME_CHARS:
        why = f"It has {len(found)} characters; at most {MAX_NAME_CHARS} are allowed."
        raise InvalidParameter(f"The name of the {what} is too long.", why, param="name")
    return found


def checked(name: str, text: str, settings: Mapping[str, str]) -> SavedPrompt:
    """Return a prompt, without an id. Raises `RequestError` for one that cannot be used."""
    name, text = checked_name(name), text.strip().replace("\r\n", "\n")
    if not text and not settings:
        hint = "Type a text, a system prompt or a setting."
        raise InvalidParameter(f"The prompt {name!r} has neither text nor settings.", hint=hint, param="text")
    if len(text) > MAX_MESSAGE_CHARS:
        why = f"It has {format_count(len(text))} characters; at most {format_count(MAX_MESSAGE_CHARS)} are allowed."
        raise InvalidParameter(f"The text of the prompt {name!r} is too long.", why, param="text")
    if len(placeholders(text)) > MAX_PLACEHOLDERS:
        why = f"It has {len(placeholders(text))}; at most {MAX_PLACEHOLDERS} are allowed."
        raise InvalidParameter(f"The prompt {name!r} has too many placeholders.", why, param="text")
    return SavedPrompt("", name, text, settings)


def as_file(prompts: Sequence[SavedPrompt]) -> bytes:
    """Return prompts as a file that can be imported."""
    items = [_PromptItem(each.name, each.text, dict(each.settings)) for each in prompts]
    return msgspec.json.format(msgspec.json.encode(_PromptFile(items)), indent=1)


def read(body: bytes) -> list[SavedPrompt]:
    """Parse a file of prompts. Raises `NotPrompts`, and the errors of a prompt's settings."""
    try:
        file = msgspec.json.decode(body, type=_PromptFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refusal(f"{error}.") from error
    if file.format != FORMAT or file.version != VERSION:
        raise _refusal(f"Its format is {file.format[:40]} {file.version}; supported: {FORMAT} {VERSION}.")
    if not file.prompts:
        raise _refusal("It contains no prompts.")
    if len(file.prompts) > MAX_PROMPTS:
        raise _refusal(f"It contains {format_count(len(file.prompts))} prompts; at most {MAX_PROMPTS} are allowed.")
    return [checked(each.name, each.text, typed(_known(each), {})) for each in file.prompts]


def _known(item: _PromptItem) -> dict[str, str]:
    odd = next((name for name in item.settings if name not in NAMES), None)
    if odd is not None:
        raise _refusal(f"The prompt {item.name[:40]!r} has the setting {odd[:40]!r}, which is unknown here.")
    return item.settings


def _refusal(why: str) -> NotPrompts:
    return NotPrompts("This file does not hold prompts.", why, "Choose a JSON file that was exported here.")
