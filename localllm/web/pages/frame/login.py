"""`/login`: a browser sends a key once and gets a session cookie.

The cookie does not contain the key: it names a session that `KeyRing` keeps, so logging out ends it everywhere.
Does not know: which routes need a key (web/access/auth.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from litestar import Request, get, post
from litestar.datastructures import Cookie
from litestar.response import Redirect, Response

from localllm.web.access.auth import SESSION_COOKIE, address_of, session_key, session_of
from localllm.web.access.keys import KeyRing
from localllm.web.access.sessions import SESSION_S
from localllm.web.pages.frame.navigation import own_path, shell
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice, LoginPage, StatusPill

WRONG = ErrorNotice("That is not a key of this server.")
USED = ErrorNotice(
    "This link cannot be used any more.",
    "Each link logs one browser in, once and within an hour, and ends with the server that made it.",
    "localllm link prints another one.",
)

MAX_FORM_BYTES = 32 * 1024
"""A key, and the page that was requested: a URL has at most 16 KiB."""


@get("/login", sync_to_thread=True)
def login_page(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the form; redirect if the server has no keys or the browser is logged in. The login leads back to the page
    that the browser came from. A one-time link logs the browser in.
    """
    keys: KeyRing = request.app.state.key_ring
    following = own_path(request.query_params.get("next") or urlsplit(request.headers.get("referer", "")).path)
    if token := request.query_params.get("once"):
        owner = keys.open_link(token)
        request.app.state.guesses.check(address_of(request.scope), owner)
        if owner is not None:
            cookie = session_cookie(request, keys.session(owner), SESSION_S)
            return Redirect(following, status_code=303, cookies=[cookie])
        if session_key(keys, request.scope) is None:
            return html(_page(request, following, USED), 401)
    if not keys.is_locked or session_key(keys, request.scope) is not None:
        return Redirect(following, status_code=303)
    return html(_page(request, following))


@post("/login", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def log_in(request: Request[Any, Any, Any]) -> Response[Any]:
    """Start a session for a valid key, else show the form again. After many wrong keys from an address, refuse for a
    while.
    """
    keys: KeyRing = request.app.state.key_ring
    form = await request.form()
    following = own_path(form.get("next"))
    key = keys.find([str(form.get("key", "")).strip().encode()])
    request.app.state.guesses.check(address_of(request.scope), key)
    if key is None:
        return html(_page(request, following, WRONG), 401)
    session = await asyncio.to_thread(keys.session, key)
    return Redirect(following, status_code=303, cookies=[session_cookie(request, session, SESSION_S)])


@post("/logout", status_code=303, sync_to_thread=True)
def log_out(request: Request[Any, Any, Any]) -> Redirect:
    """End the session, in this browser and wherever its cookie was copied to."""
    keys: KeyRing = request.app.state.key_ring
    keys.end_session(session_of(request.scope))
    apart = {"referrer-policy": "no-referrer"}  # the next login does not lead back to this page
    return Redirect("/login", status_code=303, headers=apart, cookies=[session_cookie(request, "", 0)])


def session_cookie(request: Request[Any, Any, Any], value: str, max_age: int) -> Cookie:
    secure = request.scope["scheme"] == "https"
    return Cookie(key=SESSION_COOKIE, value=value, max_age=max_age, httponly=True, samesite="strict", secure=secure)


def _page(request: Request[Any, Any, Any], following: str, error: ErrorNotice | None = None) -> LoginPage:
    around = shell(request, "Log in", "", StatusPill("loading", "locked"), live_url="")
    return LoginPage(replace(around, entries=()), following, error)


HANDLERS = (login_page, log_in, log_out)
