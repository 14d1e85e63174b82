"""The actions of the Models page: load, unload, download, pause, delete, import.

A form posted by htmx is answered with the changed parts of the page; one posted without scripts with a redirect to the
page, which shows the result or the error.
Does not know: how models are loaded and unloaded (serving/manager.py), how files are downloaded (models/hub).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.config.edit import planned_for_model, write
from localllm.errors import ConfigError, InvalidParameter, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.models.library.about import spec_or_reason
from localllm.models.library.catalog import hub_cache_dir, resolve_model
from localllm.models.library.hub.cache import remove_partial, to_remove
from localllm.serving.entry import UnloadCancelled
from localllm.units import format_bytes
from localllm.web.api.own.hub import ModelInUse, refuse_if_loaded, remove_found, require_online
from localllm.web.errors import MissingParameter
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import LiveUpdate
from localllm.web.pages.library.downloads import download_list
from localllm.web.pages.library.fit_checks import chosen_options, load_estimate
from localllm.web.pages.library.state import LibraryState, library_state
from localllm.web.pages.library.views import DeletePage, DeleteQuestion, downloads_page, installed_page, shell

MAX_FORM_BYTES = 64 * 1024
VERBS = ("load", "unload", "sleep", "wake", "keep", "pin", "unpin")
LONGEST = {"model": 300, "verb": 20, "path": 4096}
DOWNLOAD_VERBS = ("pause", "resume", "discard", "forget", "load")


@post("/library/models", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def change_model(request: Request[Any, Any, Any]) -> Response[Any]:
    """Apply one of the verbs to `model`."""
    library = library_state(request)
    try:
        model, verb = await _fields(request, "model", "verb")
        await _change(library, model, verb)
    except LocalLLMError as error:
        return await installed_page(request, error=error)
    if is_scripted(request):
        return html(LiveUpdate({"installed": render(await library.models.read(anew=True))}))
    return Redirect("/library", status_code=303)


@get("/library/load")
async def count_options(request: Request[Any, Any, Any]) -> Response[str]:
    """Return what a load of `model` with the chosen options would need."""
    library, chosen = library_state(request), {key: str(value) for key, value in request.query_params.items()}
    model = chosen.get("model", "")
    try:
        path = library.models.path_of(model)
        if path is None and not library.models.has(model.partition(":")[0]):
            raise ModelNotFound("There is no such model here.", hint="/library shows what there is.", param="model")
        options = chosen_options(chosen)
        found = await library.fits.with_options(model, str(path) if path is not None else None, options)
    except LocalLLMError as error:
        return html(notice(error), error.status)
    return html(load_estimate(found))


@post("/library/load", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def load_with_options(request: Request[Any, Any, Any]) -> Response[Any]:
    """Load `model` with the chosen options, and write them to the config file if they are to be remembered."""
    library = library_state(request)
    try:
        (model,) = await _fields(request, "model")
        form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
        options, file = chosen_options(form), library.settings.file
        if form.get("remember") == "yes" and file is not None:
            await asyncio.to_thread(resolve_model, model)  # the next start looks for it by this name
            write(planned_for_model(file, model, {key: value for key, value in options.items() if value is not None}))
        await library.wait_briefly(library.manager.load(model, wait=False, options=options))
    except LocalLLMError as error:
        return await installed_page(request, error=error)
    return _redirect(request, "/library")


@post("/library/import", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def import_path(request: Request[Any, Any, Any]) -> Response[Any]:
    """Check a path on this machine, then load its model."""
    library, typed = library_state(request), ""
    try:
        (typed,) = await _fields(request, "path")
        path = await asyncio.to_thread(checked_path, typed)
        status = await library.manager.load(str(path), wait=False)
    except LocalLLMError as error:
        return await installed_page(request, error=error, path=typed)
    return Redirect(f"/library?{urlencode({'loads': status.name})}", status_code=303)


@get("/library/delete")
async def delete_question(request: Request[Any, Any, Any]) -> Response[str]:
    """Ask for confirmation, in the page's dialog or as a page of its own."""
    library = library_state(request)
    question = await _question(request, library, request.query_params.get("model", ""))
    if is_scripted(request):
        return html(question)
    return html(DeletePage(shell(request, f"Delete {question.name}", "none"), library.tabs("none"), question))


@post("/library/delete", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def delete_model(request: Request[Any, Any, Any]) -> Response[Any]:
    library = library_state(request)
    try:
        (model,) = await _fields(request, "model")
        target = await asyncio.to_thread(to_remove, model)
        _require_not_downloading(library, target.repo_id, target.name)
        removed = await remove_found(request, target)
    except LocalLLMError as error:
        return await installed_page(request, error=error)
    await library.models.read(anew=True)
    freed = format_bytes(removed.freed_bytes)
    return Redirect(f"/library?{library.leave_notice(f'{model} was deleted; {freed} freed.')}", status_code=303)


@post("/library/downloads", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def start_download(request: Request[Any, Any, Any]) -> Response[Any]:
    """Ask the hub for the size of `model`, then start the download."""
    library = library_state(request)
    try:
        require_online(request)
        (model,) = await _fields(request, "model")
        await asyncio.to_thread(library.downloads.start, model)
    except LocalLLMError as error:
        return await downloads_page(request, error=error)
    return Redirect("/library/downloads", status_code=303)


@post("/library/downloads/{id:str}", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def change_download(request: Request[Any, Any, Any]) -> Response[Any]:
    """Apply one of the verbs to a download."""
    library, id = library_state(request), str(request.path_params["id"])
    downloads, said = library.downloads, ""
    try:
        (verb,) = await _fields(request, "verb")
        if verb not in DOWNLOAD_VERBS:
            raise InvalidParameter(
                f"verb is {verb!r}.", f"It must be one of {', '.join(DOWNLOAD_VERBS)}.", param="verb"
            )
        if verb == "load":
            await _change(library, downloads.get(id).plan.name, "load")
            return _redirect(request, "/library")
        if verb == "discard":
            name, freed = downloads.get(id).plan.name, await asyncio.to_thread(downloads.discard, id)
            said = f"The download of {name} was cancelled; {format_bytes(freed)} freed."
        else:
            if verb == "resume":
                require_online(request)
            await asyncio.to_thread(getattr(downloads, verb), id)
    except LocalLLMError as error:
        return await downloads_page(request, error=error)
    if is_scripted(request):
        return html(LiveUpdate({"downloads": render(await asyncio.to_thread(download_list, downloads))}))
    return Redirect(
        f"/library/downloads?{library.leave_notice(said)}" if said else "/library/downloads", status_code=303
    )


@post("/library/partial", status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def delete_partial(request: Request[Any, Any, Any]) -> Response[Any]:
    """Delete the partial files of an interrupted download; complete files stay."""
    library = library_state(request)
    try:
        (model,) = await _fields(request, "model")
        _require_not_downloading(library, model, model)
        freed = await asyncio.to_thread(remove_partial, model)
    except LocalLLMError as error:
        return await downloads_page(request, error=error)
    said = library.leave_notice(f"{format_bytes(freed)} of {model} were deleted.")
    return Redirect(f"/library/downloads?{said}", status_code=303)


async def _change(library: LibraryState, model: str, verb: str) -> None:
    manager = library.manager
    if verb == "load":
        await manager.load(model, wait=False)
    elif verb in ("pin", "unpin"):
        manager.pin(model, verb == "pin")
    elif verb == "keep":
        manager.keep(model)
    elif verb in VERBS:
        with suppress(UnloadCancelled):
            await library.wait_briefly(getattr(manager, verb)(model))
    else:
        raise InvalidParameter(f"verb is {verb!r}.", f"It must be one of {', '.join(VERBS)}.", param="verb")


def checked_path(text: str) -> Path:
    """Return a path with a model that this version can run. Raises an error that says what is there instead."""
    path = Path(text.strip()).expanduser()
    if "\0" in text or not path.is_absolute():
        why = "The server does not know which folder you are in."
        raise ConfigError(f"{text.strip()!r} is not an absolute path.", why, "Start it with / or ~.", param="path")
    if not os.path.isdir(path) and not (os.path.isfile(path) and path.suffix.lower() == ".gguf"):
        why = f"{path} is another kind of file." if os.path.isfile(path) else f"{path} does not exist."
        raise ModelNotFound(
            "No folder or .gguf file there.", why, "The path is one of the server's machine.", param="path"
        )
    try:
        model = resolve_model(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", f"{error.strerror or error}.", param="path") from error
    spec, problem = spec_or_reason(model.path)
    if spec is None:
        raise problem or UnsupportedModel(f"{path} cannot be read.")
    return model.path


async def _question(request: Request[Any, Any, Any], library: LibraryState, model: str) -> DeleteQuestion:
    try:
        if not 0 < len(model) <= LONGEST["model"]:
            raise MissingParameter("Missing required parameter: 'model'.", param="model")
        target = await asyncio.to_thread(to_remove, model)
        _require_not_downloading(library, target.repo_id, target.name)
        refuse_if_loaded(request, target)
    except LocalLLMError as error:
        return DeleteQuestion(model, "", "", notice(error))
    return DeleteQuestion(model, format_bytes(target.size_bytes), str(hub_cache_dir()))


def _require_not_downloading(library: LibraryState, repo_id: str, name: str) -> None:
    """Raise if the model is being downloaded."""
    if any(status.plan.repo_id == repo_id and not status.is_over for status in library.downloads.list()):
        raise ModelInUse(f"{name} is being downloaded.", "", "Pause or cancel the download first.", param="model")


async def _fields(request: Request[Any, Any, Any], *names: str) -> list[str]:
    """Return fields of the form; each must be present once and be text."""
    form = await request.form()
    values = [form.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise MissingParameter(f"Missing required parameter: {name!r}.", param=name)
        if len(value) > LONGEST[name]:
            why = f"It has {len(value):,} characters; the limit is {LONGEST[name]:,}."
            raise InvalidParameter(f"{name} is too long.", why, param=name)
    return [str(value).strip() for value in values]


def _redirect(request: Request[Any, Any, Any], url: str) -> Response[Any]:
    """Redirect to the URL, through htmx or the browser."""
    if is_scripted(request):
        return Response(None, status_code=204, headers={"HX-Redirect": url})
    return Redirect(url, status_code=303)


HANDLERS = (
    change_model,
    count_options,
    load_with_options,
    import_path,
    delete_question,
    delete_model,
    start_download,
    change_download,
    delete_partial,
)
