"""The memory across chats: notes of a user that the model reads at the beginning of each chat, once it is switched on.

Only the user writes it: on its page, or with "Remember" at a message. Each line is a note. It is off at first.
Does not know: how notes are stored, when a prompt is made.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.errors import RequestError
from localllm.units import format_count
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.records import UserMemory
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import requested_message
from localllm.web.pages.frame.errors import MessageTooLong, notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice, View, view

MAX_CHARS = 8_000
"""Most characters of all notes: about 2,000 tokens that every chat then reads."""

MAX_NOTE_CHARS = 500


@view("chat/_memory.html")
class MemoryPage(View):
    """The notes, as text to edit, and the switch."""

    is_on: bool = False
    text: str = ""
    most_chars: int = MAX_CHARS
    error: ErrorNotice | None = None


@view("chat/_remember_form.html")
class RememberForm(View):
    """The form that adds a note, with the beginning of a message to edit."""

    url: str  # of the message
    text: str
    is_on: bool = False  # the memory
    most_chars: int = MAX_NOTE_CHARS


@get("/memory")
async def show_memory(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the memory."""
    memory = await chat_state(request).store.call(Chats.memory, owner_of(request))
    return html(await v.panel_page(request, "Memory", MemoryPage(memory.is_on, memory.text)))


@post("/memory", status_code=200, request_max_body_size=200_000)
async def change_memory(request: Request[Any, Any, Any]) -> Response[Any]:
    """Replace all notes, and switch the memory on or off."""
    form, state, owner = await fields_of(request), chat_state(request), owner_of(request)
    is_on, text = "on" in form, _notes(form.get("text", ""))
    try:
        _require_short(text)
    except RequestError as error:
        return html(await v.panel_page(request, "Memory", MemoryPage(is_on, text, error=notice(error))), error.status)
    await state.store.call(Chats.set_memory, owner, UserMemory(is_on, text))
    return Redirect("/memory", status_code=303)


@get("/c/{conversation_id:str}/m/{message_id:str}/remember")
async def remember_form(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the form that adds a message's text to the memory."""
    state, (chat, message) = chat_state(request), await requested_message(request)
    memory = await state.store.call(Chats.memory, owner_of(request))
    text = " ".join(state.replies.current(message).text.split())[:MAX_NOTE_CHARS]
    form = RememberForm(f"/c/{chat.id}/m/{message.id}", text, memory.is_on)
    return html(form if is_scripted(request) else await v.panel_page(request, chat.title, form))


@post("/c/{conversation_id:str}/m/{message_id:str}/remember", status_code=200)
async def remember(request: Request[Any, Any, Any]) -> Response[Any]:
    """Add a note, and switch the memory on."""
    state, owner, (chat, _) = chat_state(request), owner_of(request), await requested_message(request)
    note = " ".join((await fields_of(request)).get("note", "").split())[:MAX_NOTE_CHARS]
    await state.store.call(_add_note, owner, note)
    if not is_scripted(request):
        return Redirect("/memory", status_code=303)
    return html(await v.update(request, chat, "Remembered"))


def _add_note(chats: Chats, owner: str, note: str) -> None:
    text = _notes(f"{chats.memory(owner).text}\n{note}")
    _require_short(text)
    chats.set_memory(owner, UserMemory(True, text))


def _notes(text: str) -> str:
    """Return the notes, one on each line, without empty lines and the marks of a list."""
    lines = (line.strip().removeprefix("- ").strip() for line in text.splitlines())
    return "\n".join(dict.fromkeys(line for line in lines if line))


def _require_short(text: str) -> None:
    if len(text) > MAX_CHARS:
        why = f"They have {format_count(len(text))} characters; at most {format_count(MAX_CHARS)} are kept."
        raise MessageTooLong("The notes are too long.", why, "Shorten them at /memory.", param="text")


HANDLERS = (show_memory, change_memory, remember_form, remember)
