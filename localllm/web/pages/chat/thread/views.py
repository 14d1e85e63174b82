"""Views of the chat page, and of the parts of a message: reasoning, tool calls, tool results and files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localllm.engine.params import Kind
from localllm.web.pages.chat.composer.views import BehaviourChip, LoadProgress, Refusal, SummaryOrigin, ThinkingChoice
from localllm.web.pages.chat.offer.views import Announcement, OfferCard, OfferRoom
from localllm.web.pages.chat.sidebar.views import ChatHead, ChatList, Undo
from localllm.web.pages.frame.views import ErrorNotice, Loading, Shell, View, view


@view("chat/_thinking.html")
class ReasoningView(View):
    """The reasoning of a model. `html` is safe markup."""

    message_id: str
    html: str
    seconds: float
    tokens: int = 0
    open: View | None = None  # present while the model is still reasoning


@view("chat/_tool_call.html")
class ToolCallCard(View):
    """A tool call in a reply. `html` shows its arguments as a code block."""

    name: str
    html: str
    broken: bool = False  # the arguments are not a JSON object, so the call cannot be answered
    server: str = ""  # the server of the tool; empty: the result is typed
    state: Literal["asks", "running", "done"] = "asks"  # of a call to a server
    note: str = ""  # why it asks again
    text: str = ""  # the result, before it is sent with those of the other calls
    url: str = ""  # of the call; each decision is a path below it


@view("chat/_tool_notes.html")
class ToolNotes(View):
    """The reasons why tools that the chat has chosen were not offered to the model."""

    notes: tuple[str, ...]


@view("chat/_result_form.html")
class ResultForm(View):
    """The form where the user types the results of a reply's tool calls."""

    url: str  # of the message
    message_id: str
    calls: tuple[tuple[int, str], ...]  # number and name of each call without a result
    is_folded: bool = False  # a server can give the results, so typing is the second choice
    goes_on: bool = False  # every call has a result
    error: ErrorNotice | None = None  # why the results could not be sent


@view("chat/_tool_result.html")
class ToolResult(View):
    """The result of one tool call."""

    name: str
    text: str


@view("chat/_attachment.html")
class AttachmentChip(View):
    """A file attached to the next message (removable by its id), or a file of a sent message."""

    name: str
    num_bytes: int
    num_tokens: int | None = None
    id: str = ""
    text: str = ""  # extracted text of a file in a sent message
    is_estimate: bool = False  # `num_tokens` is not counted exactly
    is_missing: bool = False  # its chat was imported, and an export does not contain it
    searched: bool = False  # too long to be read whole: the passages that match the question are read


@view("chat/_attachments.html")
class Attachments(View):
    """The files attached to the next message, and the token count of those that are read whole."""

    chips: tuple[AttachmentChip, ...] = ()
    num_tokens: int | None = None  # None: no file is read whole
    context_tokens: int = 0
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class SourcePassage:
    """A passage of a long file that the model read before it answered."""

    source: str  # such as "note.pdf, p. 3"
    text: str


@view("chat/_sources.html")
class Sources(View):
    """The passages that an answer was given, below it."""

    title: str  # such as "From note.pdf, p. 3, p. 7"
    passages: tuple[SourcePassage, ...]
    note: str = ""  # why these passages, if the question matched none


@view("chat/_figures.html")
class ReplyFigures(View):
    """The line of statistics below a finished reply, and the details that it opens."""

    line: tuple[str, ...]
    end: str = ""  # why the reply ended, if it is unusual
    is_broken: bool = False  # it ended by an error or a limit
    details: tuple[tuple[str, str], ...] = ()  # (name, value)


@view("chat/_open_block.html")
class OpenBlock(View):
    """The last, unfinished Markdown block of a reply that is being written, as plain text."""

    message_id: str
    kind: Literal["text", "code", "note"] = "text"
    text: str = ""


@view("chat/_message_actions.html")
class MessageActions(View):
    """The actions of a message, and the links to its other versions."""

    url: str  # of the message; each action is a path below it
    role: Literal["user", "assistant"]
    goes_on: bool = False  # the reply was cut off and the model can continue it
    version: int = 1  # number of the shown version, from 1
    versions: int = 1
    previous_url: str = ""
    next_url: str = ""
    edits: bool = True


@view("chat/_edit_form.html")
class EditForm(View):
    """The form that replaces a message while the user edits it."""

    message_id: str
    url: str  # of the message
    cancel_url: str
    text: str
    role: Literal["user", "assistant"] = "user"


@view("chat/_message.html")
class ChatMessage(View):
    """One message. `html` is safe markup, of a user's message only if it has code; `text` is what the user typed."""

    id: str
    role: Literal["user", "assistant"]
    text: str = ""
    html: str = ""
    model: str = ""
    is_edited: bool = False  # the user changed the reply's text
    open: OpenBlock | None = None  # present while the reply is being written
    stream_url: str | None = None  # URL of the reply's live events
    figures: ReplyFigures | None = None
    error: ErrorNotice | None = None
    actions: MessageActions | None = None  # None while the reply is being written
    edit: EditForm | None = None  # shown instead of the text
    thinking: ReasoningView | None = None
    calls: tuple[ToolCallCard | ToolNotes, ...] = ()
    result_form: ResultForm | None = None
    results: tuple[ToolResult, ...] = ()  # tool results, shown instead of the text
    files: tuple[AttachmentChip, ...] = ()
    sources: Sources | None = None  # passages of long files that the model read before it answered
    is_left_out: bool = False  # the model does not read it any more
    has_failed: bool = False  # the turn failed, so the model does not read it
    origin: SummaryOrigin | None = None  # of a summary


@view("chat/_comparison.html")
class ComparedReplies(View):
    """Replies of two models to one message, beside each other, until one is kept."""

    replies: tuple[ChatMessage, ...]
    urls: tuple[str, ...]  # of the messages


@view("chat/_other_model.html")
class OtherModel(View):
    """The form that has a message answered by another model, or by two."""

    url: str  # of the message
    names: tuple[ModelChoice, ...]
    model: str
    beside: str = ""
    error: ErrorNotice | None = None


@view("chat/_outline.html")
class Outline(View):
    """The questions of a chat, as links to them: (text, URL)."""

    questions: tuple[tuple[str, str], ...]


@view("chat/_composer_action.html")
class ComposerAction(View):
    """The button of the composer: Send, Stop while a reply is being written, or why neither is possible now."""

    stop_url: str | None = None
    over_tokens: int = 0  # tokens that the message is too long by
    load: LoadProgress | None = None  # of the model that was picked
    load_url: str = ""  # URL of the load's live events


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting: the value that was typed, and the default that applies if the field is empty."""

    name: str
    label: str
    kind: Kind
    value: str
    default: str
    source: str  # where the default comes from
    note: str
    low: float | None = None
    high: float | None = None
    is_first: bool = False  # shown at once, not behind `More sampling`
    is_wrong: bool = False  # the value was refused


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """A server whose tools the chat offers to the model, or not."""

    name: str
    chosen: bool
    note: str = ""  # its state, if it is of interest


@view("chat/_tool_servers.html")
class ToolServers(View):
    """The choice of servers in the drawer."""

    choices: tuple[ServerChoice, ...]
    note: str = ""  # why none of them is used


@view("chat/_sampling_drawer.html")
class Sampling(View):
    """The drawer with the model's behaviour in this chat: system prompt, sampling and presets."""

    system: str = ""
    fields: tuple[SettingField, ...] = ()
    presets: tuple[str, ...] = ()
    preset: str = ""  # name of the preset that was chosen last
    is_open: bool = False
    error: ErrorNotice | None = None
    tools: str = ""  # a JSON list, as it was typed
    schema: str = ""  # a JSON object, as it was typed
    num_set: int = 0  # number of fields that are filled in
    wrong: str = ""  # name of the field whose value was refused; the drawer is open then
    tool_servers: ToolServers | None = None  # None: the user has none


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that the message can be sent to."""

    name: str
    chosen: bool
    note: str = ""  # state and size: "not loaded · 610 MiB"


@view("chat/_model_choices.html")
class ModelChoices(View):
    """The list from which the model of the next message is chosen."""

    choices: tuple[ModelChoice, ...] = ()


@view("chat/_composer.html")
class Composer(View):
    """The form where the next message is typed."""

    conversation_id: str
    sampling: Sampling
    action: ComposerAction
    text: str = ""
    error: ErrorNotice | None = None
    attachments: Attachments = field(default_factory=Attachments)
    models: ModelChoices = field(default_factory=ModelChoices)
    thinking: ThinkingChoice = field(default_factory=ThinkingChoice)
    refusal: Refusal | None = None
    context_tokens: int = 0  # of the model; 0: not known
    project_id: str = ""  # of a new chat
    begins: str = ""  # the id that a new chat will have, so that two quick messages begin one chat

    @property
    def stop_url(self) -> str:
        return f"/c/{self.conversation_id or self.begins}/stop"


@view("chat/_examples.html")
class Examples(View):
    """Messages to begin with: a click sends one."""

    texts: tuple[str, ...]


@view("chat/_empty_chat.html")
class EmptyChat(View):
    """The start of a new chat: what the model is. The page shows the examples below the offered model."""

    model: str
    context_tokens: int
    examples: Examples
    toy_size: str = ""  # parameters of the demo, such as 4 M; empty: another model
    rests: bool = False  # the model has not been loaded yet; the first message loads it
    size: str = ""  # of its files, such as 8.5 MiB; empty: unknown


@view("chat/_message_list.html")
class MessageList(View):
    """A range of a chat's messages, with links to earlier and later ones."""

    messages: tuple[ChatMessage | ComparedReplies, ...] = ()
    earlier_url: str = ""
    num_earlier: int = 0
    later_url: str = ""
    last_left_out: str = ""  # id of the last message that the model does not read any more; a line follows it
    bring_back_url: str = ""


@view("chat/page.html")
class ChatPage(View):
    """`/`, `/c/{id}` and the other pages of the chats."""

    shell: Shell
    head: ChatHead
    chats: ChatList
    list: MessageList | None = None
    composer: Composer | None = None
    empty: EmptyChat | None = None
    loading: Loading | None = None
    panel: View | None = None  # a form or a list, shown instead of a chat
    offer: OfferCard | OfferRoom | None = None  # a model that fits this machine
    status: Announcement = field(default_factory=Announcement)
    undo: Undo | None = None
    notice: ErrorNotice | None = None
    chip: BehaviourChip = field(default_factory=BehaviourChip)


@view("chat/_turn.html")
class ChatTurn(View):
    """The answer to a message posted by htmx: the user's message, the reply's placeholder, the new composer state."""

    user: ChatMessage
    reply: ChatMessage
    action: ComposerAction
    conversation_id: str
    head: ChatHead
    chats: ChatList
    chip: BehaviourChip = field(default_factory=BehaviourChip)


@view("chat/_chat_update.html")
class ChatUpdate(View):
    """The answer to a change elsewhere than at the end of a chat: all its messages are drawn again."""

    list: MessageList
    action: ComposerAction
    head: ChatHead
    announcement: str
    undo: Undo | None = None
    is_redrawn: bool = False  # the messages are made anew, because one that moves is being written
    chip: BehaviourChip = field(default_factory=BehaviourChip)
    clears_composer: bool = False  # its message was sent
    chats: ChatList | None = None


@view("chat/_reply_progress.html")
class ReplyProgress(View):
    """One live update of a reply: the finished blocks, and the open block as a whole (`open`) or its new end
    (`appended`).
    """

    message_id: str
    html: str = ""  # blocks that were finished since the last update
    replaces: bool = False  # `html` is the whole reply so far; true for the first update of a connection
    open: OpenBlock | None = None
    appended: str = ""
    thinking: ReasoningView | None = None  # the whole reasoning block, sent when reasoning begins or ends
    thinking_html: str = ""
    thinking_open: OpenBlock | None = None
    thinking_appended: str = ""


@view("chat/_reply_finished.html")
class ReplyFinished(View):
    """The last live update of a reply."""

    message: ChatMessage
    action: ComposerAction
    head: ChatHead
    announcement: str
