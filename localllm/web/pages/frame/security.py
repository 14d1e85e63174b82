"""The security headers of every page, and the check that a post comes from our own pages.

A page may load nothing from elsewhere and runs no inline script.
Does not know: keys and hosts (web/access/auth.py does), templates.
"""

from __future__ import annotations

from litestar.connection import ASGIConnection
from litestar.exceptions import PermissionDeniedException
from litestar.handlers import BaseRouteHandler

from localllm.web.access.origins import netloc_of

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def same_origin(connection: ASGIConnection, _: BaseRouteHandler) -> None:  # type: ignore[type-arg]
    """Refuse posts that another site makes this browser send (CSRF) with status 403.

    Every browser sends the origin of a post in Sec-Fetch-Site or Origin. A client that sends neither is not a browser,
    so no other site can misuse its session.
    """
    site = connection.headers.get("sec-fetch-site")
    origin = connection.headers.get("origin")
    if site is not None:
        allowed = site in ("same-origin", "none")
    else:
        allowed = origin is None or netloc_of(origin) == connection.headers.get("host", "").lower()
    if not allowed:
        raise PermissionDeniedException(f"This post came from another site ({origin or site}), so it was refused.")
