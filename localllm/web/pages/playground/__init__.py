"""The playground: try an API request; see the prompt, the answer, and the probability of each token."""

from __future__ import annotations

from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.views import NavEntry
from localllm.web.pages.playground import handlers

PAGE = Page(
    NavEntry("playground", "Playground", "/playground", "M6.5 5.5 2.5 10l4 4.5m7-9 4 4.5-4 4.5M11.5 4l-3 12"),
    handlers=handlers.HANDLERS,
    rules=RouteRules(infer=Paths("/playground", "/playground/transcribe"), linked=Paths("/playground")),
)
