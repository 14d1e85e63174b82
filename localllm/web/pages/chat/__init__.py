"""The chat page: conversations, and replies as they are generated."""

from __future__ import annotations

from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.pages.chat.composer import handlers as composer_handlers
from localllm.web.pages.chat.files import handlers as attachment_handlers
from localllm.web.pages.chat.offer import handlers as offer_handlers
from localllm.web.pages.chat.projects import handlers as project_handlers
from localllm.web.pages.chat.prompts import handlers as prompt_handlers
from localllm.web.pages.chat.prompts import memory
from localllm.web.pages.chat.sidebar import handlers as sidebar_handlers
from localllm.web.pages.chat.state import close_chats, open_chats
from localllm.web.pages.chat.thread import handlers, message_handlers
from localllm.web.pages.chat.tools import handlers as tool_handlers
from localllm.web.pages.chat.tools.runs import close_tools, open_tools
from localllm.web.pages.chat.transfer import handlers as transfer_handlers
from localllm.web.pages.chat.transfer import previews
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry

PAGE = Page(
    NavEntry("chat", "Chat", "/chat", "M3 4.5h14v9H9l-3.5 3v-3H3z"),
    handlers=(
        *handlers.HANDLERS,
        *message_handlers.HANDLERS,
        *previews.HANDLERS,
        *attachment_handlers.HANDLERS,
        *composer_handlers.HANDLERS,
        *sidebar_handlers.HANDLERS,
        *transfer_handlers.HANDLERS,
        *offer_handlers.HANDLERS,
        *tool_handlers.HANDLERS,
        *prompt_handlers.HANDLERS,
        *memory.HANDLERS,
        *project_handlers.HANDLERS,
    ),
    rules=RouteRules(
        infer=Paths(
            *("/", "/chat", "/chats", "/c/*", "/chats/*", "/live/chat", "/live/chat/model", "/palette", "/memory"),
            *("/prompts", "/prompts/*", "/projects", "/projects/*"),
        ),
        linked=Paths("/", "/c/*", "/shared/*"),
    ),
    on_startup=(open_chats, open_tools),
    on_shutdown=(close_tools, close_chats),
)
