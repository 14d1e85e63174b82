"""The pages of other sites that may call the API, and the CORS headers for their browsers.

A browser sends the origin of the page: in `Origin` if the page wants to read the answer or writes, in `Sec-Fetch-Site`
with every request to this machine or over https. A client that sends neither is not a browser.
Does not know: keys, routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

LOCAL = "local"
"""A value of --allowed-origins: pages of programs on this machine."""
LOCAL_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview"})
"""Origins of pages that ship with a program; no website can have such an origin."""
NULL = "null"
"""Also the origin of a sandboxed frame on any site, so it is trusted only together with a key."""
METHODS = b"GET, POST, DELETE, OPTIONS"
EXPOSED = b"x-request-id, x-localllm-warning, retry-after, x-should-retry"
PREFLIGHT_S = b"600"

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The origins that may call the API. `named` is the setting `allowed_origins`."""

    def __init__(self, named: Sequence[str]) -> None:
        self.named = frozenset(name.rstrip("/").lower() for name in named)

    def may_ask(self, origin: str) -> bool:
        """Return whether a page of that origin may read its answers, including refusals.

        A preflight request has no key yet.
        """
        return self._is_named(origin) or self._may_with_key(origin)

    def may_call(self, origin: str, *, shows_key: bool) -> bool:
        """Return whether a page of that origin may call the API. `shows_key`: the request has a valid key in a header,
        so the page was given one.
        """
        return self._is_named(origin) or (shows_key and self._may_with_key(origin))

    def _is_named(self, origin: str) -> bool:
        if origin == NULL:
            return False
        is_local = LOCAL in self.named and (_is_loopback(origin) or _scheme(origin) in LOCAL_SCHEMES)
        return "*" in self.named or origin.lower() in self.named or is_local

    def _may_with_key(self, origin: str) -> bool:
        return NULL in self.named if origin == NULL else _is_loopback(origin)

    def hint(self, origin: str) -> str:
        """Return the hint that tells how to allow the origin."""
        if origin == NULL:
            return f"Start with --allowed-origins {NULL} and send a key, or serve the page from http://localhost."
        if _is_loopback(origin):
            return f"Send a key of this server, or start with --allowed-origins {LOCAL}."
        name = LOCAL if _scheme(origin) in LOCAL_SCHEMES else origin
        return f"Start with --allowed-origins {name} to allow them."

    def headers(self, origin: str) -> Headers:
        """Return the CORS headers of every answer to a page that may read it."""
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight_headers(self, asked: Mapping[bytes, bytes]) -> Headers:
        """Return the additional headers of the answer to a preflight request, which asks whether the page may send a
        method and headers.
        """
        from_public = b"access-control-request-private-network" in asked
        return [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", PREFLIGHT_S),
            *([(b"access-control-allow-private-network", b"true")] if from_public else []),
        ]


def netloc_of(origin: str) -> str:
    """Return host and port of an origin: 'http://Localhost:8000' -> 'localhost:8000'; empty if it is not an origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _scheme(origin: str) -> str:
    return origin.partition("://")[0].lower()


def _is_loopback(origin: str) -> bool:
    """http://localhost:3000, https://127.0.0.1, http://[::1]:5173, http://tauri.localhost."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or parts.username is not None or parts.path:
        return False
    if name in ("localhost", "tauri.localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
