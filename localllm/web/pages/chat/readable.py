"""The messages of a branch that the model reads: all but failed turns, and the oldest that were left out.

A turn begins with a message that the person typed, and ends before the next such message: the reply, its tool calls and
their results belong to it. Messages are left out by whole turns, so that a reply keeps its question and a call its
result.
Does not know: tokens, templates, where messages are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

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
