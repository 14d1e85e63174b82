"""Errors that only pages have, and how a page shows any error: in place for htmx, else as a page.

Does not know: what raised them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response import Response
from litestar.types import Scope

from localllm.errors import LocalLLMError, RequestError
from localllm.web.errors import MethodNotAllowed, MissingScope, UnknownRoute, as_local_error, drop_frames
from localllm.web.pages.frame.forms import HEADERS, is_scripted
from localllm.web.pages.frame.navigation import entry_of, shell
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.views import ErrorNotice, ErrorPage, StatusPill

MOST_PATH_CHARS = 200
"""Most characters of an unknown address that its error page repeats."""


class UnknownRequest(RequestError):
    """No request with this id is known: it never existed, or finished too long ago."""

    status, code = 404, "request_not_found"


class StillWriting(RequestError):
    """The last reply of the conversation has not finished."""

    status, code = 409, "still_writing"


class MessageTooLong(RequestError):
    """The message has more characters than allowed; it is refused before it is tokenised."""

    status, code = 413, "message_too_long"


def notice(error: LocalLLMError) -> ErrorNotice:
    """Return the error as a view."""
    return ErrorNotice(error.what, error.why, error.hint)


def handle_page_error(request: Request[Any, Any, Any], error: Exception) -> Response[str]:
    """Litestar's exception handler for the pages' routes."""
    if isinstance(error, HTTPException) and error.status_code == 413:
        what = "file" if request.url.path.endswith(("/import", "/attach")) else "message"
        error = MessageTooLong(f"The {what} is too large.", as_local_error(error, request.scope).why, "Send less.")
    local = as_local_error(error, request.scope)
    scripted = is_scripted(request)
    body = render(notice(local)) if scripted else render(_page(request, local))
    drop_frames(error)
    return Response(body, status_code=local.status, media_type="text/html", headers=HEADERS)


def unrouted_page(scope: Scope, error: LocalLLMError) -> tuple[str, Mapping[str, str]] | None:
    """Return the page and the headers of an error that no route of a page raised: an unknown address, an address that
    only forms post to, a key without the scope. None for other errors: they may concern a client that may not see our
    pages.
    """
    if not isinstance(error, UnknownRoute | MethodNotAllowed | MissingScope):
        return None
    return render(_page(Request(scope), error)), HEADERS


def _page(request: Request[Any, Any, Any], error: LocalLLMError) -> ErrorPage:
    back = entry_of(request)
    around = shell(request, "Error", back.key if back is not None else "", StatusPill("loading", "…"))
    said = notice(error)
    if isinstance(error, UnknownRoute | MethodNotAllowed):
        said = ErrorNotice("No page here.", f"This server shows no page at {request.url.path[:MOST_PATH_CHARS]}.")
    return ErrorPage(around, said, back)
