"""The settings page: settings with their sources, keys, storage, versions."""

from __future__ import annotations

from localllm.web.access.scopes import RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry
from localllm.web.pages.settings import handlers, mcp_handlers

PAGE = Page(
    NavEntry("settings", "Settings", "/settings", "M3 6h8m4 0h2M13 4v4M3 14h2m4 0h8M7 12v4"),
    handlers=(*handlers.HANDLERS, *mcp_handlers.HANDLERS),
    rules=RouteRules(),
)
