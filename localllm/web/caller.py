"""Who sends a request: the key that it came with, what that may do, and whose things it sees.

Does not know: how a key is checked (auth.py), which route needs which scope (scopes.py).
"""

from __future__ import annotations

from typing import Any

from litestar import Request

from localllm.config import ServerConfig
from localllm.keys import Key, Scope
from localllm.web.errors import MissingScope


def key_of(request: Request[Any, Any, Any]) -> Key | None:
    """The key that opened the door; None where the server has no key, or the route is open to everybody."""
    key: Key | None = request.scope["state"].get("key")
    return key


def may(request: Request[Any, Any, Any], scope: Scope) -> bool:
    """Whether the request may do what needs this scope. On a server without keys everybody may do everything."""
    key = key_of(request)
    return key is None or key.may(scope)


def missing_scope(key: Key, scope: Scope) -> MissingScope:
    """The refusal for a key that may not do what needs this scope."""
    return MissingScope(
        f"The key {key.name} may not do this.",
        f"It needs the scope {scope} and has {key.scope}.",
        f"localllm keys add NAME --scope {scope}",
    )


def require(request: Request[Any, Any, Any], scope: Scope) -> None:
    """Raises `MissingScope` unless the request may do what needs this scope."""
    key = key_of(request)
    if key is not None and not key.may(scope):
        raise missing_scope(key, scope)


def prefix_owner_of(request: Request[Any, Any, Any]) -> str:
    """With whom a request shares cached prefixes: how much of a prompt was found in the cache, and how soon the first
    token comes, would tell one key what another has sent."""
    server: ServerConfig = request.app.state.settings.server
    return "" if server.share_prefix_cache else owner_of(request)


def salted(prefix_owner: str, cache_salt: str | None) -> str | None:
    """The salt of one owner, on top of what the request itself asks for, which another may know."""
    return f"{prefix_owner}\0{cache_salt or ''}" if prefix_owner else cache_salt


def owner_of(request: Request[Any, Any, Any]) -> str:
    """Whose chats, kept responses and cached prefixes a request sees: each key for `infer` has its own; admins, and
    everybody on a server without keys, share the others."""
    key = key_of(request)
    return key.owner if key is not None and key.scope == "infer" else ""
