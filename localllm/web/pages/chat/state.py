"""The state that the chat's handlers share: stored chats, unfinished replies, attached files, the offered model.

There is one per application.

Does not know: routes, the requests to the engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Litestar, Request

from localllm.mcp.servers import McpServers
from localllm.serving.model_offer import ModelOffer
from localllm.web.access.caller import mcp_of
from localllm.web.pages.chat.composer.model_picker import ModelPicker
from localllm.web.pages.chat.files.attachments import PendingAttachments
from localllm.web.pages.chat.projects.folder import Folders
from localllm.web.pages.chat.replies.active import ActiveReplies
from localllm.web.pages.chat.replies.titles import Titles
from localllm.web.pages.chat.store import ChatStore
from localllm.web.pages.chat.store.database import chats_path
from localllm.web.pages.frame.state import PagesState, once_per_app, pages_state_of


class ChatState:
    """The shared state of the chat page. `mcp`: the servers of tools."""

    def __init__(self, pages: PagesState, offers: ModelOffer, mcp: McpServers, *, on_disk: bool, titles: str) -> None:
        self.pages, self.offers, self.mcp = pages, offers, mcp
        self.store = ChatStore(chats_path() if on_disk else None)
        self.replies = ActiveReplies(self.store)
        self.attachments = PendingAttachments()
        self.folders = Folders(self.store)
        self.embedding: dict[str, asyncio.Task[None]] = {}  # the work on long files, by chat
        self.titles = Titles(pages, self.store, titles)
        self.picker = ModelPicker(pages)


def chat_state(request: Request[Any, Any, Any]) -> ChatState:
    """Return the application's chat state, made at first use."""
    return chat_state_of(request.app)


def chat_state_of(app: Litestar) -> ChatState:
    server = app.state["settings"].server

    def make() -> ChatState:
        pages = pages_state_of(app)
        offers = ModelOffer(app.state["manager"], app.state["downloads"], app.state["settings"], pages.suggestions)
        return ChatState(pages, offers, mcp_of(app), on_disk=server.chat_history, titles=server.chat_titles)

    return once_per_app(app, "chats", make)


async def open_chats(app: Litestar) -> None:
    """Purge old deletions at server start, once they can no longer be undone."""
    state = chat_state_of(app)
    if state.store.path is not None and state.store.path.exists():
        state.replies.purge_later()


async def close_chats(app: Litestar) -> None:
    """Save the replies that are still being written, at shutdown."""
    for task in chat_state_of(app).embedding.values():
        task.cancel()
    await chat_state_of(app).folders.close()
    await chat_state_of(app).titles.close()
    await chat_state_of(app).replies.close()
    await chat_state_of(app).offers.close()
    await chat_state_of(app).picker.close()
