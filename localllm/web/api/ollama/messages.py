"""Translate Ollama's messages for the chat template.

In Ollama's API a call has no id, and a result names at most its tool; templates may need an id in both. So each call
gets an id from its position in the conversation, and each result the id of the oldest call that it can answer.
Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.web.api.ollama.schema import OllamaInputMessage
from localllm.web.api.pictures import picture_part

MOST_UNANSWERED = 64
"""Unanswered calls among which a result looks for its own: more than are made at once, and few enough for any number of
results.
"""


def plain_messages(messages: Sequence[OllamaInputMessage]) -> list[dict[str, Any]]:
    """Return the messages in the format of text/messages.py."""
    unanswered: list[tuple[str, Any]] = []  # (id, name) of each unanswered call
    plain = []
    for i, message in enumerate(messages):
        plain.append(_plain_message(message, i))
        if message.tool_calls:
            calls = [{**call, "id": call.get("id") or f"{i:05d}{j:04d}"} for j, call in enumerate(message.tool_calls)]
            plain[-1]["tool_calls"] = calls
            unanswered += [(call["id"], _name(call)) for call in calls]
        if message.role == "tool":
            _answer(plain[-1], unanswered)
    return plain


def is_to_be_continued(messages: Sequence[OllamaInputMessage]) -> bool:
    """Return whether the answer continues the last message: it is the assistant's and does not call a tool."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def _plain_message(message: OllamaInputMessage, index: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images:
        plain["content"] = with_pictures(plain["content"], message.images, f"messages[{index}].images")
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def with_pictures(text: str, images: Sequence[str], where: str) -> list[dict[str, Any]]:
    """Return the parts of a message with pictures, which Ollama's clients send as base64 without a type."""
    pictures = [picture_part(f"data:image/unknown;base64,{image}", f"{where}[{i}]") for i, image in enumerate(images)]
    return [{"type": "text", "text": text}, *pictures]


def _answer(result: dict[str, Any], unanswered: list[tuple[str, Any]]) -> None:
    for place, (id, name) in enumerate(unanswered[:MOST_UNANSWERED]):
        if result.get("name", name) == name and result.get("tool_call_id", id) == id:
            result |= {"tool_call_id": id, "name": name}
            del unanswered[place]
            return


def _name(call: dict[str, Any]) -> Any:
    """Return the name of a call. Invalid calls are refused later, by the renderer."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None
