"""The hub over HTTP, for the pages and for programs: search, plan a download, download, delete.

    GET    /localllm/v1/models                      models on this machine
    DELETE /localllm/v1/models/{name}               delete it from the Hugging Face cache
    GET    /localllm/v1/models/search?q=            models on the hub
    GET    /localllm/v1/models/plan?model=          files and bytes of a download, before it starts
    GET    /localllm/v1/fit?model=                  where it would run here, with which context, and how fast
    GET    /localllm/v1/models/downloads            all downloads of this server, with progress
    POST   /localllm/v1/models/downloads            {"model", "revision"?, "include"?} start a download
    GET    /localllm/v1/models/downloads/{id}       one download
    DELETE /localllm/v1/models/downloads/{id}       stop it; downloaded bytes are kept

access/auth.py checks the key on all of them. Does not know: how files are downloaded (models/hub).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from litestar import delete, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler

from localllm.config.settings import SETTINGS, EngineConfig, Settings
from localllm.errors import RequestError
from localllm.models.library.hub.downloads import Downloads, DownloadStatus
from localllm.models.library.hub.pull import plan_facts, progress_facts
from localllm.serving.entry import ModelEntry
from localllm.serving.eviction import hardware_once_free
from localllm.web.api.exchange import SMALL_BODY_BYTES, ApiRequest, json_response, manager_of, struct_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.own import shapes
from localllm.web.api.reading import read_query
from localllm.web.errors import MissingParameter, openai_error

if TYPE_CHECKING:
    from localllm.models.library.hub.cache import RemovalTarget

MOST_FOUND = 100


class ModelInUse(RequestError):
    """The model is loaded and cannot be deleted."""

    status, code = 409, "model_in_use"


class PullBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body that starts a download."""

    model: str
    revision: str | None = None
    include: list[str] = []


class RevisionQuery(msgspec.Struct, kw_only=True):
    revision: str | None = None


class PlanQuery(RevisionQuery, kw_only=True):
    model: str


class FitQuery(RevisionQuery, kw_only=True):
    model: str
    n_cpu_moe: str | None = None
    max_model_len: int | None = None


class SearchQuery(msgspec.Struct, kw_only=True):
    q: str
    format: Literal["safetensors", "gguf"] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_FOUND)] = 20


@get("/localllm/v1/models", operation=Operation(shapes.AllInstalled))
async def installed(request: ApiRequest) -> ASGIResponse:
    """List the models on this machine."""
    return json_response(shapes.AllInstalled("list", await asyncio.to_thread(_installed)))


@delete(
    "/localllm/v1/models/{name:path}",
    status_code=200,
    operation=Operation(shapes.DeletedModel, query=RevisionQuery, also=(404, 409)),
)
async def remove(request: ApiRequest) -> ASGIResponse:
    """Delete a model from the Hugging Face cache.

    A name may contain slashes, such as `org/model`.
    """
    name = str(request.path_params["name"]).lstrip("/")
    revision = read_query(request, RevisionQuery).revision
    return json_response(await remove_model(request, name, revision))


@get("/localllm/v1/models/search", operation=Operation(shapes.AllFound, query=SearchQuery, also=OF_MODELS))
async def search(request: ApiRequest) -> ASGIResponse:
    """Search for models on the hub."""
    from localllm.models.library.hub.repository import search as search_hub

    require_online(request)
    asked = read_query(request, SearchQuery)
    query = _said(asked.q, "q")
    found = await asyncio.to_thread(search_hub, query, limit=asked.limit, format=asked.format)
    return json_response(shapes.AllFound("list", found))


@get("/localllm/v1/models/plan", operation=Operation(shapes.Plan, query=PlanQuery, also=OF_MODELS))
async def plan(request: ApiRequest) -> ASGIResponse:
    """List the files and bytes of a download before it starts."""
    from localllm.models.library.hub.plan import plan_download

    require_online(request)
    asked = read_query(request, PlanQuery)
    name = _said(asked.model, "model")
    planned = await asyncio.to_thread(plan_download, name, asked.revision)
    return json_response(shapes.Plan(**plan_facts(planned)))


@get("/localllm/v1/fit", operation=Operation(shapes.Fit, query=FitQuery, also=OF_MODELS))
async def fit(request: ApiRequest) -> ASGIResponse:
    """Tell where a model would run on this machine, with which context, and how fast.

    Nothing is loaded; of a model on the hub the headers are read. The first device is the one that a load would
    choose. The memory of loaded models that are not pinned counts as free.
    """
    asked = read_query(request, FitQuery)
    name, manager = _said(asked.model, "model"), manager_of(request)
    config = (manager.register.settings or Settings()).of_model(name).engine
    changes: dict[str, Any] = {
        "n_cpu_moe": asked.n_cpu_moe,
        "max_model_len": asked.max_model_len,
        "revision": asked.revision,
    }
    for field, value in changes.items():
        if value is not None:
            SETTINGS[field].check(value, f"{field}: {value!r}")
            config = replace(config, **{field: value})
    return json_response(shapes.Fit(**await asyncio.to_thread(_fit, name, config, manager.entries)))


def _fit(name: str, config: EngineConfig, entries: Sequence[ModelEntry]) -> dict[str, Any]:
    from localllm.machine.hardware import read_hardware
    from localllm.models.fit.checkpoint import estimate_measured
    from localllm.models.fit.estimate import fit_facts
    from localllm.models.library.about import inspect_checkpoint

    with inspect_checkpoint(name, config.revision, paths=False) as found:
        spec, estimates = estimate_measured(found.path, config, hardware_once_free(read_hardware(), entries))
        return fit_facts(found.name, spec, found.download_bytes, estimates)


@get("/localllm/v1/models/downloads", operation=Operation(shapes.DownloadStatuses))
async def list_downloads(request: ApiRequest) -> ASGIResponse:
    """List the downloads of this server."""
    return json_response(shapes.DownloadStatuses("list", [_download(each) for each in downloads_of(request).list()]))


@post(
    "/localllm/v1/models/downloads",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Download, RequestBody(PullBody, example={"model": "org/model"}), also=OF_MODELS),
)
async def start_download(request: ApiRequest) -> ASGIResponse:
    """Start a download."""
    body = await struct_body(request, PullBody)
    require_online(request)
    status = await asyncio.to_thread(downloads_of(request).start, body.model, body.revision, body.include)
    return json_response(_download(status))


@get("/localllm/v1/models/downloads/{id:str}", operation=Operation(shapes.Download, also=(404,)))
async def show_download(request: ApiRequest) -> ASGIResponse:
    """Show one download."""
    return json_response(_download(downloads_of(request).get(request.path_params["id"])))


@delete("/localllm/v1/models/downloads/{id:str}", status_code=200, operation=Operation(shapes.Download, also=(404,)))
async def cancel_download(request: ApiRequest) -> ASGIResponse:
    """Stop a download; downloaded bytes are kept."""
    status = await asyncio.to_thread(downloads_of(request).cancel, request.path_params["id"])
    return json_response(_download(status))


def routes() -> list[ControllerRouterHandler]:
    return [
        installed,
        remove,
        search,
        plan,
        fit,
        list_downloads,
        start_download,
        show_download,
        cancel_download,
    ]


def _download(status: DownloadStatus) -> shapes.Download:
    return shapes.Download(
        id=status.id,
        model=status.plan.name,
        state=status.state,
        started=int(status.started_s),
        **progress_facts(status.progress),
        error=openai_error(status.error).error if status.error else None,
    )


def downloads_of(request: ApiRequest) -> Downloads:
    downloads: Downloads = request.app.state.downloads
    return downloads


def require_online(request: ApiRequest) -> None:
    """Raise `HubOffline` on a server that may not ask the hub."""
    from localllm.models.library.hub.client import require_hub

    require_hub(request.app.state.settings)


def _said(text: str, name: str) -> str:
    if not text.strip():
        raise MissingParameter(f"Missing required parameter: {name!r}.", param=name)
    return text.strip()


def _installed() -> list[shapes.InstalledModel]:
    from localllm.models.library.catalog import list_models

    return [
        shapes.InstalledModel(
            id=model.name,
            object="model",
            source=model.source,
            format=model.format,
            size_bytes=model.size_bytes,
            revision=model.revision,
            last_read=int(model.used_s),
        )
        for model in list_models()
    ]


def _in_use(request: ApiRequest) -> list[ModelEntry]:
    """Return the models that are loaded or being loaded."""
    return [entry for entry in manager_of(request).entries if entry.state not in ("unloaded", "failed")]


async def remove_model(request: ApiRequest, name: str, revision: str | None = None) -> shapes.DeletedModel:
    """Delete the model of that name. Raises `ModelInUse`, `ModelNotFound` and `ConfigError`; see `to_remove`."""
    from localllm.models.library.hub.cache import to_remove

    return await remove_found(request, await asyncio.to_thread(to_remove, name, revision))


async def remove_found(request: ApiRequest, target: RemovalTarget) -> shapes.DeletedModel:
    """Delete what `to_remove` found. Raises `ModelInUse`."""
    from localllm.engine.memory.block_stores import delete_of_removed, kv_folder
    from localllm.models.library.hub.cache import remove_target, repository_folder

    refuse_if_loaded(request, target)
    removed = await asyncio.to_thread(remove_target, target)
    settings = manager_of(request).register.settings
    kv = kv_folder(None if settings is None else settings.engine.kv_offload_dir)
    _, kv_bytes = await asyncio.to_thread(delete_of_removed, kv, repository_folder(target.repo_id))
    if target.alias_of is not None:
        manager_of(request).register.remove_name(target.name)
    return shapes.DeletedModel(target.name, "model", deleted=True, freed_bytes=removed.freed_bytes + kv_bytes)


async def copy_model(request: ApiRequest, source: str, name: str) -> None:
    """Give a model a second name. Raises `ModelInUse`, `ModelNotFound` and `ConfigError`."""
    from localllm.models.library import catalog

    refuse_if_named(request, name)
    await asyncio.to_thread(catalog.copy_model, source, name)
    manager_of(request).register.remove_name(name)  # the name may have belonged to another model


def refuse_if_loaded(request: ApiRequest, target: RemovalTarget) -> None:
    """Raise `ModelInUse` if a loaded model uses the files to be deleted."""
    from localllm.models.library.hub.cache import repository_folder

    if target.alias_of is not None:
        refuse_if_named(request, target.name)
        return
    folder = repository_folder(target.repo_id)
    if any(str(entry.path).startswith(f"{folder}/") for entry in _in_use(request)):
        raise ModelInUse(f"{target.name} is loaded.", "", "Unload it first.", param="model")


def refuse_if_named(request: ApiRequest, name: str) -> None:
    """Raise `ModelInUse` if a loaded model has this name."""
    if any(entry.name == name for entry in _in_use(request)):
        raise ModelInUse(f"{name} is loaded.", "", "Unload it first.", param="model")
