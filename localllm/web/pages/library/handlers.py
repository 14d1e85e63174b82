"""The Models page: installed models, search on the hub, downloads, the facts and fit of one model.

The hub is contacted only when the user searches, opens a model that is not installed, or downloads one.
Does not know: the actions (action_handlers.py), how the numbers are computed (installed_models.py, fit_checks.py,
downloads.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, get_args
from urllib.parse import urlencode

from litestar import Request, get
from litestar.response import Response, Stream

from localllm.errors import HubUnreachable, LocalLLMError, ModelNotFound
from localllm.models.formats.gguf.file_names import gguf_models
from localllm.models.library.catalog import is_for_the_hub
from localllm.models.library.hub import client
from localllm.models.library.hub.client import search_off
from localllm.models.library.hub.repository import Found, read_repository
from localllm.models.library.hub.repository import search as search_hub
from localllm.models.library.names import looks_like_path, parse_name
from localllm.units import format_bytes, format_count, format_parameters
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.handlers import update_event
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import PagesState, html, pages_state
from localllm.web.pages.frame.views import LiveUpdate
from localllm.web.pages.library import action_handlers
from localllm.web.pages.library.downloads import download_list
from localllm.web.pages.library.fit_checks import FitResult, FitVerdict, load_options
from localllm.web.pages.library.installed_models import page_url
from localllm.web.pages.library.state import LibraryNotice, LibraryState, Tab, library_state
from localllm.web.pages.library.views import (
    AbsentPage,
    DiscoverPage,
    ModelPage,
    ReadingPage,
    SearchResult,
    SearchResults,
    Variant,
    installed_page,
    shell,
)
from localllm.web.pages.library.views import downloads_page as shown_downloads

MOST_FOUND = 20
LONGEST_QUERY = 200
LONGEST_NAME = 300
SEARCH_S = 15.0
"""A search that takes longer is reported as an unreachable hub, because the user waits for the page."""
TABS: tuple[Tab, ...] = get_args(Tab)
FORMATS = ("safetensors", "gguf")


@get("/library")
async def library_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the installed models; if there are none, also three recommended ones."""
    library, asked = library_state(request), request.query_params
    loads = asked.get("loads", "")[:LONGEST_NAME]
    told = library.load_notice(loads) if loads else LibraryNotice(library.take_notice(asked.get("said")))
    return await installed_page(request, told=told, loads=loads)


@get("/library/discover")
async def discover_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the search form; with `q` also the results."""
    library = library_state(request)
    query = request.query_params.get("q", "").strip()[:LONGEST_QUERY]
    asked = request.query_params.get("format")
    kind = asked if asked in FORMATS else ""
    results, error, offline, status = None, None, None, 200
    if library.offline_switch:
        refused = search_off(library.offline_switch)
        offline, status = notice(refused), refused.status if query else 200
    elif query:
        try:
            results = await _search(library, query, kind)
        except LocalLLMError as refusal:
            error, status = notice(refusal), refusal.status
    retry = f"/library/discover?{urlencode({'q': query, 'format': kind})}" if error else ""
    page = DiscoverPage(
        shell(request, "Discover models", "discover"),
        library.tabs("discover"),
        query,
        kind,
        client.endpoint().partition("://")[2],
        results,
        error,
        retry,
        offline,
    )
    return html(page, status)


@get("/library/fit")
async def fit(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the fit line of a search result; htmx requests it when the result becomes visible."""
    name = request.query_params.get("model", "")
    try:
        verdict = (await _fit(library_state(request), name)).verdict
    except LocalLLMError as error:
        verdict = FitVerdict("unknown", "Unknown", error.what, error.hint)
    return html(verdict)


@get("/library/downloads")
async def downloads_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the downloads, live."""
    said = library_state(request).take_notice(request.query_params.get("said"))
    return await shown_downloads(request, told=LibraryNotice(said))


@get("/library/model/{name:path}")
async def model_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show one model, on this machine or on the hub. A hub that is slow is waited for by the page itself."""
    library = library_state(request)
    name = str(request.path_params["name"]).lstrip("/")
    await library.models.read()
    waits = is_scripted(request) or "wait" in request.query_params
    reading = asyncio.ensure_future(_fit(library, name, anew=not waits))
    try:
        await (reading if waits else library.wait_briefly(reading))
    except LocalLLMError as error:
        return _absent(request, library, name, error)
    if not reading.done():
        return html(ReadingPage(shell(request, name, "none"), library.tabs("none"), name, page_url(name)))
    found = reading.result()
    row = library.models.row(name) or library.models.row(found.name)
    if isinstance(found.error, ModelNotFound) and row is None:
        return _absent(request, library, name, found.error)
    needed, offline = found.download_bytes, ""
    if row is None and needed is not None:
        offline = library.offline_switch
    variants = await _variants(library, found) if row is None and needed is not None and not offline else ()
    load = None
    if row is not None and found.context and row.state in ("unloaded", "ready", "failed", "sleeping"):
        config, is_loaded = library.fits.config(row.name), row.state in ("ready", "sleeping")
        load = load_options(row.name, found, config, is_loaded=is_loaded)
    page = ModelPage(
        shell=shell(request, name, "none"),
        tabs=library.tabs("none"),
        name=row.name if row is not None else found.name,
        row=row,
        facts=found.facts,
        files=found.files,
        verdict=found.verdict,
        table=found.table,
        variants=variants,
        download=format_bytes(needed) if needed is not None else "",
        error=row.error if row is not None else None,
        offline=offline,
        load=load,
    )
    return html(page)


def _absent(request: Request[Any, Any, Any], library: LibraryState, name: str, error: LocalLLMError) -> Response[str]:
    page = AbsentPage(shell(request, "Models", "none"), library.tabs("none"), name[:LONGEST_NAME], notice(error))
    return html(page, error.status)


@get("/live/library")
async def live_library(request: Request[Any, Any, Any]) -> Stream:
    """Stream the status pill, the tabs' count and the page's content as they change."""
    on = request.query_params.get("on", "none")
    here: Tab = next((tab for tab in TABS if tab == on), "none")
    loads = request.query_params.get("loads", "")[:LONGEST_NAME]
    events = _events(pages_state(request), library_state(request), here, loads, picks="picks" in request.query_params)
    return live_stream(request, events)


async def _events(
    state: PagesState, library: LibraryState, on: Tab, loads: str, *, picks: bool
) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    view = f"library {on} {loads}"
    if picks and (found := await library.picks(waits=True)) is not None:
        yield sse(render(LiveUpdate({"picks": render(found)})))
    async for tick in state.sampler.follow():
        parts = state.live_parts(tick) | await tick.drawn(view, partial(_parts, library, on, loads))
        if news := changed(parts, sent):
            yield update_event(tick, view, news)


async def _parts(library: LibraryState, on: Tab, loads: str) -> dict[str, str]:
    parts = {"library-tabs": render(library.tabs(on))}
    if on == "installed":
        parts["installed"] = render(await library.models.read())
        if loads:
            parts["library-notice"] = render(library.load_notice(loads))
    elif on == "downloads":
        parts["downloads"] = render(await asyncio.to_thread(download_list, library.downloads))
    return parts


async def _search(library: LibraryState, query: str, kind: str) -> SearchResults:
    try:
        async with asyncio.timeout(SEARCH_S):
            found = await asyncio.to_thread(search_hub, query, limit=MOST_FOUND, format=kind or None)
    except TimeoutError:
        raise HubUnreachable(
            f"The hub has not answered within {SEARCH_S:.0f} s.", f"It is {client.endpoint()}."
        ) from None
    await library.models.read()
    return SearchResults(query, tuple(_result(library, each) for each in found))


def _result(library: LibraryState, found: Found) -> SearchResult:
    counts = [f"{format_count(found.downloads)} downloads", f"{format_count(found.likes)} likes"]
    size = f"{format_parameters(found.num_parameters)} parameters" if found.num_parameters else ""
    facts = [size, *counts, found.license or "no licence stated", f"updated {found.updated}" if found.updated else ""]
    return SearchResult(
        name=found.repo_id,
        url=page_url(found.repo_id),
        fit_url=f"/library/fit?{urlencode({'model': found.repo_id})}",
        format=found.format,
        facts=tuple(fact for fact in facts if fact),
        is_gated=found.gated,
        is_here=library.models.has(found.repo_id),
    )


async def _fit(library: LibraryState, name: str, *, anew: bool = False) -> FitResult:
    """Return the fit. Raises for a path that is not loaded: the server's files are not for every client
    to ask about. Without the hub only the fit of suggested models is known.
    """
    path = library.models.path_of(name)
    if path is None:
        if not 0 < len(name) <= LONGEST_NAME or looks_like_path(name):
            raise ModelNotFound("There is no such model here.", hint="/library shows what there is.", param="model")
        needs_hub: bool = await asyncio.to_thread(partial(is_for_the_hub, name, paths=False))
        if needs_hub and library.offline_switch:
            pick = await asyncio.to_thread(library.pick, name)
            if pick is None:
                raise client.offline_error(name, library.offline_switch)
            return await library.fits.of_pick(pick)
    return await library.fits.of(name, str(path) if path is not None else None, anew=anew)


async def _variants(library: LibraryState, found: FitResult) -> tuple[Variant, ...]:
    """Return the other GGUF files beside this one."""
    asked = parse_name(found.name)
    if not any(file.name.endswith(".gguf") for file in found.files):
        return ()
    try:
        repository = await asyncio.to_thread(read_repository, asked.base, asked.revision)
    except LocalLLMError:
        return ()
    sizes = {file.name: file.size for file in repository.files}
    shown = []
    for model in gguf_models(sizes):
        quant = model.quant or model.stem
        size = sum(sizes[name] for name in model.files)
        shown.append(
            (size, Variant(quant, page_url(f"{asked.base}:{quant}"), format_bytes(size), quant == asked.quant))
        )
    return tuple(variant for _, variant in sorted(shown, key=lambda each: each[0]))


HANDLERS = (library_page, discover_page, fit, downloads_page, model_page, live_library, *action_handlers.HANDLERS)
