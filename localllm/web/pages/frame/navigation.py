"""The frame around every page: the navigation bar, the status pill in the header, the theme.

A page that needs an entry in the navigation bar gets a line in `ENTRIES`.
Does not know: what the pages show, where the pill's figures come from.
"""

from __future__ import annotations

from typing import Any, get_args
from urllib.parse import urlsplit

from litestar import Request, post
from litestar.datastructures import Cookie
from litestar.response import Redirect

from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.views import NavEntry, Shell, StatusPill, Theme

ENTRIES = (
    NavEntry("chat", "Chat", "/chat", "M3 4.5h14v9H9l-3.5 3v-3H3z"),
    NavEntry("dashboard", "Dashboard", "/dashboard", "M3 16.5V11m4.7 5.5v-9m4.6 9v-5m4.7 5V3.5"),
    NavEntry("library", "Models", "/library", "M10 2.5l7 3.75v7.5l-7 3.75-7-3.75v-7.5zM3 6.25L10 10l7-3.75M10 10v7.5"),
    NavEntry(
        "tune",
        "Tune",
        "/tune",
        "M3 6h7m4 0h3M3 14h3m4 0h7M14 6a2 2 0 1 1-4 0 2 2 0 0 1 4 0zm-4 8a2 2 0 1 1-4 0 2 2 0 0 1 4 0z",
    ),
    NavEntry("playground", "Playground", "/playground", "M6.5 5.5 2.5 10l4 4.5m7-9 4 4.5-4 4.5M11.5 4l-3 12"),
    NavEntry("logs", "Logs", "/logs", "M3 5h14M3 10h9m-9 5h12"),
    NavEntry("settings", "Settings", "/settings", "M3 6h8m4 0h2M13 4v4M3 14h2m4 0h8M7 12v4"),
)
"""The icons are strokes in a 20 by 20 box."""

THEMES: tuple[Theme, ...] = get_args(Theme)
THEME_COOKIE = "localllm_theme"
A_YEAR_S = 365 * 24 * 3600


def shell(
    title: str,
    here: str,
    pill: StatusPill,
    theme: Theme = "auto",
    live_url: str = "/live/status",
    refresh_s: int | None = None,
) -> Shell:
    """Return the frame of a page. `here`: the key of the page's entry, or an empty string."""
    return Shell(title, here, ENTRIES, pill, theme, live_url, refresh_s)


def theme_of(request: Request[Any, Any, Any]) -> Theme:
    """Return the theme that this browser chose; default: same as the system."""
    chosen = request.cookies.get(THEME_COOKIE)
    return next((theme for theme in THEMES if theme == chosen), "auto")


@post("/theme", guards=[same_origin], status_code=303)
async def choose_theme(request: Request[Any, Any, Any]) -> Redirect:
    """Set the theme (light, dark, same as the system), then return to the page."""
    form = await request.form()
    chosen = form.get("theme")
    theme = chosen if chosen in THEMES else "auto"
    cookie = Cookie(key=THEME_COOKIE, value=theme, max_age=A_YEAR_S, httponly=True, samesite="strict")
    page = urlsplit(request.headers.get("referer", "")).path
    return Redirect(own_path(page), status_code=303, cookies=[cookie])


def own_path(path: object) -> str:
    """Return the path if it is on this server, else `/`."""
    if not isinstance(path, str) or not path.startswith("/") or path[1:2] in ("/", "\\"):
        return "/"
    return path if path.isprintable() else "/"
