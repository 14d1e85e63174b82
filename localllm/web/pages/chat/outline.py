"""The outline of a chat: what the user asked on the shown branch, as links to each question.

A question is shown among the messages around it, so that a long chat is never drawn whole.
Does not know: how messages are stored or drawn.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.response import Response

from localllm.web.pages.chat import presenters
from localllm.web.pages.chat.handlers import requested_chat
from localllm.web.pages.chat.readable import is_typed
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.template_messages import files_of
from localllm.web.pages.chat.views import Outline
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.state import html

TITLE_CHARS = 120


@get("/c/{conversation_id:str}/outline")
async def show_outline(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the questions of a chat, in a dialog or as a page."""
    chat = await requested_chat(request)
    questions, path = await chat_state(request).store.call(Chats.questions, chat.id, chat.leaf)
    view = Outline(tuple((_title(m), _url(chat, path, place, m)) for place, m in questions if is_typed(m)))
    return html(view if is_scripted(request) else await presenters.panel_page(request, chat.title, view))


def _title(message: StoredMessage) -> str:
    text = " ".join(message.text.split()) or ", ".join(name for name, _ in files_of(message.details))
    return text if len(text) <= TITLE_CHARS else text[: TITLE_CHARS - 1].rstrip() + "…"


def _url(chat: Chat, path: list[str], place: int, message: StoredMessage) -> str:
    """Return the URL of a page that shows the message: the newest messages, or those around it."""
    is_newest = place >= len(path) - presenters.WINDOW
    around = "" if is_newest else f"?before={path[place + presenters.WINDOW // 2]}"
    return f"/c/{chat.id}{around}#m-{message.id}"


HANDLERS = (show_outline,)
