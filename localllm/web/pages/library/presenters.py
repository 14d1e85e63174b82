"""The two pages that are shown after an action as well as when opened, with the action's result.

Does not know: the action.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from litestar import Request
from litestar.response import Response

from localllm.errors import LocalLLMError
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import Shell
from localllm.web.pages.library.download_presenters import download_list
from localllm.web.pages.library.state import library_state
from localllm.web.pages.library.views import DownloadsPage, LibraryNotice, LibraryPage, Tab

NO_NOTICE = LibraryNotice()


def shell(
    request: Request[Any, Any, Any], title: str, on: Tab, *, moves: bool = False, loads: str = "", picks: bool = False
) -> Shell:
    """Return the frame of the page. `on`: which part is live. `moves`: the part is changing now, so without scripts the
    page reloads itself. A reload would discard a message or typed text, so the answer to an action never reloads.
    `loads`: the model whose load the notice follows. `picks`: the suggested models are to follow.
    """
    moves = moves and request.method == "GET"
    live = urlencode({"on": on, **({"loads": loads} if loads else {}), **({"picks": 1} if picks else {})})
    return pages_state(request).shell(request, title, "library", f"/live/library?{live}", moves=moves)


async def installed_page(
    request: Request[Any, Any, Any], *, told: LibraryNotice = NO_NOTICE, loads: str = "",
    error: LocalLLMError | None = None, path: str | None = None,
) -> Response[Any]:  # fmt: skip
    """Return the page of installed models. `path`: the typed path, if it was the error."""
    if error is not None and is_scripted(request):
        raise error
    library = library_state(request)
    installed = await library.models.read(anew=True)
    shown = notice(error) if error is not None else None
    picks = await library.picks()
    is_pending = picks is not None and picks.is_pending
    moves = is_pending or any(row.state == "loading" for row in installed.rows)
    page = LibraryPage(
        shell(request, "Models", "installed", moves=moves, loads=loads, picks=is_pending),
        library.tabs("installed"),
        installed,
        picks,
        LibraryNotice(error=shown) if shown is not None and path is None else told,
        path or "",
        shown if path is not None else None,
    )
    return html(page, error.status if error is not None else 200)


async def downloads_page(
    request: Request[Any, Any, Any], *, told: LibraryNotice = NO_NOTICE, error: LocalLLMError | None = None
) -> Response[Any]:
    if error is not None and is_scripted(request):
        raise error
    library = library_state(request)
    tabs = library.tabs("downloads")
    page = DownloadsPage(
        shell(request, "Downloads", "downloads", moves=tabs.running > 0),
        tabs,
        await asyncio.to_thread(download_list, library.downloads),
        LibraryNotice(error=notice(error)) if error is not None else told,
    )
    return html(page, error.status if error is not None else 200)
