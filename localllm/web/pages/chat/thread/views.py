"""The chat page as a whole, its answers to a message and to a change, and the start of a new chat.

Does not know: routes, templates, how a reply is generated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
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
from localllm.web.pages.chat.composer.settings import BEHAVIOUR, NAMES, num_set
from localllm.web.pages.chat.composer.views import (
    BehaviourChip,
    Composer,
    ComposerAction,
    Refusal,
    Sampling,
    attachments_view,
    card_of,
    composer_action,
    drawer,
    thinking_choice,
)
from localllm.web.pages.chat.composer.views import chip as behaviour_chip
from localllm.web.pages.chat.files.attachments import Attachment, divided
from localllm.web.pages.chat.offer.views import Announcement, OfferCard, OfferRoom, live_url_of, shown_offer
from localllm.web.pages.chat.replies.messages import is_summary
from localllm.web.pages.chat.sidebar.views import ChatHead, ChatList, Undo, chat_list
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Branch, Chat, Chats, Project
from localllm.web.pages.chat.store.tables import new_id
from localllm.web.pages.chat.thread.messages import ChatMessage, MessageList, head, message_list
from localllm.web.pages.chat.tools.views import chosen_again, web_switch
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import ErrorNotice, Loading, Shell, View, view


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
    servers: str = ""  # other servers that have the model; empty: this server has it


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
    sleeps or its engine has ended: a message wakes it, or loads it again.
    """
    state, owner = chat_state(request), owner_of(request)
    if settings is None:
        settings = chat.settings if chat else {**chosen_last(request), **(project.settings if project else {})}
    branch = Branch(())
    if chat is not None:
        branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=WINDOW, before=before)
    entry, others = state.pages.manager.register.default, state.pages.upstreams
    await others.looked()
    elsewhere = state.pages.elsewhere(settings.get("model", ""))
    waits = not elsewhere and state.pages.card is None and (entry is None or entry.state != "unloaded")
    card = card_of(state, settings)
    begins = new_id() if chat is None else ""
    composer, empty, offer = None, None, await shown_offer(request, is_new=chat is None)
    if not waits:
        action = composer_action(state.replies, chat.id) if chat else ComposerAction()
        sampling = await drawer(state, owner, card, settings, is_open=shows_behaviour)
        composer = Composer(
            *(chat.id if chat else "", sampling, action),
            models=await state.picker.choices(settings),
            thinking=thinking_choice(state, settings),
            web=web_switch(state, owner, settings),
            context_tokens=card.plan.max_model_len if card is not None else 0,
            project_id=project.id if project is not None else "",
            begins=begins,
            speech=speech.name if (speech := state.pages.manager.register.speech) is not None else "",
            error=None if elsewhere else state.pages.loading(settings.get("model", "")).error,
        )
        if chat is None and elsewhere:
            names, size = ", ".join(others.servers_of(elsewhere)), others.context_of(elsewhere)
            empty = EmptyChat(elsewhere, size, Examples(EXAMPLES), servers=names)
        elif chat is None and card is not None:
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
        head=new_head(project) if chat is None else head(chat, messages, card),
        chats=await chat_list(state, owner, chat),
        list=await message_list(state.replies, chat.id, branch, editing=editing) if chat else None,
        composer=composer,
        empty=empty,
        loading=state.pages.loading() if waits and (offer is None or entry is not None) else None,
        offer=offer,
        undo=undo,
        notice=ErrorNotice(state.store.notice) if state.store.notice else None,
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
        list=await message_list(state.replies, chat.id, branch),
        action=composer_action(state.replies, chat.id),
        head=head(chat, [state.replies.current(m) for m in branch.messages], card_of(state, chat.settings)),
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
    return await message_list(state.replies, chat.id, branch, outside=False)


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
        tool_servers=chosen_again(drawer.tool_servers, form),
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


def behaviour_field(param: str | None) -> str:
    """Return the drawer's field that an error's parameter names; empty for any other."""
    name = re.split(r"[.\[]", param or "")[0]
    return name if name in BEHAVIOUR else ""


def chosen_last(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Return the settings of a new chat: the model that this browser chose last, while it is ready."""
    name = unquote(request.cookies.get(MODEL_COOKIE, ""))
    return {"model": name} if name and chat_state(request).picker.is_ready(name) else {}
