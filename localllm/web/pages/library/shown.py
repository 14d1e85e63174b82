"""The two pages that are drawn after a click as well as when they are opened, with what the click led to.

Does not know: what was clicked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request
from litestar.response import Response

from localllm.errors import LocalLLMError
from localllm.web.pages.errors import notice
from localllm.web.pages.forms import is_scripted
from localllm.web.pages.library.fetching import download_list
from localllm.web.pages.library.state import library_of
from localllm.web.pages.room import html, room_of
from localllm.web.views.library import DownloadsPage, LibraryPage, Tab
from localllm.web.views.shared import Shell


def shell(request: Request[Any, Any, Any], title: str, on: Tab, *, moves: bool = False) -> Shell:
    """`on`: which part of the page is live; `moves`: something goes on there now. Without scripts that means reloads,
    which would take away a message or what is being typed: an answer to a click has none."""
    moves = moves and request.method == "GET"
    return room_of(request).shell(request, title, "library", f"/live/library?on={on}", moves=moves)


async def installed_page(
    request: Request[Any, Any, Any], *, said: str = "", error: LocalLLMError | None = None, path: str = ""
) -> Response[Any]:
    """`path`: as it was typed, where it was refused."""
    if error is not None and is_scripted(request):
        raise error
    library = library_of(request)
    installed = await library.shelf.look(anew=True)
    page = LibraryPage(
        shell(request, "Models", "installed", moves=any(row.state == "loading" for row in installed.rows)),
        library.tabs("installed"),
        installed,
        await library.picks(),
        said,
        notice(error) if error is not None else None,
        path,
    )
    return html(page, error.status if error is not None else 200)


async def downloads_page(
    request: Request[Any, Any, Any], *, said: str = "", error: LocalLLMError | None = None
) -> Response[Any]:
    if error is not None and is_scripted(request):
        raise error
    library = library_of(request)
    tabs = library.tabs("downloads")
    page = DownloadsPage(
        shell(request, "Downloads", "downloads", moves=tabs.running > 0),
        tabs,
        await asyncio.to_thread(download_list, library.downloads),
        said,
        notice(error) if error is not None else None,
    )
    return html(page, error.status if error is not None else 200)
