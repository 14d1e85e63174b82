"""Views of the chat page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from localllm.web.views.chats import ChatHead, ChatList, Undo
from localllm.web.views.messages import AttachmentChip, Attachments, ResultForm, Thinking, ToolCallCard, ToolResult
from localllm.web.views.shared import ErrorNotice, Loading, Shell, View


@dataclass(frozen=True, slots=True)
class Figures(View):
    """The line of figures below a finished reply."""

    template: ClassVar[str] = "chat/_figures.html"
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str  # stop, length, abort, error, interrupted
    ttft_s: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class OpenBlock(View):
    """The end of a reply that is still being written: a Markdown block that has not closed, as plain text."""

    template: ClassVar[str] = "chat/_open_block.html"
    message_id: str
    kind: Literal["text", "code", "note"] = "text"
    text: str = ""


@dataclass(frozen=True, slots=True)
class MessageActions(View):
    """What can be done with a message, and the way to its other versions."""

    template: ClassVar[str] = "chat/_message_actions.html"
    url: str  # of the message; each action is a path below it
    role: Literal["user", "assistant"]
    goes_on: bool = False  # it was cut off, and the model can write on
    version: int = 1  # which of `versions`
    versions: int = 1
    previous_url: str = ""
    next_url: str = ""
    edits: bool = True


@dataclass(frozen=True, slots=True)
class EditForm(View):
    """A message in a text field, in the place where it stood."""

    template: ClassVar[str] = "chat/_edit_form.html"
    message_id: str
    url: str  # of the message
    cancel_url: str
    text: str


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
    actions: MessageActions | None = None  # none while it is being written
    edit: EditForm | None = None  # instead of the text
    thinking: Thinking | None = None
    calls: tuple[ToolCallCard, ...] = ()
    result_form: ResultForm | None = None
    results: tuple[ToolResult, ...] = ()  # instead of the text: what tools gave
    files: tuple[AttachmentChip, ...] = ()


@dataclass(frozen=True, slots=True)
class ComposerAction(View):
    """The composer's button: send, or stop the reply that is being written."""

    template: ClassVar[str] = "chat/_composer_action.html"
    stop_url: str | None = None


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting: what was typed, and what holds where nothing is."""

    name: str
    label: str
    kind: Literal["real", "whole", "lines"]
    value: str
    default: str
    source: str  # where the default comes from
    note: str


@dataclass(frozen=True, slots=True)
class Sampling(View):
    """The drawer with system prompt, sampling and presets."""

    template: ClassVar[str] = "chat/_sampling_drawer.html"
    system: str = ""
    fields: tuple[SettingField, ...] = ()
    presets: tuple[str, ...] = ()
    preset: str = ""  # the one that was chosen last
    is_open: bool = False
    error: ErrorNotice | None = None
    tools: str = ""  # as they were typed


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that the message can go to."""

    name: str
    chosen: bool
    note: str = ""  # sleeping, not loaded


@dataclass(frozen=True, slots=True)
class Composer(View):
    """Where the next message is typed."""

    template: ClassVar[str] = "chat/_composer.html"
    conversation_id: str
    sampling: Sampling
    action: ComposerAction
    text: str = ""
    error: ErrorNotice | None = None
    attachments: Attachments = field(default_factory=Attachments)
    models: tuple[ModelChoice, ...] = ()  # shown where there is a choice


@dataclass(frozen=True, slots=True)
class EmptyChat(View):
    """What a new chat shows: what answers here, and three ways to begin."""

    template: ClassVar[str] = "chat/_empty_chat.html"
    model: str
    context_tokens: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MessageList(View):
    """A stretch of a chat, and the way to what is outside of it."""

    template: ClassVar[str] = "chat/_message_list.html"
    messages: tuple[ChatMessage, ...] = ()
    earlier_url: str = ""
    num_earlier: int = 0
    later_url: str = ""


@dataclass(frozen=True, slots=True)
class ChatPage(View):
    """`/`, `/c/{id}`, and what else the chats have pages for."""

    template: ClassVar[str] = "chat/page.html"
    shell: Shell
    head: ChatHead
    chats: ChatList
    list: MessageList | None = None
    composer: Composer | None = None
    empty: EmptyChat | None = None
    loading: Loading | None = None
    panel: View | None = None  # a form or a list instead of a chat
    undo: Undo | None = None
    notice: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn(View):
    """Answer to a message posted by htmx: the user's message, the reply's place, the composer's new state."""

    template: ClassVar[str] = "chat/_turn.html"
    user: ChatMessage
    reply: ChatMessage
    action: ComposerAction
    conversation_id: str
    head: ChatHead
    chats: ChatList


@dataclass(frozen=True, slots=True)
class ChatUpdate(View):
    """Answer to what changes a chat elsewhere than at its end: its messages anew."""

    template: ClassVar[str] = "chat/_chat_update.html"
    list: MessageList
    action: ComposerAction
    head: ChatHead
    announcement: str
    undo: Undo | None = None


@dataclass(frozen=True, slots=True)
class ReplyProgress(View):
    """News of a reply: finished blocks, and the open block whole (`open`) or only its new end (`appended`)."""

    template: ClassVar[str] = "chat/_reply_progress.html"
    message_id: str
    html: str = ""  # blocks that closed since the last news
    replaces: bool = False  # `html` is the whole reply so far: first news of a connection
    open: OpenBlock | None = None
    appended: str = ""
    thinking: Thinking | None = None  # where it began or ended: its block anew
    thinking_html: str = ""
    thinking_open: OpenBlock | None = None
    thinking_appended: str = ""


@dataclass(frozen=True, slots=True)
class ReplyFinished(View):
    """The last news of a reply."""

    template: ClassVar[str] = "chat/_reply_finished.html"
    message: ChatMessage
    action: ComposerAction
    head: ChatHead
    announcement: str
