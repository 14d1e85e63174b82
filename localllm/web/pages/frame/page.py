"""The description of a page: its entry in the navigation bar, its routes, who may use them.

Each page has one `Page` in its folder's `page.py`; `web/pages/__init__.py` lists them.
Does not know: the pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler

from localllm.web.access.scopes import RouteRules
from localllm.web.pages.frame.views import NavEntry

Hook = Callable[[Litestar], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page. Its templates, style sheets, scripts and samples are found by their place in its folder."""

    entry: NavEntry  # `entry.key` is the name of the folder
    handlers: Sequence[HTTPRouteHandler]
    rules: RouteRules  # a route in none of the rules needs the scope admin
    on_startup: tuple[Hook, ...] = ()
    on_shutdown: tuple[Hook, ...] = ()
