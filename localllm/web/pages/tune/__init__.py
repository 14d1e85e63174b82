"""The tuning wizard: find settings for a goal by trying them, in four steps."""

from __future__ import annotations

from localllm.web.access.scopes import RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry
from localllm.web.pages.tune import handlers

PAGE = Page(
    NavEntry(
        "tune",
        "Tune",
        "/tune",
        "M3 6h7m4 0h3M3 14h3m4 0h7M14 6a2 2 0 1 1-4 0 2 2 0 0 1 4 0zm-4 8a2 2 0 1 1-4 0 2 2 0 0 1 4 0z",
    ),
    handlers=handlers.HANDLERS,
    rules=RouteRules(),
)
