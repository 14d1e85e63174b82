"""Messages and replies: text, reasoning, files, sources, and the figures below a finished reply.

Does not know: HTTP handlers, how a reply is generated, where chats are stored, where figures are measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from localllm.serving.served import ModelCard
from localllm.units import format_count, format_rate, format_seconds
from localllm.web.pages.chat.composer.model_picker import ModelChoice
from localllm.web.pages.chat.composer.views import (
    AttachmentChip,
    ComposerAction,
    ContextMeter,
    SummaryOrigin,
    picture_chip,
    summary_origin,
)
from localllm.web.pages.chat.markdown.stream import cached_html, cached_user_html
from localllm.web.pages.chat.replies.active import ActiveReplies, ActiveReply
from localllm.web.pages.chat.replies.messages import files_of, has_failed, is_summary
from localllm.web.pages.chat.replies.reply import Reply, ReplyUpdate
from localllm.web.pages.chat.sidebar.views import ChatHead, when
from localllm.web.pages.chat.store import Branch, Chat, StoredMessage
from localllm.web.pages.chat.tools.views import (
    ResultForm,
    ToolCallCard,
    ToolNotes,
    ToolResult,
    answered,
    call_cards,
    follows_calls,
    result_form,
    results,
)
from localllm.web.pages.frame.views import ErrorNotice, View, view


@view("chat/_thinking.html")
class ReasoningView(View):
    """The reasoning of a model. `html` is safe markup."""

    message_id: str
    html: str
    seconds: float
    tokens: int = 0
    open: View | None = None  # present while the model is still reasoning


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
    language: str = ""  # of code, or the name of the tool whose arguments are being written


Rating = Literal["", "good", "bad"]  # what a person thinks of a reply; empty: it is not rated
MAX_NOTE_CHARS = 2000


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
    rating: Rating = ""


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
    server: str = ""  # another server, whose model has written it; empty: this one
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
    is_folded: bool = False  # the calls before it show its results
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
    compares: bool = False  # a second model has to be chosen


@view("chat/_rating_form.html")
class RatingForm(View):
    """The form that says what a person thinks of a reply."""

    url: str  # of the message
    rating: Rating = ""
    note: str = ""
    most_chars: int = MAX_NOTE_CHARS


@view("chat/_outline.html")
class Outline(View):
    """The questions of a chat, as links to them: (text, URL)."""

    questions: tuple[tuple[str, str], ...]


@view("chat/_message_list.html")
class MessageList(View):
    """A range of a chat's messages, with links to earlier and later ones."""

    messages: tuple[ChatMessage | ComparedReplies, ...] = ()
    earlier_url: str = ""
    num_earlier: int = 0
    later_url: str = ""
    last_left_out: str = ""  # id of the last message that the model does not read any more; a line follows it
    bring_back_url: str = ""


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


@view("chat/_calls_progress.html")
class CallsProgress(View):
    """A live update of a reply whose calls run: the whole message is drawn again."""

    message: ChatMessage
    announcement: str = ""


PREVIEW_CHARS = 20_000
"""Characters of a file that are shown in its message."""


def live_thinking(message_id: str, reply: Reply) -> ReasoningView | None:
    """Return the reasoning of a reply that is being written."""
    if not reply.thinking.text:
        return None
    num_blocks, kind, text, language = reply.thinking.settled
    rest = OpenBlock(f"{message_id}-thinking", kind, text, language) if reply.thinks else None
    html = "".join(reply.thinking.blocks[:num_blocks])
    return ReasoningView(message_id, html, reply.thought_s, reply.reasoning_tokens, rest)


def stored_thinking(message_id: str, details: Mapping[str, Any]) -> ReasoningView | None:
    reasoning = details.get("reasoning")
    if not reasoning:
        return None
    return ReasoningView(
        message_id, cached_html(reasoning), details.get("reasoning_s", 0.0), details.get("reasoning_tokens", 0)
    )


def file_chips(details: Mapping[str, Any]) -> tuple[AttachmentChip, ...]:
    searched = [file for file in details.get("files", []) if "text" not in file]
    return (
        *(picture_chip(each, f"/chats/pictures/{each['digest']}") for each in details.get("pictures", [])),
        *(AttachmentChip(name, len(text.encode()), text=_preview(text)) for name, text in files_of(details)),
        *(
            AttachmentChip(file["name"], file.get("num_bytes", 0), searched=True, is_missing="file" not in file)
            for file in searched
        ),
    )


def sources(details: Mapping[str, Any]) -> Sources | None:
    """Return the passages that the model read before this reply; None if no long file was searched."""
    found = details.get("sources")
    if not found:
        return None
    by_name: dict[str, list[str]] = {}
    for each in found["passages"]:
        by_name.setdefault(each["name"], []).append(each["where"])
    title = "; ".join(f"{name}, {', '.join(dict.fromkeys(where))}" for name, where in by_name.items())
    passages = tuple(
        SourcePassage(f"{each['name']}, {each['where']}", each["text"].strip()) for each in found["passages"]
    )
    return Sources(f"From {title}" if title else "No passage was found", passages, found.get("note", ""))


def _preview(text: str) -> str:
    left = len(text) - PREVIEW_CHARS
    return (
        text if left <= 0 else f"{text[:PREVIEW_CHARS]}\n… {format_count(left)} more characters, which the model reads"
    )


def reply_progress(message_id: str, reply: Reply, progress: ReplyUpdate) -> ReplyProgress:
    """Return the live update of a reply for one follower."""
    body, thinking = progress.body, progress.thinking
    turns = progress.thinking_turns
    kind = body.open_kind if body else None
    thought = thinking.open_kind if thinking and not turns else None
    return ReplyProgress(
        message_id=message_id,
        html=body.html if body else "",
        replaces=body.restarts if body else False,
        open=OpenBlock(message_id, kind, body.open_text, body.open_language) if body and kind else None,
        appended=body.open_text if body and not kind else "",
        thinking=live_thinking(message_id, reply) if turns else None,
        thinking_html=thinking.html if thinking and not turns else "",
        thinking_open=OpenBlock(f"{message_id}-thinking", thought, thinking.open_text, thinking.open_language)
        if thinking and thought
        else None,
        thinking_appended=thinking.open_text if thinking and not turns and not thought else "",
    )


ENDS = {
    "length": "cut off: token limit",
    "abort": "stopped by you",
    "error": "failed",
    "interrupted": "interrupted: the server stopped",
}
"""The unusual ends. A reply that ended by itself says nothing."""

BROKEN = ("length", "error", "interrupted")


def figures(details: Mapping[str, Any]) -> ReplyFigures | None:
    """Return the figures of a stored reply; None if it has neither counts nor an unusual end."""
    reason = str(details.get("finish_reason", ""))
    end = ENDS.get(reason, "")
    if "prompt_tokens" not in details:
        return ReplyFigures((), end, reason in BROKEN) if reason in ("interrupted", "abort") else None
    return ReplyFigures(tuple(_figures_line(details)), end, reason in BROKEN, tuple(_details(details)))


def _figures_line(details: Mapping[str, Any]) -> list[str]:
    found = []
    if details.get("ttft_s") is not None:
        waited_s = details["ttft_s"]  # 0.15 s, as a person counts; from two seconds on as everywhere
        found.append((f"{waited_s:.2f} s" if waited_s < 2 else format_seconds(waited_s)) + " to first word")
    if details.get("tokens_per_s") is not None:
        found.append(format_rate(details["tokens_per_s"]))
    count = details.get("completion_tokens", 0)
    return [*found, f"{format_count(count)} token{'s' * (count != 1)}"]


def _details(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    prompt, cached = details["prompt_tokens"], details.get("cached_tokens", 0)
    share = f", {cached / prompt:.0%} of it from the prefix cache" if cached and prompt else ""
    found = [("Read", f"{format_count(prompt)} tokens{share}")]
    drafted, accepted = details.get("drafted_tokens", 0), details.get("accepted_tokens", 0)
    if drafted:
        share = f"{format_count(accepted)} of {format_count(drafted)} tokens accepted ({accepted / drafted:.0%})"
        found.append(("Drafts", share))
    return found


GOES_ON = ("length", "abort", "interrupted")
"""Finish reasons after which a model can continue."""


async def message_list(
    replies: ActiveReplies, chat_id: str, branch: Branch, *, editing: str = "", outside: bool = True
) -> MessageList:
    """Return a branch in its current state. Markdown is rendered off the event loop, and cached."""
    messages = [replies.current(message) for message in branch.messages]
    finished = [m for m in (*messages, *branch.beside) if m.role == "assistant" and replies.get(m.id) is None]
    typed = [m.text for m in messages if m.role == "user"]
    await asyncio.to_thread(
        lambda: [
            *(cached_html(text) for m in finished for text in (m.text, m.details.get("reasoning", ""))),
            *(cached_user_html(text) for text in typed),
        ]
    )
    num_left_out = max(0, branch.num_left_out - branch.num_earlier)  # of these messages
    views: list[ChatMessage | ComparedReplies] = []
    for at, message in enumerate(messages):
        shown = one_message(chat_id, message, replies.get(message.id), editing=editing)
        if "results" in message.details and views and isinstance(called := views[-1], ChatMessage) and called.calls:
            views[-1] = replace(called, calls=answered(called.calls, message.details), result_form=None)
            shown = replace(shown, is_folded=True)
        views.append(replace(shown, is_left_out=at < num_left_out))
    if branch.beside:
        views[-1] = _comparison(replies, chat_id, [branch.messages[-1], *branch.beside])
    last = messages[num_left_out - 1].id if 0 < num_left_out <= len(messages) else ""
    earlier = f"/c/{chat_id}?before={messages[0].id}" if branch.num_earlier and messages else ""
    later = f"/c/{chat_id}" if branch.num_later and outside else ""
    bring_back = f"/c/{chat_id}/bring-back" if last else ""
    return MessageList(tuple(views), earlier, branch.num_earlier, later, last, bring_back)


def _comparison(replies: ActiveReplies, chat_id: str, compared: Sequence[StoredMessage]) -> ComparedReplies:
    """Return replies beside each other, in the order of their creation."""
    ordered = sorted(compared, key=lambda message: compared[0].versions.index(message.id))
    views = [one_message(chat_id, replies.current(message), replies.get(message.id)) for message in ordered]
    return ComparedReplies(tuple(views), tuple(f"/c/{chat_id}/m/{message.id}" for message in ordered))


def one_message(
    chat_id: str, message: StoredMessage, writing: ActiveReply | None = None, *, editing: str = ""
) -> ChatMessage:
    if message.role == "user":
        return _user_message(chat_id, message, editing=editing)
    return _assistant_message(chat_id, message, writing, editing=editing)


def _user_message(chat_id: str, message: StoredMessage, *, editing: str) -> ChatMessage:
    edit = edit_form(chat_id, message) if editing == message.id else None
    return ChatMessage(
        id=message.id,
        role="user",
        text=message.text,
        html=cached_user_html(message.text) if "`" in message.text or "~~~" in message.text else "",
        actions=None if edit else actions(chat_id, message),
        edit=edit,
        results=results(message.details),
        files=file_chips(message.details),
    )


def _assistant_message(
    chat_id: str, message: StoredMessage, writing: ActiveReply | None, *, editing: str
) -> ChatMessage:
    """Return the reply in its current state; while it is being written, with the URL of its events."""
    details = message.details
    if editing == message.id and writing is None:
        return ChatMessage(message.id, "assistant", edit=edit_form(chat_id, message))
    url = f"/c/{chat_id}/m/{message.id}"
    live = writing is not None and not writing.reply.done
    follows = not live and follows_calls(details, is_saved=writing is None)
    open_block = OpenBlock(message.id, *writing.reply.body.settled[1:]) if writing is not None and live else None
    thinking = live_thinking(message.id, writing.reply) if writing else stored_thinking(message.id, details)
    return ChatMessage(
        id=message.id,
        role="assistant",
        html=writing.reply.body.html if writing is not None else cached_html(message.text),
        model=str(details.get("model") or "Assistant"),
        server=str(details.get("server") or ""),
        is_edited=bool(details.get("edited")),
        open=open_block,
        stream_url=f"{url}/stream" if live else f"{url}/calls" if follows else None,
        figures=None if live else figures(details),
        error=ErrorNotice(*details["error"]) if details.get("error") else None,
        actions=None if live else actions(chat_id, message),
        thinking=thinking,
        calls=() if live else call_cards(url, details),
        result_form=None if live else result_form(url, message.id, details),
        sources=sources(details),
        has_failed=not live and has_failed(message),
        origin=summary_origin(message),
    )


def actions(chat_id: str, message: StoredMessage) -> MessageActions:
    at = message.versions.index(message.id) if message.id in message.versions else 0
    select = [f"/c/{chat_id}/m/{version}/select" for version in message.versions]
    return MessageActions(
        url=f"/c/{chat_id}/m/{message.id}",
        role=message.role,
        edits="results" not in message.details,
        goes_on=bool(message.text)
        and (message.details.get("finish_reason") in GOES_ON or "edited" in message.details)
        and "calls" not in message.details
        and not is_summary(message),
        version=at + 1,
        versions=max(1, len(select)),
        previous_url=select[at - 1] if at > 0 else "",
        next_url=select[at + 1] if at + 1 < len(select) else "",
        rating=message.details.get("rating", {}).get("rating", ""),
    )


def edit_form(chat_id: str, message: StoredMessage) -> EditForm:
    url = f"/c/{chat_id}/m/{message.id}"
    return EditForm(message.id, url, url, message.text, message.role)


def head(chat: Chat, messages: Sequence[StoredMessage], card: ModelCard | None) -> ChatHead:
    """Return the title, and the use of the context after the last counted reply."""
    used, size = 0, card.plan.max_model_len if card is not None else 0
    for message in messages:
        if "prompt_tokens" in message.details:
            read = (
                0 if is_summary(message) else message.details["prompt_tokens"]
            )  # a summary's prompt is the other chat
            used = read + message.details.get("completion_tokens", 0)
            size = size or message.details.get("context_tokens", 0)
        elif "full_tokens" in message.details:
            used, size = message.details["full_tokens"], size or message.details["context_tokens"]
    meter = ContextMeter(used, size if used else 0)
    project_url = f"/projects/{chat.project_id}" if chat.project_id else ""
    outline_url = f"/c/{chat.id}/outline"
    return ChatHead(
        chat.title, f"/c/{chat.id}/manage", meter, chat.project_name, project_url, when(chat.updated_s), "", outline_url
    )


def reply_finished(
    chat: Chat, before: Sequence[StoredMessage], message: StoredMessage, writing: ActiveReply | None,
    action: ComposerAction, card: ModelCard | None,
) -> ReplyFinished:  # fmt: skip
    """Return the last update of a reply. `before`: messages before it, for the use of the context."""
    view = one_message(chat.id, message, writing)
    return ReplyFinished(view, action, head(chat, [*before, message], card), announcement(message.details))


def announcement(details: Mapping[str, Any]) -> str:
    """Return what a screen reader announces at the end."""
    if details.get("error"):
        return f"Reply failed: {details['error'][0]}"
    tokens = f", {format_count(details['completion_tokens'])} tokens" if "completion_tokens" in details else ""
    return f"Reply stopped{tokens}" if details.get("finish_reason") == "abort" else f"Reply finished{tokens}"
