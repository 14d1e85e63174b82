"""Turn messages and replies into the views of a chat.

Does not know: HTTP handlers, how a reply is generated, where chats are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.serving.served import ModelCard
from localllm.units import format_count
from localllm.web.pages.chat.active_replies import ActiveReplies, ActiveReply
from localllm.web.pages.chat.composer_presenters import summary_origin
from localllm.web.pages.chat.composer_views import ContextMeter
from localllm.web.pages.chat.figures import figures
from localllm.web.pages.chat.markdown_stream import cached_html
from localllm.web.pages.chat.part_presenters import file_chips, live_thinking, sources, stored_thinking
from localllm.web.pages.chat.readable import has_failed, is_summary
from localllm.web.pages.chat.settings import BEHAVIOUR, FIRST, SETTINGS, effective, label, note, num_set
from localllm.web.pages.chat.sidebar_presenters import when
from localllm.web.pages.chat.sidebar_views import ChatHead
from localllm.web.pages.chat.store import Branch, Chat, StoredMessage
from localllm.web.pages.chat.tool_presenters import call_cards, follows_calls, result_form, results
from localllm.web.pages.chat.user_text import cached_user_html
from localllm.web.pages.chat.views import (
    ChatMessage,
    ComparedReplies,
    ComposerAction,
    EditForm,
    MessageActions,
    MessageList,
    OpenBlock,
    ReplyFinished,
    Sampling,
    SettingField,
)
from localllm.web.pages.frame.views import ErrorNotice

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
