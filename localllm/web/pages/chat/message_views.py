"""Views of the parts of a message: reasoning, tool calls, tool results and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class ReasoningView(View):
    """The reasoning of a model. `html` is safe markup."""

    template: ClassVar[str] = "chat/_thinking.html"
    message_id: str
    html: str
    seconds: float
    tokens: int = 0
    open: View | None = None  # present while the model is still reasoning


@dataclass(frozen=True, slots=True)
class ToolCallCard(View):
    """A tool call in a reply. `html` shows its arguments as a code block."""

    template: ClassVar[str] = "chat/_tool_call.html"
    name: str
    html: str
    broken: bool = False  # the arguments are not a JSON object, so the call cannot be answered
    server: str = ""  # the server of the tool; empty: the result is typed
    state: Literal["asks", "running", "done"] = "asks"  # of a call to a server
    note: str = ""  # why it asks again
    text: str = ""  # the result, before it is sent with those of the other calls
    url: str = ""  # of the call; each decision is a path below it


@dataclass(frozen=True, slots=True)
class ToolNotes(View):
    """The reasons why tools that the chat has chosen were not offered to the model."""

    template: ClassVar[str] = "chat/_tool_notes.html"
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultForm(View):
    """The form where the user types the results of a reply's tool calls."""

    template: ClassVar[str] = "chat/_result_form.html"
    url: str  # of the message
    message_id: str
    calls: tuple[tuple[int, str], ...]  # number and name of each call without a result
    is_folded: bool = False  # a server can give the results, so typing is the second choice
    goes_on: bool = False  # every call has a result
    error: ErrorNotice | None = None  # why the results could not be sent


@dataclass(frozen=True, slots=True)
class ToolResult(View):
    """The result of one tool call."""

    template: ClassVar[str] = "chat/_tool_result.html"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AttachmentChip(View):
    """A file attached to the next message (removable by its id), or a file of a sent message."""

    template: ClassVar[str] = "chat/_attachment.html"
    name: str
    num_bytes: int
    num_tokens: int | None = None
    id: str = ""
    text: str = ""  # extracted text of a file in a sent message
    is_estimate: bool = False  # `num_tokens` is not counted exactly
    is_missing: bool = False  # its chat was imported, and an export does not contain it
    searched: bool = False  # too long to be read whole: the passages that match the question are read


@dataclass(frozen=True, slots=True)
class Attachments(View):
    """The files attached to the next message, and the token count of those that are read whole."""

    template: ClassVar[str] = "chat/_attachments.html"
    chips: tuple[AttachmentChip, ...] = ()
    num_tokens: int | None = None  # None: no file is read whole
    context_tokens: int = 0
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class SourcePassage:
    """A passage of a long file that the model read before it answered."""

    source: str  # such as "note.pdf, p. 3"
    text: str


@dataclass(frozen=True, slots=True)
class Sources(View):
    """The passages that an answer was given, below it."""

    template: ClassVar[str] = "chat/_sources.html"
    title: str  # such as "From note.pdf, p. 3, p. 7"
    passages: tuple[SourcePassage, ...]
    note: str = ""  # why these passages, if the question matched none
