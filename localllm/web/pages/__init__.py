"""The web pages: a folder for each, with its handlers, views, samples, templates, style sheets and scripts.

`PAGES` is their registry, in the order of the navigation bar. The navigation, the routes, who may use them, and
`/dev/patterns` read it; `frame/` holds what all pages share. web/app.py mounts them.
Does not know: the API's dialects, access checks (web/access/auth.py).
"""

from __future__ import annotations

from typing import Any, Self

from litestar import Litestar, Router

from localllm.web.access.scopes import RouteRules
from localllm.web.pages import chat, dashboard, library, logs, playground, settings, tune
from localllm.web.pages.frame import handlers as frame
from localllm.web.pages.frame.errors import handle_page_error, unrouted_page
from localllm.web.pages.frame.forms import HEADERS, FormRequest, same_origin
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.render import template_config
from localllm.web.pages.frame.state import close_pages, open_pages

__all__ = ["PAGES", "mount", "routes", "rules", "template_config"]

PAGES: tuple[Page, ...] = (
    chat.PAGE,
    library.PAGE,
    dashboard.PAGE,
    tune.PAGE,
    playground.PAGE,
    logs.PAGE,
    settings.PAGE,
)


class OwnedRouter(Router):
    """A router that belongs to one application. Litestar registers a deep copy of any other, with all of its handlers,
    which is a tenth of the processor time until the first page is served."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def routes() -> list[Router]:
    """Return everything to mount. The pages are not in the OpenAPI document."""
    return [
        OwnedRouter(
            path="/",
            route_handlers=[*frame.HANDLERS, *(handler for page in PAGES for handler in page.handlers)],
            guards=[same_origin],
            exception_handlers={Exception: handle_page_error},
            response_headers=HEADERS,
            request_class=FormRequest,
            include_in_schema=False,
        )
    ]


def rules() -> RouteRules:
    """Return who may use the routes of the pages, and which pages other sites may link to."""
    return sum((page.rules for page in PAGES), frame.RULES)


def mount(app: Litestar) -> None:
    """Give the application the pages' state, and start and stop it with the server."""
    app.state["navigation"] = tuple(page.entry for page in PAGES)
    app.state["registered_pages"] = PAGES
    app.state["error_page"] = unrouted_page
    app.on_startup += [open_pages, *(hook for page in PAGES for hook in page.on_startup)]
    app.on_shutdown += [close_pages, *(hook for page in PAGES for hook in page.on_shutdown)]
