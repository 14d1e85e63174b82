"""The description of a page, and the frame around every page: the navigation bar, the status pill in the header, the
look that a browser has chosen.

Each page has one `Page` in the `__init__.py` of its folder; `web/pages/__init__.py` lists them.
Does not know: the pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from litestar import Litestar, Request, post
from litestar.datastructures import Cookie
from litestar.handlers import HTTPRouteHandler
from litestar.response import Redirect

from localllm.web.access.auth import session_key
from localllm.web.access.keys import KeyRing
from localllm.web.access.scopes import RouteRules
from localllm.web.pages.frame.views import LOOKS, NavEntry, Shell, StatusPill

Hook = Callable[[Litestar], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page. Its templates, style sheets, scripts and samples are found by their place in its folder."""

    entry: NavEntry  # `entry.key` is the name of the folder
    handlers: Sequence[HTTPRouteHandler]
    rules: RouteRules  # a route in none of the rules needs the scope admin
    on_startup: tuple[Hook, ...] = ()
    on_shutdown: tuple[Hook, ...] = ()


A_YEAR_S = 365 * 24 * 3600


def shell(
    request: Request[Any, Any, Any],
    title: str,
    here: str,
    pill: StatusPill,
    live_url: str = "/live/status",
    refresh_s: int | None = None,
) -> Shell:
    """Return the frame of a page. `here`: the key of the page's entry, or an empty string."""
    entries: tuple[NavEntry, ...] = request.app.state["navigation"]
    keys: KeyRing = request.app.state.key_ring
    can_log_out = keys.is_locked and session_key(keys, request.scope) is not None
    return Shell(title, here, entries, pill, look_of(request), live_url, refresh_s, can_log_out)


def entry_of(request: Request[Any, Any, Any]) -> NavEntry | None:
    """Return the page that the address of the request belongs to; None if it belongs to none."""
    entries: tuple[NavEntry, ...] = request.app.state["navigation"]
    path = request.url.path
    return next((entry for entry in entries if path == entry.url or path.startswith(f"{entry.url}/")), None)


def look_of(request: Request[Any, Any, Any]) -> dict[str, str]:
    """Return what this browser chose of the pages' looks."""
    chosen = {name: request.cookies.get(f"localllm_{name}", "") for name in LOOKS}
    return {name: chosen[name] if chosen[name] in values else next(iter(values)) for name, values in LOOKS.items()}


@post("/look", status_code=303)
async def choose_look(request: Request[Any, Any, Any]) -> Redirect:
    """Set the theme, the size of text or the width of the chat's column, then return to the page."""
    form = await request.form()
    cookies = [
        Cookie(key=f"localllm_{name}", value=str(form[name]), max_age=A_YEAR_S, httponly=True, samesite="strict")
        for name, values in LOOKS.items()
        if form.get(name) in values
    ]
    page = urlsplit(request.headers.get("referer", "")).path
    return Redirect(own_path(page), status_code=303, cookies=cookies)


def own_path(path: object) -> str:
    """Return the path if it is on this server, else `/`."""
    if not isinstance(path, str) or not path.startswith("/") or path[1:2] in ("/", "\\"):
        return "/"
    return path if path.isprintable() else "/"
