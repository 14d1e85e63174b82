"""The web pages, one package each with its handlers: chat at `/`, `/dashboard`, models at `/library`.

`routes()` is mounted by web/app.py; the handlers find the `ModelManager` as `app.state.manager`.
Does not know: the API's dialects, access checks (web/access/auth.py).
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, Router, get
from litestar.exceptions import NotFoundException

from localllm.web.api.own.health import knock
from localllm.web.pages import patterns
from localllm.web.pages.chat import attachment_handlers as attachments
from localllm.web.pages.chat import handlers as chat
from localllm.web.pages.chat import message_handlers as messages
from localllm.web.pages.chat import sidebar_handlers as sidebar
from localllm.web.pages.dashboard import handlers as dashboard
from localllm.web.pages.frame import login
from localllm.web.pages.frame.errors import handle_page_error
from localllm.web.pages.frame.forms import FormRequest
from localllm.web.pages.frame.navigation import choose_theme
from localllm.web.pages.frame.render import template_config
from localllm.web.pages.frame.security import HEADERS
from localllm.web.pages.frame.state import close_room, open_room
from localllm.web.pages.frame.static import static_files
from localllm.web.pages.library import handlers as library
from localllm.web.pages.logs import handlers as logs
from localllm.web.pages.playground import handlers as playground
from localllm.web.pages.settings import handlers as settings
from localllm.web.pages.tune import handlers as tune

__all__ = ["close_room", "open_room", "routes", "template_config"]

FOREVER = "public, max-age=31536000, immutable"


@get("/static/{path:path}", sync_to_thread=False)
def static_file(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return a file of a page. With its version in the URL it may be cached for ever."""
    path = str(request.path_params["path"]).lstrip("/")
    file = static_files().get(path)
    if file is None:
        raise NotFoundException(f"There is no file {path}.")
    body, compressed = file.answers(request.headers.get("accept-encoding", ""))
    headers = {
        "ETag": f'"{file.etag}"',
        "Vary": "Accept-Encoding",
        "Cache-Control": FOREVER if request.query_params.get("v") == file.etag else "no-cache",
    }
    if compressed:
        headers["Content-Encoding"] = "gzip"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(b"", status_code=304, headers=headers)
    return Response(body, media_type=file.media_type, headers=headers)


def routes() -> list[Router]:
    """Return everything to mount. The pages are not in the OpenAPI document."""
    handlers = [
        *(static_file, knock, choose_theme, patterns.patterns_page),
        *login.HANDLERS,
        *chat.HANDLERS,
        *messages.HANDLERS,
        *attachments.HANDLERS,
        *sidebar.HANDLERS,
        *dashboard.HANDLERS,
        *library.HANDLERS,
        *tune.HANDLERS,
        *playground.HANDLERS,
        *logs.HANDLERS,
        *settings.HANDLERS,
    ]
    return [
        Router(
            path="/",
            route_handlers=handlers,
            exception_handlers={Exception: handle_page_error},
            response_headers=HEADERS,
            request_class=FormRequest,
            include_in_schema=False,
        )
    ]
