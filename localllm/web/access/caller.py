"""The caller of a request: the key it sent, the scopes of that key, and the owner whose data it sees.

Does not know: how a key is checked (auth.py), which route needs which scope (scopes.py).
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request

from localllm.config.settings import ServerConfig
from localllm.mcp.servers import McpServers
from localllm.web.access.keys import Key, Scope
from localllm.web.errors import MissingScope

HOW_TO_PROVE = (
    "Open the one-time link that localllm link prints on the server's machine, for the user who runs the server."
)


def key_of(request: Request[Any, Any, Any]) -> Key | None:
    """Return the key of the request; None if the route is open to everyone, and for the owner of a server without keys.
    A request of another user of this machine has a key that stands for the user (`guest`).
    """
    key: Key | None = request.scope["state"].get("key")
    return key


def may(request: Request[Any, Any, Any], scope: Scope) -> bool:
    """Return whether the request has this scope. On a server without keys every request has every scope."""
    key = key_of(request)
    return key is None or key.may(scope)


def missing_scope(key: Key, scope: Scope) -> MissingScope:
    """Return the error for a key, or a user of this machine, without this scope."""
    if key.is_guest:
        return MissingScope(
            "Only the owner of this server may do this.",
            "This server has no keys, and another user of this machine, or a program in a container, sent the request: "
            "such requests may use the models.",
            HOW_TO_PROVE,
        )
    return MissingScope(
        f"The key {key.name} is not allowed to do this.",
        f"The scope {scope} is required; the key has {key.scope}.",
        f"localllm keys add NAME --scope {scope}",
    )


def require_owner(request: Request[Any, Any, Any]) -> None:
    """Raise `MissingScope` unless the request has an admin key or is from a browser that opened a one-time link. On a
    server without keys this is more than `require` asks for: a program that runs in a sandbox, or another program that
    sends a request for someone else, may be of the owner's user.
    """
    key = key_of(request)
    if key is None or not key.may("admin"):
        raise MissingScope(
            "Only the owner of this server may do this.",
            "It can start programs on this machine or read its files, so this browser has to prove once whose it is.",
            HOW_TO_PROVE,
        )


def require(request: Request[Any, Any, Any], scope: Scope) -> None:
    """Raise `MissingScope` unless the request has this scope."""
    key = key_of(request)
    if key is not None and not key.may(scope):
        raise missing_scope(key, scope)


def prefix_owner_of(request: Request[Any, Any, Any]) -> str:
    """Return the owner with whom a request shares cached prefixes. Prefixes of different keys are separate: the number
    of cached tokens and the time to first token would otherwise reveal the prompts of other keys.
    """
    server: ServerConfig = request.app.state.settings.server
    return "" if server.share_prefix_cache else owner_of(request)


def source_of(request: Request[Any, Any, Any]) -> str:
    """Return where a request comes from, for display: API, unless a page has noted its own name with `set_source`."""
    source: str = request.scope["state"].get("source", "API")
    return source


def set_source(request: Request[Any, Any, Any], source: str) -> None:
    """Note that a page answers this request through the API's code."""
    request.scope["state"]["source"] = source


def is_background(request: Request[Any, Any, Any]) -> bool:
    """Return whether the request is a line of a batch, before which every other request runs."""
    return request.scope["state"].get("is_background") is True


def key_name_of(request: Request[Any, Any, Any]) -> str:
    """Return the name of the request's key; empty without a key."""
    key = key_of(request)
    return key.name if key is not None else ""


def owner_of(request: Request[Any, Any, Any]) -> str:
    """Return the owner of the chats, stored responses and cached prefixes that a request sees. Each key with scope
    `infer` is its own owner; admins, and all clients of a server without keys, share one owner, the empty name.
    """
    key = key_of(request)
    return key.owner if key is not None and key.scope == "infer" else ""


def mcp_of(app: Litestar) -> McpServers:
    """Return the servers of tools of the application."""
    servers: McpServers = app.state["mcp"]
    return servers
