"""Views of what is inside a message: reasoning, calls of tools and their results, files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from localllm.web.views.shared import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class Thinking(View):
    """What a model wrote to itself. `html` is safe markup."""

    template: ClassVar[str] = "chat/_thinking.html"
    message_id: str
    html: str
    seconds: float
    tokens: int = 0
    open: View | None = None  # present while it thinks


@dataclass(frozen=True, slots=True)
class ToolCallCard(View):
    """A call that a reply makes. `html`: its arguments as a code block."""

    template: ClassVar[str] = "chat/_tool_call.html"
    name: str
    html: str
    broken: bool = False  # its arguments are not one JSON object: it cannot be answered


@dataclass(frozen=True, slots=True)
class ResultForm(View):
    """Where a person types what the calls of a reply gave."""

    template: ClassVar[str] = "chat/_result_form.html"
    url: str  # of the message
    message_id: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolResult(View):
    """What a call gave."""

    template: ClassVar[str] = "chat/_tool_result.html"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class AttachmentChip(View):
    """A file: of the next message, which can be removed by its id, or of one that was sent."""

    template: ClassVar[str] = "chat/_attachment.html"
    name: str
    num_bytes: int
    num_tokens: int | None = None
    id: str = ""
    text: str = ""  # what can be read of it, in a message that was sent


@dataclass(frozen=True, slots=True)
class Attachments(View):
    """The files of the next message, and what they take of the context."""

    template: ClassVar[str] = "chat/_attachments.html"
    chips: tuple[AttachmentChip, ...] = ()
    num_tokens: int | None = None  # of all; None: nobody could count
    context_tokens: int = 0
    error: ErrorNotice | None = None
