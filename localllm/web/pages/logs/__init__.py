"""The logs page: the last log lines of this server, live."""

from __future__ import annotations

from localllm.web.access.scopes import RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry
from localllm.web.pages.logs import handlers

PAGE = Page(
    NavEntry("logs", "Logs", "/logs", "M3 5h14M3 10h9m-9 5h12"),
    handlers=handlers.HANDLERS,
    rules=RouteRules(),
)
