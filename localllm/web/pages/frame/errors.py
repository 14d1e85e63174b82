"""Errors that only pages have, and how a page shows any error: in place for htmx, else as a page.

Does not know: what raised them.
"""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.response import Response

from localllm.errors import LocalLLMError, RequestError
from localllm.web.errors import as_local_error, drop_frames
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.navigation import shell
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.security import HEADERS
from localllm.web.pages.frame.views import ErrorNotice, ErrorPage, StatusPill


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


def _page(request: Request[Any, Any, Any], error: LocalLLMError) -> ErrorPage:
    return ErrorPage(shell(request, "Error", "", StatusPill("loading", "…")), error.status, notice(error))
