"""The format of a chat, told by its fields.

Does not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from localllm.web.api.exchange import require_few_values
from localllm.web.pages.chat.imports import chatgpt, lm_studio, open_webui, own
from localllm.web.pages.chat.imports.records import Imported, not_a_chat


class _ProbedMessage(msgspec.Struct):
    versions: msgspec.Raw = msgspec.Raw()
    role: msgspec.Raw = msgspec.Raw()


class _Probe(msgspec.Struct):
    """The fields that tell the formats apart; their values are not parsed."""

    mapping: msgspec.Raw = msgspec.Raw()
    chat: msgspec.Raw = msgspec.Raw()
    messages: list[_ProbedMessage] = []


def is_message(raw: bytes) -> bool:
    """Return whether an element is a message of OpenAI's API, and so a part of one chat."""
    try:
        return bool(bytes(msgspec.json.decode(raw, type=_ProbedMessage).role))
    except (msgspec.DecodeError, RecursionError):
        return False


def read(raw: bytes) -> Imported | None:
    """Return a chat; None if it has no message. Raises `NotAChat`, and the errors of settings."""
    require_few_values(raw)
    try:
        other = _other_format(msgspec.json.decode(raw, type=_Probe))
        return other(msgspec.json.decode(raw)) if other is not None else own.read(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise not_a_chat(f"{error}.") from error


def _other_format(probe: _Probe) -> Callable[[Mapping[str, Any]], Imported | None] | None:
    if bytes(probe.mapping):
        return chatgpt.read
    if bytes(probe.chat):
        return open_webui.read
    return lm_studio.read if any(bytes(message.versions) for message in probe.messages) else None
