"""The form of a page's request, whether htmx sent it and whether it comes from our own pages; the security headers of
every page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import FormMultiDict
from litestar.enums import RequestEncodingType
from litestar.exceptions import PermissionDeniedException
from litestar.handlers import BaseRouteHandler
from litestar.types import Empty

from localllm.serving.answers.off_loop import off_loop
from localllm.units import format_bytes, format_count
from localllm.web.access.origins import netloc_of
from localllm.web.errors import BodyTooLarge

MAX_FIELDS = 1_000
"""Most fields of a form. The playground has the most, two for each message."""

MAX_URLENCODED_BYTES = 2_000_000
"""Largest form without files. A form with files is multipart, which is read in pieces."""


class FormRequest(Request[Any, Any, Any]):
    """A request whose form is limited in size, and parsed off the event loop if it is long."""

    async def form(self) -> FormMultiDict:
        if self._form is Empty and self.content_type[0] == RequestEncodingType.URL_ENCODED:
            raw = await self.body()
            if len(raw) > MAX_URLENCODED_BYTES:
                why = f"The limit without a file is {format_bytes(MAX_URLENCODED_BYTES)}."
                raise BodyTooLarge("The form is too large.", why)
            if raw.count(b"&") >= MAX_FIELDS:
                raise BodyTooLarge("The form has too many fields.", f"The limit is {format_count(MAX_FIELDS)}.")
            self._form = FormMultiDict(
                await off_loop(len(raw), lambda: parse_qsl(raw.decode("latin-1"), keep_blank_values=True))
            )
        return await super().form()


def is_scripted(request: Request[Any, Any, Any]) -> bool:
    """Return whether htmx sent the request. htmx replaces parts of a page; a browser without scripts
    needs a whole one.
    """
    return "hx-request" in request.headers


async def fields_of(request: Request[Any, Any, Any]) -> Mapping[str, str]:
    """Return the text fields of the form, without files."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}


CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
}


def same_origin(connection: ASGIConnection, _: BaseRouteHandler) -> None:  # type: ignore[type-arg]
    """Refuse posts that another site makes this browser send (CSRF) with status 403.

    It guards every route of the pages. Every browser sends the origin of a post in Sec-Fetch-Site or Origin. A client
    that sends neither is not a browser, so no other site can misuse its session.
    """
    if connection.scope.get("method") in ("GET", "HEAD", "OPTIONS"):  # auth.py decides which pages others may link to
        return
    site = connection.headers.get("sec-fetch-site")
    origin = connection.headers.get("origin")
    if site is not None:
        allowed = site in ("same-origin", "none")
    else:
        allowed = origin is None or netloc_of(origin) == connection.headers.get("host", "").lower()
    if not allowed:
        raise PermissionDeniedException(f"This post came from another site ({origin or site}), so it was refused.")
