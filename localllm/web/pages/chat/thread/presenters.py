"""Assemble the chat page: list, head, messages, composer.

Does not know: routes, templates, how a reply is generated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from litestar import Request

from localllm.errors import LocalLLMError, RequestError
from localllm.models.library.about import count_parameters
from localllm.models.library.catalog import DEMO_NAME, demo_path
from localllm.serving.entry import ModelEntry
from localllm.serving.served import ModelCard
from localllm.units import format_bytes, format_parameters
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat.composer.presenters import attachments_view, thinking_choice
from localllm.web.pages.chat.composer.presenters import chip as behaviour_chip
from localllm.web.pages.chat.composer.settings import BEHAVIOUR, NAMES, num_set
from localllm.web.pages.chat.composer.views import Refusal
from localllm.web.pages.chat.files.attachments import Attachment, divided
from localllm.web.pages.chat.offer.presenters import live_url_of, shown_offer
from localllm.web.pages.chat.offer.views import OfferRoom
from localllm.web.pages.chat.replies.messages import is_summary
from localllm.web.pages.chat.sidebar.presenters import chat_list
from localllm.web.pages.chat.sidebar.views import ChatHead, Undo
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Branch, Chat, Chats, Project
from localllm.web.pages.chat.store.records import ChatsUnavailable
from localllm.web.pages.chat.store.tables import new_id
from localllm.web.pages.chat.thread import messages as message_presenters
from localllm.web.pages.chat.thread.views import (
    ChatPage,
    ChatUpdate,
    Composer,
    ComposerAction,
    EmptyChat,
    Examples,
    MessageList,
    Sampling,
)
from localllm.web.pages.chat.tools import views
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import ErrorNotice, View

WINDOW = 40
"""Messages of a chat that are shown at first; earlier ones load when the user scrolls up."""

MODEL_COOKIE = "localllm_model"
"""The name of the model that this browser sent to or picked last, percent-encoded."""

EXAMPLES = (
    "Explain in simple words why the sky is blue",
    "Write a Python function that finds the longest common prefix of a list of strings",
    "Plan three quick dinners for two, with a shopping list",
)
DEMO_EXAMPLES = (
    "What is paged attention in simple words?",
    "Why do we need continuous batching?",
    "Write a function that reverses a string.",
)
"""The demo answers little, and these well: its own test asks them."""


async def chat_page(
    request: Request[Any, Any, Any],
    chat: Chat | None,
    *,
    before: str | None = None,
    editing: str = "",
    undo: Undo | None = None,
    settings: Mapping[str, str] | None = None,
    project: Project | None = None,
    shows_behaviour: bool = False,
) -> ChatPage:
    """Return the page of a chat, or of a new one, which may be in a project. There is a composer even if the model
    sleeps: a message wakes it.
    """
    state, owner = chat_state(request), owner_of(request)
    if settings is None:
        start = {**chosen_last(request), **(project.settings if project is not None else {})}
        settings = chat.settings if chat is not None else start
    branch = Branch(())
    if chat is not None:
        branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=WINDOW, before=before)
    entry = state.pages.manager.default
    waits = state.pages.card is None and (entry is None or entry.state != "unloaded")
    card = card_of(state, settings)
    begins = new_id() if chat is None else ""
    composer, empty, offer = None, None, await shown_offer(request, is_new=chat is None)
    if not waits:
        action = message_presenters.composer_action(state.replies, chat.id) if chat else ComposerAction()
        sampling = await drawer(state, owner, card, settings, is_open=shows_behaviour)
        composer = Composer(
            chat.id if chat else "",
            sampling,
            action,
            models=await state.picker.choices(settings),
            thinking=thinking_choice(state, settings),
            context_tokens=card.plan.max_model_len if card is not None else 0,
            project_id=project.id if project is not None else "",
            begins=begins,
        )
        if chat is None and card is not None:
            empty = await asyncio.to_thread(empty_chat, card)
        elif chat is None and entry is not None and not settings.get("model"):
            empty = await _resting_chat(state, entry)
    messages = [state.replies.current(message) for message in branch.messages]
    if composer is not None and messages and is_summary(messages[-1]):
        composer = await _with_draft(state, owner, composer, messages[-1].details)
    return ChatPage(
        shell=state.pages.shell(
            request,
            chat.title if chat else "New chat",
            "chat",
            live_url_of(offer, "" if waits else chat.id if chat else begins, settings.get("model", "")),
            waits=waits,
            moves=isinstance(offer, OfferRoom),
            pill=state.pages.chat_pill(settings.get("model", "")),
        ),
        head=new_head(project) if chat is None else message_presenters.head(chat, messages, card),
        chats=await chat_list(state, owner, chat),
        list=await message_presenters.message_list(state.replies, chat.id, branch, editing=editing) if chat else None,
        composer=composer,
        empty=empty,
        loading=state.pages.loading() if waits and (offer is None or state.pages.manager.default is not None) else None,
        offer=offer,
        undo=undo,
        notice=_store_notice(state),
        chip=behaviour_chip(chat, settings),
    )


def new_head(project: Project | None) -> ChatHead:
    """Return the head of a chat that has not begun."""
    if project is None:
        return ChatHead("New chat")
    return ChatHead("New chat", project_name=project.name, project_url=f"/projects/{project.id}")


async def _with_draft(state: ChatState, owner: str, composer: Composer, details: Mapping[str, Any]) -> Composer:
    """Return the composer with the text and the files that waited while a summary was written."""
    try:
        files = state.attachments.get(owner, details.get("draft_files", []))
    except RequestError:  # the server was restarted since
        files = []
    attachments = attachments_view(divided(files, composer.context_tokens * 3 // 4), composer.context_tokens)
    return replace(composer, text=details.get("draft", ""), attachments=attachments)


async def panel_page(request: Request[Any, Any, Any], title: str, panel: View, undo: Undo | None = None) -> ChatPage:
    """Return a page with a form or a list in place of a chat; with scripts a small one is a dialog."""
    state = chat_state(request)
    chats = await chat_list(state, owner_of(request), None)
    return ChatPage(state.pages.shell(request, title, "chat"), ChatHead(title), chats, panel=panel, undo=undo)


async def update(
    request: Request[Any, Any, Any], chat: Chat, announcement: str, undo: Undo | None = None, *, sent: bool = False
) -> ChatUpdate:
    """Return the changed parts of an open page after messages changed. `sent`: the composer's message is among them."""
    state = chat_state(request)
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=WINDOW)
    return ChatUpdate(
        list=await message_presenters.message_list(state.replies, chat.id, branch),
        action=message_presenters.composer_action(state.replies, chat.id),
        head=message_presenters.head(
            chat, [state.replies.current(m) for m in branch.messages], card_of(state, chat.settings)
        ),
        announcement=announcement,
        undo=undo,
        chip=behaviour_chip(chat, chat.settings),
        clears_composer=sent,
        chats=await chat_list(state, owner_of(request), chat) if sent else None,
    )


async def earlier(request: Request[Any, Any, Any], chat: Chat, before: str) -> MessageList:
    """Return the messages before one, to be inserted above it."""
    state = chat_state(request)
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=WINDOW, before=before)
    return await message_presenters.message_list(state.replies, chat.id, branch, outside=False)


def with_error(
    page: ChatPage,
    form: Mapping[str, str],
    error: LocalLLMError | None,
    files: Sequence[Attachment] = (),
    refusal: Refusal | None = None,
) -> ChatPage:
    """Return the page with what was typed and attached, and the error where it belongs."""
    if page.composer is None:
        return page
    composer = page.composer
    changed = replace(
        composer,
        sampling=refused_drawer(composer.sampling, form, error.param if error is not None else None),
        text=_bounded_text(form.get("message", "")),
        attachments=attachments_view(files, composer.context_tokens),
        error=notice(error) if error is not None and refusal is None else None,
        refusal=refusal,
    )
    return replace(page, composer=changed)


def refused_drawer(drawer: Sampling, form: Mapping[str, str], param: str | None) -> Sampling:
    """Return the drawer with the typed values; it is open if `param` is one of its fields."""
    typed = {name: _bounded_text(form.get(name, "")) for name in NAMES}
    wrong = behaviour_field(param)
    return replace(
        drawer,
        system=typed["system"],
        tools=typed["tools"],
        schema=typed["schema"],
        fields=tuple(replace(field, value=typed[field.name], is_wrong=field.name == wrong) for field in drawer.fields),
        tool_servers=views.chosen_again(drawer.tool_servers, form),
        num_set=num_set(typed),
        is_open=bool(wrong),
        wrong=wrong,
    )


def _bounded_text(text: str) -> str:
    """Return the typed text; a very long one that was refused is not sent back."""
    return text if len(text) < 100_000 else ""


def empty_chat(card: ModelCard) -> EmptyChat:
    """Return the start of a new chat with this model. Blocking: it reads the demo's header once."""
    is_demo = card.path == demo_path()
    toy_size = format_parameters(count_parameters(card.path)) if is_demo else ""
    examples = Examples(DEMO_EXAMPLES if is_demo else EXAMPLES)
    return EmptyChat(card.name, card.plan.max_model_len, examples, toy_size)


async def _resting_chat(state: ChatState, entry: ModelEntry) -> EmptyChat:
    """Return the start of a new chat with a model that nothing has loaded yet."""
    size_bytes = await state.picker.size_of(entry)
    examples = Examples(DEMO_EXAMPLES if entry.name == DEMO_NAME else EXAMPLES)
    return EmptyChat(entry.name, 0, examples, rests=True, size=format_bytes(size_bytes) if size_bytes else "")


def card_of(state: ChatState, settings: Mapping[str, str]) -> ModelCard | None:
    """Return facts about the model that the next message goes to."""
    name = settings.get("model")
    entry = state.pages.manager.register.find(name) if name else None
    return entry.card if entry is not None else state.pages.card if not name else None


def behaviour_field(param: str | None) -> str:
    """Return the drawer's field that an error's parameter names; empty for any other."""
    name = re.split(r"[.\[]", param or "")[0]
    return name if name in BEHAVIOUR else ""


def chosen_last(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Return the settings of a new chat: the model that this browser chose last, while it is ready."""
    name = unquote(request.cookies.get(MODEL_COOKIE, ""))
    return {"model": name} if name and chat_state(request).picker.is_ready(name) else {}


async def drawer(
    state: ChatState, owner: str, card: ModelCard | None, settings: Mapping[str, str], *, is_open: bool = False
) -> Sampling:
    """Return the drawer, with the defaults of the model."""
    try:
        presets = await state.store.call(Chats.presets, owner)
    except ChatsUnavailable:
        presets = {}
    found = message_presenters.sampling(card, settings, tuple(presets), is_open=is_open)
    return replace(found, tool_servers=views.tool_servers(state, owner, settings))


def _store_notice(state: ChatState) -> ErrorNotice | None:
    return ErrorNotice(state.store.notice) if state.store.notice else None
