"""Conversations of the chat page, kept in memory with a bound; the oldest unused one makes room.

The page knows only `Conversations.new/get/touch`, and replies are found by message id, so a store on disk can take
this one's place.
Does not know: HTTP, templates, the engine (a reply being written is `web/pages/replies.py`).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from localllm.web.pages.chat.replies import Reply

MAX_CONVERSATIONS = 200
MAX_MESSAGE_CHARS = 256 * 1024
"""A message longer than this is refused before anything is tokenised."""

MAX_CONVERSATION_CHARS = 2_000_000
"""A conversation takes no further message beyond this, whatever the model's context is."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the user said, and the reply to it."""

    id: str
    user_text: str
    reply: Reply

    @property
    def counts(self) -> bool:
        """Whether later turns see this exchange: a reply that failed before its first word does not."""
        return bool(self.reply.text) or self.reply.error is None


@dataclass(slots=True)
class Conversation:
    """A chat: its exchanges in order, and the settings its next message starts from."""

    id: str
    system: str = ""
    temperature: str = ""
    max_tokens: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def title(self) -> str:
        first = " ".join(self.exchanges[0].user_text.split()) if self.exchanges else "New chat"
        return first if len(first) <= 60 else first[:59].rstrip() + "…"

    @property
    def num_chars(self) -> int:
        return sum(len(exchange.user_text) + len(exchange.reply.text) for exchange in self.exchanges)

    @property
    def writing(self) -> Exchange | None:
        """The exchange whose reply is being written."""
        last = self.exchanges[-1] if self.exchanges else None
        return last if last is not None and not last.reply.done else None

    def find(self, exchange_id: str) -> Exchange | None:
        return next((exchange for exchange in self.exchanges if exchange.id == exchange_id), None)

    def history(self, user_text: str) -> list[dict[str, str]]:
        """The messages a chat template takes, ending with the new one."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            if exchange.counts:
                messages.append({"role": "user", "content": exchange.user_text})
                messages.append({"role": "assistant", "content": exchange.reply.text})
        return [*messages, {"role": "user", "content": user_text}]


class Conversations:
    """The last `limit` conversations. Ids are unguessable: knowing one is what lets a browser open it."""

    def __init__(self, limit: int = MAX_CONVERSATIONS) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()

    def new(self) -> Conversation:
        conversation = Conversation(id=new_id())
        self._by_id[conversation.id] = conversation
        while len(self._by_id) > self._limit:
            _, dropped = self._by_id.popitem(last=False)
            if dropped.writing:
                dropped.writing.reply.cancel()
        return conversation

    def get(self, conversation_id: str) -> Conversation | None:
        """The conversation, which now counts as used; None when it never was or had to make room."""
        conversation = self._by_id.get(conversation_id)
        if conversation is not None:
            self._by_id.move_to_end(conversation_id)
        return conversation


def new_id() -> str:
    return secrets.token_urlsafe(12)
