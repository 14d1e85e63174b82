"""Conversations and replies become the views of the chat page.

Does not know: HTTP, how a reply is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from litestar import Request

from localllm.served import ModelCard
from localllm.units import format_count
from localllm.web.pages.chat.conversations import Conversation, Exchange
from localllm.web.pages.chat.replies import Progress, Reply
from localllm.web.pages.errors import notice
from localllm.web.pages.room import Room, room_of
from localllm.web.views.chat import (
    ChatMessage,
    ChatPage,
    Composer,
    ComposerAction,
    EmptyChat,
    Figures,
    OpenBlock,
    RecentChat,
    ReplyFinished,
    ReplyProgress,
    Sampling,
)
from localllm.web.views.shared import ErrorNotice, Loading, Phase

EXAMPLES = (
    "What is paged attention?",
    "How do I start localllm?",
    "Give me a JSON object describing a book",
)


def chat_page(
    request: Request[Any, Any, Any], conversation: Conversation | None, remembered: Sequence[Conversation]
) -> ChatPage:
    """The page for a conversation, or for none yet. A model that sleeps has one too: the message wakes it."""
    room = room_of(request)
    card = room.card
    if card is None:
        return ChatPage(room.shell(request, "Chat", "chat", waits=True), loading=loading(room))
    shell = room.shell(request, conversation.title if conversation else "New chat", "chat")
    writing = conversation.writing if conversation else None
    stop = stop_url(conversation, writing) if conversation and writing else None
    recent = tuple(RecentChat(f"/c/{known.id}", known.title) for known in remembered[:5])
    return ChatPage(
        shell=shell,
        messages=messages(conversation) if conversation else (),
        composer=Composer(conversation.id if conversation else "", sampling(card, conversation), ComposerAction(stop)),
        empty=None if conversation else EmptyChat(card.name, card.plan.max_model_len, EXAMPLES, recent),
    )


def with_error(page: ChatPage, form: Mapping[str, str], error: ErrorNotice) -> ChatPage:
    """The page again, with what was typed and why it was refused."""
    if page.composer is None:
        return page
    typed = {name: _worth_returning(form.get(name, "")) for name in ("system", "temperature", "max_tokens")}
    settings = replace(page.composer.sampling, **typed)
    text = _worth_returning(form.get("message", ""))
    return replace(page, composer=replace(page.composer, sampling=settings, text=text, error=error))


def _worth_returning(text: str) -> str:
    """What was typed; a megabyte that was refused is not sent back."""
    return text if len(text) < 100_000 else ""


def loading(room: Room) -> Loading:
    """Where the load is, or why it failed."""
    kept = room.manager.default
    if kept is None:
        return Loading("the model")
    phases = tuple(Phase(phase.name, phase.done, phase.fraction, phase.detail) for phase in kept.phases.values())
    error = notice(kept.error) if kept.error and kept.state == "failed" else None
    return Loading(kept.name, phases, error, kept.state if kept.state in ("sleeping", "unloaded") else "")


def sampling(card: ModelCard, conversation: Conversation | None) -> Sampling:
    """The drawer, with the defaults that apply where the user sets nothing."""
    defaults = card.default_params
    limit = defaults.max_tokens if "max_tokens" in card.sampling_defaults else None
    return Sampling(
        system=conversation.system if conversation else "",
        temperature=conversation.temperature if conversation else "",
        max_tokens=conversation.max_tokens if conversation else "",
        default_temperature=f"{defaults.temperature:g}",
        default_max_tokens=format_count(limit) if limit else f"what is left of {format_count(card.plan.max_model_len)}",
        source="the model's own setting" if "temperature" in card.sampling_defaults else "the server's default",
    )


def messages(conversation: Conversation) -> tuple[ChatMessage, ...]:
    return tuple(
        message
        for exchange in conversation.exchanges
        for message in (user_message(exchange), assistant_message(conversation, exchange))
    )


def user_message(exchange: Exchange) -> ChatMessage:
    return ChatMessage(id=f"{exchange.id}-user", role="user", text=exchange.user_text)


def assistant_message(conversation: Conversation, exchange: Exchange) -> ChatMessage:
    """The reply as it stands; while it is being written it says where to follow it."""
    reply = exchange.reply
    kind, text = reply.open_block()
    return ChatMessage(
        id=exchange.id,
        role="assistant",
        html=reply.html,
        model=reply.model,
        open=None if reply.done else OpenBlock(exchange.id, kind, text),
        stream_url=None if reply.done else f"/c/{conversation.id}/m/{exchange.id}/stream",
        figures=figures(reply),
        error=notice(reply.error) if reply.error else None,
    )


def stop_url(conversation: Conversation, exchange: Exchange) -> str:
    return f"/c/{conversation.id}/m/{exchange.id}/stop"


def figures(reply: Reply) -> Figures | None:
    """The line below a finished reply; None where the engine never counted."""
    usage, timings = reply.usage, reply.timings
    if usage is None or reply.finish_reason is None:
        return None
    rate = None
    if timings is not None and timings.decode_s > 0 and usage.completion_tokens > 1:
        rate = (usage.completion_tokens - 1) / timings.decode_s
    return Figures(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=reply.finish_reason,
        ttft_s=timings.ttft_s if timings is not None and usage.completion_tokens else None,
        tokens_per_s=rate,
        context_tokens=reply.context_tokens,
    )


def reply_progress(exchange: Exchange, progress: Progress) -> ReplyProgress:
    kind = progress.open_kind
    return ReplyProgress(
        message_id=exchange.id,
        html=progress.html,
        replaces=progress.restarts,
        open=OpenBlock(exchange.id, kind, progress.open_text) if kind else None,
        appended="" if kind else progress.open_text,
    )


def reply_finished(conversation: Conversation, exchange: Exchange) -> ReplyFinished:
    return ReplyFinished(assistant_message(conversation, exchange), ComposerAction(), announcement(exchange.reply))


def announcement(reply: Reply) -> str:
    """What a screen reader hears at the end."""
    tokens = f", {format_count(reply.usage.completion_tokens)} tokens" if reply.usage else ""
    if reply.error is not None:
        return f"Reply failed: {reply.error.what}"
    return f"Reply stopped{tokens}" if reply.finish_reason == "abort" else f"Reply finished{tokens}"
