"""Turn messages and replies into the views of a chat: text, reasoning, files, and the figures below a finished reply.

In a user's own message fenced code blocks and inline code are drawn; all other text stays as it was typed.
Does not know: HTTP handlers, how a reply is generated, where chats are stored, where figures are measured.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from localllm.serving.served import ModelCard
from localllm.units import format_count, format_rate, format_seconds
from localllm.web.pages.chat.composer.presenters import summary_origin
from localllm.web.pages.chat.composer.settings import BEHAVIOUR, FIRST, SETTINGS, effective, label, note, num_set
from localllm.web.pages.chat.composer.views import ContextMeter
from localllm.web.pages.chat.markdown.render import fenced_code
from localllm.web.pages.chat.markdown.stream import HTMLCache, cached_html
from localllm.web.pages.chat.replies.active import ActiveReplies, ActiveReply
from localllm.web.pages.chat.replies.messages import files_of, has_failed, is_summary
from localllm.web.pages.chat.replies.reply import Reply, ReplyUpdate
from localllm.web.pages.chat.sidebar.presenters import when
from localllm.web.pages.chat.sidebar.views import ChatHead
from localllm.web.pages.chat.store import Branch, Chat, StoredMessage
from localllm.web.pages.chat.thread.views import (
    AttachmentChip,
    ChatMessage,
    ComparedReplies,
    ComposerAction,
    EditForm,
    MessageActions,
    MessageList,
    OpenBlock,
    ReasoningView,
    ReplyFigures,
    ReplyFinished,
    ReplyProgress,
    Sampling,
    SettingField,
    SourcePassage,
    Sources,
)
from localllm.web.pages.chat.tools.views import call_cards, follows_calls, result_form, results
from localllm.web.pages.frame.views import ErrorNotice

PREVIEW_CHARS = 20_000
"""Characters of a file that are shown in its message."""


def live_thinking(message_id: str, reply: Reply) -> ReasoningView | None:
    """Return the reasoning of a reply that is being written."""
    if not reply.thinking.text:
        return None
    num_blocks, kind, text = reply.thinking.settled
    rest = OpenBlock(f"{message_id}-thinking", kind, text) if reply.thinks else None
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
        open=OpenBlock(message_id, kind, body.open_text) if body and kind else None,
        appended=body.open_text if body and not kind else "",
        thinking=live_thinking(message_id, reply) if turns else None,
        thinking_html=thinking.html if thinking and not turns else "",
        thinking_open=OpenBlock(f"{message_id}-thinking", thought, thinking.open_text)
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
        return ReplyFigures((), end, is_broken=True) if reason == "interrupted" else None
    return ReplyFigures(tuple(_figures_line(details)), end, reason in BROKEN, tuple(_details(details)))


def _figures_line(details: Mapping[str, Any]) -> list[str]:
    found = []
    if details.get("ttft_s") is not None:
        found.append(f"{_waiting(details['ttft_s'])} to first word")
    if details.get("tokens_per_s") is not None:
        found.append(format_rate(details["tokens_per_s"]))
    count = details.get("completion_tokens", 0)
    return [*found, f"{format_count(count)} token{'s' * (count != 1)}"]


def _waiting(seconds: float) -> str:
    """0.1512 -> '0.15 s', as a person counts; from two seconds on as everywhere."""
    return f"{seconds:.2f} s" if seconds < 2 else format_seconds(seconds)


def _details(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    prompt, cached = details["prompt_tokens"], details.get("cached_tokens", 0)
    share = f", {cached / prompt:.0%} of it from the prefix cache" if cached and prompt else ""
    found = [("Read", f"{format_count(prompt)} tokens{share}")]
    drafted, accepted = details.get("drafted_tokens", 0), details.get("accepted_tokens", 0)
    if drafted:
        share = f"{format_count(accepted)} of {format_count(drafted)} tokens accepted ({accepted / drafted:.0%})"
        found.append(("Drafts", share))
    return found


MAX_KEPT_CHARS = 2_000_000
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`\n]*)\n?")
_RUN = re.compile("`+")


def user_html(text: str) -> str:
    """Return the safe HTML of a message. Line breaks of its text stay line breaks; the style sheet shows them."""
    env: dict[str, Any] = {}
    parts = (_code(body, language, env) if is_code else _text(body) for is_code, language, body in _parts(text))
    return "".join(parts)


def _parts(text: str) -> Iterator[tuple[bool, str, str]]:
    """Yield the parts of a text: whether it is code, its language, and its lines. A fence that is not closed goes on to
    the end.
    """
    lines, plain, at = text.splitlines(keepends=True), list[str](), 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is None:
            plain.append(lines[at])
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], fence[1])), len(lines))
        if plain:
            yield False, "", "".join(plain)
        yield True, fence[2].strip().split(" ")[0], "".join(lines[at + 1 : end])
        plain, at = [], end + 1
    if plain:
        yield False, "", "".join(plain)


def _closes(line: str, opener: str) -> bool:
    mark = line.strip()
    return mark.startswith(opener) and not mark.strip(opener[0]) and len(line) - len(line.lstrip(" ")) < 4


def _code(source: str, language: str, env: dict[str, Any]) -> str:
    return fenced_code(source, language, env).rstrip("\n")


def _text(text: str) -> str:
    return "".join(_line(line) for line in text.splitlines(keepends=True))


def _line(line: str) -> str:
    """Return a line of text; what stands between two equal runs of backticks is code."""
    runs, closing, after = [run.span() for run in _RUN.finditer(line)], dict[int, int](), dict[int, int]()
    for number in reversed(range(len(runs))):
        length = runs[number][1] - runs[number][0]
        if length in after:
            closing[number] = after[length]
        after[length] = number
    found, at, number = list[str](), 0, 0
    while number < len(runs):
        if number in closing:
            start, end = runs[number], runs[closing[number]]
            found += [escape(line[at : start[0]]), f"<code>{escape(line[start[1] : end[0]])}</code>"]
            at, number = end[1], closing[number]
        number += 1
    return "".join([*found, escape(line[at:])])


cached_user_html = HTMLCache(MAX_KEPT_CHARS, user_html)


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
    views: list[ChatMessage | ComparedReplies] = [
        replace(one_message(chat_id, message, replies.get(message.id), editing=editing), is_left_out=at < num_left_out)
        for at, message in enumerate(messages)
    ]
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


def sampling(
    card: ModelCard | None,
    settings: Mapping[str, str],
    presets: Sequence[str] = (),
    *,
    preset: str = "",
    is_open: bool = False,
    error: ErrorNotice | None = None,
    wrong: str = "",
) -> Sampling:
    """Return the drawer, with the defaults that apply to empty fields. `wrong`: a field whose value was refused."""
    return Sampling(
        system=settings.get("system", ""),
        fields=tuple(
            _field(name, card, settings, wrong) for name in sorted(SETTINGS, key=lambda each: each not in FIRST)
        ),
        presets=tuple(presets),
        preset=preset,
        is_open=is_open or wrong in BEHAVIOUR,
        error=error,
        tools=settings.get("tools", ""),
        schema=settings.get("schema", ""),
        num_set=num_set(settings),
        wrong=wrong,
    )


def _field(name: str, card: ModelCard | None, settings: Mapping[str, str], wrong: str) -> SettingField:
    info, (default, source) = SETTINGS[name], effective(name, card)
    return SettingField(
        name, label(name), info.kind, settings.get(name, ""), default, source, note(name), info.low, info.high,
        name in FIRST, name == wrong,
    )  # fmt: skip


def composer_action(replies: ActiveReplies, chat_id: str) -> ComposerAction:
    """Return the composer's button: it stops every reply of the chat that is being written, else it sends."""
    return ComposerAction(f"/c/{chat_id}/stop" if replies.unfinished(chat_id) else None)


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
