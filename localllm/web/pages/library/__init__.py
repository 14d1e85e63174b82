"""The Models page: installed models and their state, search, downloads."""

from __future__ import annotations

from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry
from localllm.web.pages.library import handlers

PAGE = Page(
    NavEntry("library", "Models", "/library", "M10 2.5l7 3.75v7.5l-7 3.75-7-3.75v-7.5zM3 6.25L10 10l7-3.75M10 10v7.5"),
    handlers=handlers.HANDLERS,
    rules=RouteRules(infer=Paths("/live/library"), read=Paths("/library", "/library/*")),
)
