"""An imported chat, and the tree of messages that every format becomes. Unusable fields are left out.

Does not know: any format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import RequestError
from localllm.text.answers.reasoning import PAIRS
from localllm.web.pages.chat.composer.settings import typed
from localllm.web.pages.chat.store import StoredMessage
from localllm.web.pages.chat.store.records import Role

MAX_MESSAGES = 20_000
"""Most messages of a chat."""

HINT = "Choose a chat export of localllm, ChatGPT, Open WebUI or LM Studio, or OpenAI's messages as JSON."
TITLE_CHARS = 60


class NotAChat(RequestError):
    """The file, or a part of it, cannot be imported."""

    code = "not_a_chat"


def no_messages(why: str = "") -> NotAChat:
    return NotAChat("This file holds no messages.", why, HINT)


def not_a_chat(why: str) -> NotAChat:
    return NotAChat("This file is not a chat export.", why, HINT)


@dataclass(frozen=True, slots=True)
class Imported:
    """A chat from a file; parents precede their children."""

    title: str
    settings: dict[str, str]
    messages: tuple[StoredMessage, ...]
    leaf: str  # last message of the branch to show


class MessageTree:
    """The messages of a chat as they are found, parents first."""

    def __init__(self) -> None:
        self.messages: dict[str, StoredMessage] = {}

    def add(
        self, role: Role, text: str, parent: str | None, *, reasoning: str = "", created_s: float = 0.0, model: str = ""
    ) -> str:
        """Add a message; return its id. Reasoning in the text of a reply becomes its reasoning."""
        if len(self.messages) >= MAX_MESSAGES:
            raise not_a_chat(f"A chat contains more than {MAX_MESSAGES:,} messages.")
        details = {"model": model} if model and role == "assistant" else {}
        if role == "assistant":
            text, inside = without_reasoning(text)
            reasoning = "\n\n".join(part for part in (reasoning, inside) if part)
        if reasoning:
            details["reasoning"] = reasoning
        message_id = str(len(self.messages))
        self.messages[message_id] = StoredMessage(message_id, parent, role, text, details, max(0.0, created_s))
        return message_id

    def extend(self, message_id: str, text: str, reasoning: str) -> None:
        """Append to a reply that came in several parts."""
        it = self.messages[message_id]
        text, inside = without_reasoning(text)
        details = dict(it.details)
        if thought := "\n\n".join(part for part in (details.get("reasoning", ""), reasoning, inside) if part):
            details["reasoning"] = thought
        whole = "\n\n".join(part for part in (it.text, text) if part)
        self.messages[message_id] = replace(it, text=whole, details=details)

    def chat(self, title: str, system: str, leaf: str | None) -> Imported | None:
        """Return the chat; None if it has no message. A leaf that is not known: the last message."""
        if not self.messages:
            return None
        messages = tuple(self.messages.values())
        settings = typed({"system": system}, {}) if system.strip() else {}
        return Imported(titled(title, messages), settings, messages, leaf or messages[-1].id)


def titled(title: str, messages: Iterable[StoredMessage]) -> str:
    """Return a title of one line: the given one, or the beginning of the first question."""
    first = next((message.text for message in messages if message.role == "user"), "")
    line = " ".join((title or first).split()) or "Imported chat"
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1].rstrip() + "…"


def without_reasoning(text: str) -> tuple[str, str]:
    """Return a reply without the reasoning at its start, and the reasoning. One that is not closed stays text."""
    stripped = text.lstrip()
    for pair in PAIRS:
        if stripped.startswith(pair.opener) and pair.closer in stripped:
            thought, _, rest = stripped.removeprefix(pair.opener).partition(pair.closer)
            return rest.lstrip(), thought.strip()
    return text, ""


def string(value: object) -> str:
    """Return a value that should be a text; empty if it is none."""
    return value if isinstance(value, str) else ""


def number(value: object) -> float:
    """Return a value that should be a finite number; 0 if it is none."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def rows(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of a value that should be a list of objects."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
