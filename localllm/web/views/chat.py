"""Views of the chat page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Loading, Shell, View


@dataclass(frozen=True, slots=True)
class Figures(View):
    """The line of figures below a finished reply."""

    template: ClassVar[str] = "chat/_figures.html"
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str  # stop, length, abort, error
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    context_tokens: int | None = None  # of the model, to set the sum against


@dataclass(frozen=True, slots=True)
class OpenBlock(View):
    """The end of a reply that is still being written: a Markdown block that has not closed, as plain text."""

    template: ClassVar[str] = "chat/_open_block.html"
    message_id: str
    kind: Literal["text", "code"] = "text"
    text: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage(View):
    """One message. `html` is safe markup that web/pages/markdown.py made; `text` is what the user typed."""

    template: ClassVar[str] = "chat/_message.html"
    id: str
    role: Literal["user", "assistant"]
    text: str = ""
    html: str = ""
    model: str = ""
    open: OpenBlock | None = None  # present while the reply is being written
    stream_url: str | None = None  # where to follow it
    figures: Figures | None = None
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ComposerAction(View):
    """The composer's button: send, or stop the reply that is being written."""

    template: ClassVar[str] = "chat/_composer_action.html"
    stop_url: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling(View):
    """The drawer with system prompt and sampling: what the user set (empty: default) and what the defaults are."""

    template: ClassVar[str] = "chat/_sampling_drawer.html"
    system: str = ""
    temperature: str = ""
    max_tokens: str = ""
    default_temperature: str = "1"
    default_max_tokens: str = "up to the context"
    source: str = "the server's defaults"  # where the default temperature comes from


@dataclass(frozen=True, slots=True)
class Composer(View):
    """Where the next message is typed."""

    template: ClassVar[str] = "chat/_composer.html"
    conversation_id: str
    sampling: Sampling
    action: ComposerAction
    text: str = ""
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class RecentChat:
    """A link to a conversation that this browser had."""

    url: str
    title: str


@dataclass(frozen=True, slots=True)
class EmptyChat(View):
    """What a new chat shows: what answers here, and three ways to begin."""

    template: ClassVar[str] = "chat/_empty_chat.html"
    model: str
    context_tokens: int
    examples: tuple[str, ...]
    recent: tuple[RecentChat, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPage(View):
    """`/` and `/c/{id}`."""

    template: ClassVar[str] = "chat/page.html"
    shell: Shell
    messages: tuple[ChatMessage, ...] = ()
    composer: Composer | None = None
    empty: EmptyChat | None = None
    loading: Loading | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn(View):
    """Answer to a message posted by htmx: the user's message, the reply's place, the composer's new state."""

    template: ClassVar[str] = "chat/_turn.html"
    user: ChatMessage
    reply: ChatMessage
    action: ComposerAction
    conversation_id: str


@dataclass(frozen=True, slots=True)
class ReplyProgress(View):
    """News of a reply: finished blocks, and the open block whole (`open`) or only its new end (`appended`)."""

    template: ClassVar[str] = "chat/_reply_progress.html"
    message_id: str
    html: str = ""  # blocks that closed since the last news
    replaces: bool = False  # `html` is the whole reply so far: first news of a connection
    open: OpenBlock | None = None
    appended: str = ""


@dataclass(frozen=True, slots=True)
class ReplyFinished(View):
    """The last news of a reply."""

    template: ClassVar[str] = "chat/_reply_finished.html"
    message: ChatMessage
    action: ComposerAction
    announcement: str
