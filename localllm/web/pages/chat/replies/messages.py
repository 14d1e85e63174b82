"""Turn stored messages into the input of a chat template, and choose the messages that the model reads.

A message of the user may contain tool results (`details["results"]`), files (`details["files"]`) or pictures
(`details["pictures"]`); a reply may contain reasoning and calls. A call whose arguments are not a JSON object cannot be
printed by any template and becomes text; so does one of a tool that was not offered.
A turn begins with a message that the user typed, and ends before the next such message: the reply, its tool calls and
their results belong to it. The model reads all turns but failed ones, and but the oldest that were left out: by whole
turns, so that a reply keeps its question and a call its result.
Does not know: tokens, templates, where messages are stored, the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from localllm.text.answers.whole import ToolCall
from localllm.web.pages.chat.files.pictures import content_of
from localllm.web.pages.chat.store import StoredMessage

SUMMARY_OF = "summary_of"
"""The detail of a reply that is the summary of another chat: {"chat": id, "title": text}."""


def is_typed(message: StoredMessage) -> bool:
    """Return whether the person typed the message; tool results are also messages of the user."""
    return message.role == "user" and not message.details.get("results")


def is_summary(message: StoredMessage) -> bool:
    return message.role == "assistant" and SUMMARY_OF in message.details


def has_failed(message: StoredMessage) -> bool:
    """Return whether a reply failed before its first word."""
    details = message.details
    return message.role == "assistant" and not message.text and bool(details.get("error")) and not details.get("calls")


def failed_turns(messages: Sequence[StoredMessage]) -> set[str]:
    """Return the ids of failed replies, and of the typed messages that they failed to answer."""
    found = set[str]()
    for at, message in enumerate(messages):
        if has_failed(message):
            found.add(message.id)
            if at and is_typed(messages[at - 1]):
                found.add(messages[at - 1].id)
    return found


def first_read(messages: Sequence[StoredMessage], num_left_out: int) -> int:
    """Return the index of the first message that the model reads: `num_left_out`, or the turn's beginning before it."""
    at = min(num_left_out, len(messages))
    while 0 < at < len(messages) and not is_typed(messages[at]):
        at -= 1
    return at


def turn_beginnings(messages: Sequence[StoredMessage], new: StoredMessage | None) -> list[int]:
    """Return, in order, the indices from which the model could read on if all before them were left out.

    new: the message that will follow. If the person typed it, everything before it may be left out.
    """
    found = [at for at, message in enumerate(messages) if at and is_typed(message)]
    return [*found, len(messages)] if messages and new is not None and is_typed(new) else found


SUMMARY = "Summary of our conversation so far:"
NO_RESULT = "No result was given."
"""Given to the model for a call without a result, because templates refuse an unanswered call."""


def messages_of(system: str, messages: Sequence[StoredMessage]) -> list[dict[str, Any]]:
    """Return the messages, first to last, without failed turns. A summary goes in front of the message after it."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    failed, summary = failed_turns(messages), ""
    for message in messages:
        if message.id in failed:
            continue
        if is_summary(message):
            summary = message.text
            continue
        if message.role == "assistant":
            found.append(reply_message(message))
            continue
        results = message.details.get("results", [])
        asked = found[-1].get("tool_calls", []) if found else []
        found += _answers(asked, results)
        if not results:
            text = with_files(message.text, files_of(message.details))
            text = f"{SUMMARY}\n\n{summary}\n\n{text}" if summary else text
            found.append({"role": "user", "content": content_of(text, message.details.get("pictures", ()))})
            summary = ""
    return found


def reply_message(message: StoredMessage) -> dict[str, Any]:
    calls = calls_of(message.details)
    whole = [calls[number] for number in awaited_calls(message.details)]
    said = [message.text, *(f"{call.name} {call.arguments}" for call in calls if call not in whole)]
    found: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(text for text in said if text)}
    if message.details.get("reasoning"):
        found["reasoning_content"] = message.details["reasoning"]
    if whole:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole
        ]
    return found


def _answers(asked: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    by_id = {result["id"]: result["text"] for result in results}
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": by_id.get(call["id"], NO_RESULT),
        }
        for call in asked
    ]


def calls_of(details: Mapping[str, Any]) -> list[ToolCall]:
    return [ToolCall(call["id"], call["name"], call["arguments"]) for call in details.get("calls", [])]


def awaited_calls(details: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the calls that get a result: of offered tools, and with a JSON object as arguments."""
    return [
        number
        for number, call in enumerate(calls_of(details))
        if call.arguments_object() is not None and not details["calls"][number].get("not_offered")
    ]


def files_of(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (name, text) pairs of the files that are read whole."""
    return [(file["name"], file["text"]) for file in details.get("files", []) if "text" in file]


def with_files(text: str, files: Sequence[tuple[str, str]]) -> str:
    """Return each file under its name, in a fence that nothing inside closes, followed by the user's text."""
    found = [f"File `{name}`:\n\n{fenced(content, PurePath(name).suffix[1:])}" for name, content in files]
    return "\n\n".join([*found, *([text] if text else [])])


def fenced(text: str, language: str = "") -> str:
    """Return the text in a fence that nothing inside closes."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    end = "" if text.endswith("\n") else "\n"
    return f"{fence}{language}\n{text}{end}{fence}"
