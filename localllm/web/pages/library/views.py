"""The pages of the Models page, and the two that are shown after an action as well as when opened.

Does not know: the action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlencode

from litestar import Request
from litestar.response import Response

from localllm.errors import LocalLLMError
from localllm.fleet.upstream import Upstream
from localllm.units import format_count
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import ErrorNotice, Fact, Shell, View, view
from localllm.web.pages.library.downloads import DownloadsView, download_list
from localllm.web.pages.library.fit_checks import FileRow, FitTable, FitVerdict, LoadOptions
from localllm.web.pages.library.installed_models import InstalledList, ModelRow
from localllm.web.pages.library.state import LibraryNotice, LibraryTabs, Picks, Tab, library_state


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A repository on the hub."""

    name: str
    url: str  # its page on this server
    fit_url: str
    format: str
    facts: tuple[str, ...]  # parameters, downloads, likes, licence, date
    is_gated: bool = False
    is_here: bool = False


@view("library/_results.html")
class SearchResults(View):
    """The results of a search."""

    query: str
    results: tuple[SearchResult, ...]


@view("library/_delete.html")
class DeleteQuestion(View):
    """Asks for confirmation before a model is deleted, or says why it cannot be deleted."""

    name: str
    frees: str
    where: str
    refusal: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class RemoteModelRow:
    """A model of another server (`--upstream`)."""

    name: str
    url: str  # of a new chat with it
    facts: tuple[str, ...]  # its servers, and its context if they say it

    @classmethod
    def of(cls, name: str, context: int | None, servers: Sequence[Upstream]) -> Self:
        named = f"on {', '.join(each.name for each in servers)}"
        facts = (named, f"{format_count(context)} tokens of context") if context else (named,)
        return cls(name, f"/?{urlencode({'model': name})}", facts)


@view("library/page.html")
class LibraryPage(View):
    """`/library`"""

    shell: Shell
    tabs: LibraryTabs
    installed: InstalledList
    picks: Picks | None = None
    notice: LibraryNotice = LibraryNotice()
    path: str = ""  # a typed path that was refused
    path_error: ErrorNotice | None = None  # why
    elsewhere: tuple[RemoteModelRow, ...] = ()


@view("library/discover.html")
class DiscoverPage(View):
    """`/library/discover`"""

    shell: Shell
    tabs: LibraryTabs
    query: str
    format: str  # safetensors, gguf, or empty for both
    hub: str  # host name of the hub
    results: SearchResults | None = None  # None: no search yet
    error: ErrorNotice | None = None
    retry_url: str = ""
    offline: ErrorNotice | None = None  # why there is no search


@view("library/downloads.html")
class DownloadsPage(View):
    """`/library/downloads`"""

    shell: Shell
    tabs: LibraryTabs
    downloads: DownloadsView
    notice: LibraryNotice = LibraryNotice()


@view("library/absent.html")
class AbsentPage(View):
    """`/library/model/{name}` of a model of which nothing is known here, with the way back."""

    shell: Shell
    tabs: LibraryTabs
    name: str
    error: ErrorNotice


@view("library/delete.html")
class DeletePage(View):
    """`/library/delete`, for a browser without scripts."""

    shell: Shell
    tabs: LibraryTabs
    question: DeleteQuestion


@dataclass(frozen=True, slots=True)
class Variant:
    """Another quantisation in the same repository."""

    title: str
    url: str
    size: str
    is_current: bool


@view("library/model.html")
class ModelPage(View):
    """`/library/model/{name}`: facts, fit and files of one model, on this machine or on the hub."""

    shell: Shell
    tabs: LibraryTabs
    name: str
    row: ModelRow | None  # None: the model is not on this machine
    facts: tuple[Fact, ...]
    files: tuple[FileRow, ...]
    verdict: FitVerdict
    table: FitTable | None = None
    variants: tuple[Variant, ...] = ()
    download: str = ""  # size of the download; empty: the model is on this machine
    error: ErrorNotice | None = None  # why the model cannot be read
    offline: str = ""  # what switched the hub off, for a suggested model that needs it
    load: LoadOptions | None = None  # for a model on this machine that fits


@view("library/reading.html")
class ReadingPage(View):
    """The page of a model until the hub has answered."""

    shell: Shell
    tabs: LibraryTabs
    name: str
    url: str


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
        tuple(
            RemoteModelRow.of(name, facts.context, servers)
            for name, (facts, servers) in pages_state(request).upstreams.models().items()
        ),
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
