"""A chat as one HTML file that shows the branch on the page: no scripts, and nothing loaded from elsewhere.

Does not know: HTTP, where chats are stored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from localllm.web.pages.chat.markdown_stream import cached_html
from localllm.web.pages.chat.mathml import with_mathml
from localllm.web.pages.chat.message_views import ToolResult
from localllm.web.pages.chat.part_presenters import file_chips, sources
from localllm.web.pages.chat.shared_views import SharedChat, SharedMessage
from localllm.web.pages.chat.store import Chat, StoredMessage
from localllm.web.pages.chat.template_messages import calls_of
from localllm.web.pages.chat.tool_presenters import results
from localllm.web.pages.chat.user_text import user_html
from localllm.web.pages.frame.render import render

_BUTTON = re.compile(r"<button\b.*?</button>", re.DOTALL)
"""The buttons of a code block, which do nothing without scripts. Text of a model cannot match: its brackets are
escaped.
"""


def as_html(chat: Chat, messages: Sequence[StoredMessage]) -> bytes:
    """Return the file. Slow for a long chat: each message is drawn."""
    drawn = tuple(_message(message) for message in messages)
    return render(SharedChat(chat.title, time.strftime("%Y-%m-%d"), drawn, chat.settings.get("system", ""))).encode()


def _without_scripts(html: str) -> str:
    """Return the HTML of a message with its formulas drawn, and without the buttons of its code."""
    return with_mathml(_BUTTON.sub("", html))


def _message(message: StoredMessage) -> SharedMessage:
    details, is_user = message.details, message.role == "user"
    html = user_html(message.text) if is_user else cached_html(message.text)
    error = details.get("error") or ("",)
    return SharedMessage(
        role=message.role,
        author="You" if is_user else str(details.get("model") or "Assistant"),
        html="" if details.get("results") else _without_scripts(html),
        thinking_html=_without_scripts(cached_html(details["reasoning"])) if details.get("reasoning") else "",
        calls=tuple(ToolResult(call.name, call.arguments) for call in calls_of(details)),
        results=results(details),
        files=file_chips(details),
        sources=sources(details),
        error=str(error[0]),
    )
