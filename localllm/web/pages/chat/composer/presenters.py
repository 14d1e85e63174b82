"""The composer's parts as views: what does not fit and the ways on, thinking, the behaviour's chip.

Does not know: HTTP handlers, how a reply is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localllm.units import format_count
from localllm.web.api.hints import THINKING_SWITCHES
from localllm.web.pages.chat.composer.views import (
    BehaviourChip,
    ContextMeter,
    FitUpdate,
    Refusal,
    SummaryOrigin,
    ThinkingChoice,
)
from localllm.web.pages.chat.files.attachments import Attachment
from localllm.web.pages.chat.replies.claims import served_for
from localllm.web.pages.chat.replies.messages import SUMMARY_OF
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, StoredMessage
from localllm.web.pages.chat.thread.views import AttachmentChip, Attachments, ComposerAction
from localllm.web.pages.frame.views import ErrorNotice

CHIP_CHARS = 120
LEAST_FILE_TOKENS = 16
"""A shorter beginning of a file is not worth sending."""

MARGIN_TOKENS = 8
"""A file's beginning may be tokenised differently where it was cut."""


def refusal(
    full: ChatFull, url: str, chat: Chat | None, files: Sequence[Attachment] = (), *, field_id: str = "composer-message"
) -> Refusal:
    """Return what is said in place of sending, and the ways on. `url`: where the form is posted."""
    if full.can_leave_out and chat is not None:
        what, why = full.what, full.why
    else:
        what = f"Too long by {format_count(full.over_tokens)} tokens."
        needs, size = format_count(full.used_tokens), format_count(full.context_tokens)
        why = f"With room for a reply this message needs {needs} tokens; the model's context has {size}."
    return Refusal(
        what=what,
        why=why,
        url=url,
        chat_url=f"/c/{chat.id}" if full.can_leave_out and chat is not None else "",
        leaves_out=full.can_leave_out and chat is not None,
        file_tokens=first_tokens(full, files),
        field_id=field_id,
    )


def first_tokens(full: ChatFull, files: Sequence[Attachment]) -> int:
    """Return how many tokens of the longest file fit; 0: too few."""
    longest = max((file.num_tokens for file in files if not file.searched), default=0)
    left = longest - full.over_tokens - MARGIN_TOKENS
    return left if left >= LEAST_FILE_TOKENS else 0


def fit_update(
    full: ChatFull | None, chat: Chat | None, files: Sequence[Attachment], action: ComposerAction, *, sent: bool = False
) -> FitUpdate:
    """Return the composer's state after a count. `action`: its button while the message fits."""
    if full is None:
        return FitUpdate(action, clears_error=sent)
    shown = refusal(full, "/chat", chat, files)
    meter = ContextMeter(full.used_tokens, full.context_tokens)
    if action.stop_url is None and action.load is None:
        action = ComposerAction(over_tokens=full.over_tokens)
    return FitUpdate(action, shown, meter, sent)


def thinking_choice(state: ChatState, settings: Mapping[str, str]) -> ThinkingChoice:
    """Return the choice beside Send; it is shown for a ready model whose template can switch thinking."""
    served = served_for(state, settings)
    switches = served is not None and any(served.chat_template.reads(name) for name in THINKING_SWITCHES)
    return ThinkingChoice(switches, settings.get("thinking", ""))


def chip(chat: Chat | None, settings: Mapping[str, str]) -> BehaviourChip:
    """Return the system prompt in one line."""
    system = " ".join(settings.get("system", "").split())
    short = system if len(system) <= CHIP_CHARS else f"{system[:CHIP_CHARS].rstrip()}…"
    return BehaviourChip(short, f"{f'/c/{chat.id}' if chat is not None else '/'}?behaviour=1#system")


def summary_origin(message: StoredMessage) -> SummaryOrigin | None:
    """Return the line over a summary; None for any other message."""
    origin = message.details.get(SUMMARY_OF)
    return SummaryOrigin(origin["title"], f"/c/{origin['chat']}") if origin else None


def attachments_view(files: Sequence[Attachment], context_tokens: int, error: ErrorNotice | None = None) -> Attachments:
    """Return the files of the next message, with the sum of the tokens of those that are read whole."""
    chips = tuple(
        AttachmentChip(
            file.name, file.num_bytes, file.num_tokens, file.id, is_estimate=file.is_estimate, searched=file.searched
        )
        for file in files
    )
    whole = [file for file in files if not file.searched]
    total = sum(file.num_tokens for file in whole) if whole else None
    return Attachments(chips, total, context_tokens, error)
