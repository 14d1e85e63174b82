"""The dashboard: the state of the engine, live."""

from __future__ import annotations

from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.pages.dashboard import handlers
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry

PAGE = Page(
    NavEntry("dashboard", "Dashboard", "/dashboard", "M3 16.5V11m4.7 5.5v-9m4.6 9v-5m4.7 5V3.5"),
    handlers=handlers.HANDLERS,
    rules=RouteRules(
        infer=Paths("/dashboard", "/live/dashboard"), read=Paths("/dashboard/*"), linked=Paths("/dashboard")
    ),
)
