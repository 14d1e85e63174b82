"""From Ollama's messages to what a chat template reads.

A call of theirs has no id and its result says at most the tool's name; templates may want the id in both. So a call
gets one by its place in the conversation, and a result that of the oldest call which it can answer.
Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.web.api.ollama.schema import Message
from localllm.web.errors import UnsupportedParameter

MOST_UNANSWERED = 64
"""Calls among which a result looks for its own: more than come at once, and few enough for any number of results."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As text/messages.py reads them."""
    unanswered: list[tuple[str, Any]] = []  # ids and names of calls
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


def is_to_be_continued(messages: Sequence[Message]) -> bool:
    """The answer goes on from a last message of the assistant's, unless that calls a tool."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    if message.images:
        name = f"messages[{index}].images"
        raise UnsupportedParameter(f"{name!r} is not supported.", "Only text is read here.", param=name)
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _answer(result: dict[str, Any], unanswered: list[tuple[str, Any]]) -> None:
    for place, (id, name) in enumerate(unanswered[:MOST_UNANSWERED]):
        if result.get("name", name) == name and result.get("tool_call_id", id) == id:
            result |= {"tool_call_id": id, "name": name}
            del unanswered[place]
            return


def _name(call: dict[str, Any]) -> Any:
    """Calls that cannot be read are refused where they are rendered."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None
