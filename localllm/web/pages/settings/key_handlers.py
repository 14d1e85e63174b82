"""Create and remove keys on the settings page.

A change that would lock users out needs a confirmation first.
Does not know: how keys are stored (access/keys.py), which route needs which scope (access/scopes.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from litestar import Request, post
from litestar.response import Redirect, Response

from localllm.errors import ConfigError, NotWritable
from localllm.web.access.caller import require_owner
from localllm.web.access.keys import SCOPES, Key, KeyRing, add_key, read_keys, remove_key
from localllm.web.access.sessions import SESSION_S
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.records import ChatsUnavailable
from localllm.web.pages.frame.login import session_cookie
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import ErrorNotice
from localllm.web.pages.settings.views import NewKeyPage, RemoveKeyPage, key_of, keys_card, whole_page

FIRST_FOR_INFER = ErrorNotice(
    "This first key would lock you out of this page.",
    "Once a key exists, the server requires one, and scope infer cannot change settings, read logs or manage models.",
    "Create a key with the scope admin first, or create this key anyway.",
)

CHATS_STAY = (
    "Without this key they cannot be opened, not even with a new key of the same name. To open them with another key, "
    'add the line id = "{owner}" to that key in {path}.'
)


@post("/settings/keys", status_code=200, request_max_body_size=100_000)
async def create_key(request: Request[Any, Any, Any]) -> Response[Any]:
    """Create a key and show it once. A browser without a key is logged in with it. As an admin key may do everything,
    this needs an admin key or a one-time link, also on a server without keys.
    """
    require_owner(request)
    ring: KeyRing = request.app.state.key_ring
    form = await request.form()
    name, asked = str(form.get("name", "")).strip(), str(form.get("scope", ""))
    typed = {"name": name, "scope": asked}
    scope = next((each for each in SCOPES if each == asked), None)
    first = not ring.is_locked
    try:
        if scope is None:
            raise ConfigError(f"Unknown scope {asked[:40]!r}.", f"Known: {', '.join(SCOPES)}.", param="scope")
        if first and scope != "admin" and form.get("confirm") != "yes":
            card = keys_card(request, **typed, error=FIRST_FOR_INFER, confirms=True)
            return html(await whole_page(request, card), 409)
        key = add_key(ring.path, name, scope)
    except (ConfigError, NotWritable) as error:
        card = keys_card(request, **typed, error=ErrorNotice(error.what, error.why, error.hint))
        return html(await whole_page(request, card), 503 if isinstance(error, NotWritable) else 400)
    made = ring.find([key.encode()])
    cookies = [session_cookie(request, ring.session(made), SESSION_S)] if first and made is not None else []
    page = NewKeyPage(pages_state(request).shell(request, "New key", "settings"), name, scope, key, first)
    return html(page, cookies=cookies)


@post("/settings/keys/{name:str}/remove", status_code=303, request_max_body_size=100_000)
async def delete_key(request: Request[Any, Any, Any]) -> Response[Any]:
    """Remove a key and return to the page. If that has consequences, first ask for a confirmation."""
    ring: KeyRing = request.app.state.key_ring
    name = request.path_params["name"]
    keys, mine = read_keys(ring.path), key_of(request)
    found = next((key for key in keys if key.name == name), None)
    form = await request.form()
    if found is not None and form.get("confirm") != "yes":
        given = bool(request.app.state.settings.server.api_keys)
        why = lockout_warning(found, [key for key in keys if key is not found], given=given, mine=found == mine)
        title = f"Removing {name} locks users out."
        others = [key for key in keys if key is not found and key.scope == "infer" and key.owner == found.owner]
        if not why and found.scope == "infer" and not others:  # no other key sees the same chats
            num_chats = 0
            with suppress(ChatsUnavailable):  # an unavailable store must not block the removal of a key
                num_chats = await chat_state(request).store.call(Chats.count, found.owner)
            title = f"{name} has {num_chats} {'chat' if num_chats == 1 else 'chats'}."
            why = CHATS_STAY.format(owner=found.owner, path=ring.path) if num_chats else ""
        if why:
            warning = ErrorNotice(title, why)
            shell = pages_state(request).shell(request, "Remove a key", "settings")
            return html(RemoveKeyPage(shell, name, request.url.path, warning), 409)
    remove_key(ring.path, name)
    return Redirect("/settings#keys", status_code=303)


def lockout_warning(key: Key, others: list[Key], *, given: bool, mine: bool) -> str:
    """Return who would be locked out, or an empty string. `given`: there are also keys for this run only."""
    if not others and not given:
        return (
            "It is the last key: neither these pages nor the API can be used until a new key is created on the "
            "server's machine with localllm keys add NAME, or the server is restarted."
        )
    if key.scope == "admin" and not given and not any(other.scope == "admin" for other in others):
        return (
            "It is the last key with the scope admin: this page, the logs and the management of models are closed "
            "until a new one is created on the server's machine with localllm keys add NAME --scope admin."
        )
    return "This browser is logged in with this key and will be asked for another one." if mine else ""


HANDLERS = (create_key, delete_key)
