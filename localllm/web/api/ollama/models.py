"""Ollama's calls about models: list, show, list loaded ones; download with progress as lines of JSON; copy and delete;
unsupported calls.

Does not know: how models are loaded and unloaded (serving/manager.py), how files are downloaded (models/library/hub).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar import delete, get, post, route
from litestar.enums import HttpMethod
from litestar.response.base import ASGIResponse
from msgspec.structs import asdict

from localllm.engine.params import SAMPLING_PARAMS
from localllm.errors import DownloadCancelled, RequestError, UnsupportedParameter
from localllm.models.formats.gguf.file_names import quant_of
from localllm.models.library.hub.downloads import Downloads, DownloadStatus
from localllm.serving.entry import ModelEntry, ModelUnusable
from localllm.web.api.disconnect import EventStream, unless_disconnected
from localllm.web.api.exchange import ApiRequest, json_response, manager_of, warning_headers
from localllm.web.api.model_facts import facts_of
from localllm.web.api.ollama import shapes
from localllm.web.api.ollama.lines import LINES, line, timestamp
from localllm.web.api.ollama.schema import NO_RULES, CopyBody, OllamaModelBody, OllamaPullBody, ShowBody, read_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.own.hub import copy_model, downloads_of, remove_model, require_online
from localllm.web.errors import MissingParameter, as_local_error, ollama_error

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.spec.model_spec import ModelSpec

FOR_GOOD = "9999-12-31T23:59:59Z"


class NotOffered(RequestError):
    """The dialect has this call, but this server does not support it."""

    status, code = 501, "not_offered"


def plain_name(name: str | None) -> str | None:
    """Return the name without what Ollama's clients add: `:latest` if there is no tag, and `hf.co/` before a name on
    the hub.
    """
    plain = (name or "").strip().removesuffix(":latest")
    return plain.removeprefix("huggingface.co/").removeprefix("hf.co/") or None


def required_name(body: OllamaModelBody) -> str:
    return _said(plain_name(body.model) or body.name, "model")


def _said(name: str | None, param: str) -> str:
    plain = plain_name(name)
    if plain is None:
        raise MissingParameter(f"Missing required parameter: {param!r}.", param=param)
    return plain


@route("/api/tags", http_method=[HttpMethod.GET, HttpMethod.HEAD], operation=Operation(shapes.Tags))
async def tags(request: ApiRequest) -> ASGIResponse:
    """List the models that a request can name."""
    manager = manager_of(request)
    listed = []
    for entry in manager.entries:
        adapters = entry.adapters.loaded if entry.adapters is not None else ()
        listed += [_listed(name, entry.path, entry) for name in (entry.name, *(each.name for each in adapters))]
    names = await manager.register.installed()
    found = await asyncio.to_thread(_installed) if names else {}
    for name, stands_for in names.items():
        model = found.get(name)
        listed.append(_listed(name, model.path if model else None, stands_for, model))
    return json_response(shapes.Tags(listed))


@get("/api/ps", operation=Operation(shapes.Running))
async def ps(request: ApiRequest) -> ASGIResponse:
    """List the loaded models."""
    manager = manager_of(request)
    listed = []
    for status in (status for status in manager.statuses() if status.state == "ready"):
        entry = next(entry for entry in manager.entries if entry.name == status.name)
        stays_s = status.expires_in_s
        loaded = {
            "size": status.size_bytes,
            "size_vram": status.size_bytes if status.device.startswith("cuda") else 0,
            "context_length": status.max_model_len,
            "expires_at": FOR_GOOD if stays_s is None else timestamp(time.time() + stays_s),
        }
        listed.append(shapes.Loaded(**asdict(_listed(entry.name, entry.path, entry)) | loaded))
    return json_response(shapes.Running(listed))


@post(
    "/api/show",
    status_code=200,
    operation=Operation(shapes.Shown, RequestBody(ShowBody, NO_RULES, example={"model": "demo"}), also=OF_MODELS),
)
async def show(request: ApiRequest) -> ASGIResponse:
    """Show one model: template, parameters, sizes.

    The model is not loaded; unless it is loaded already, the values come from its headers.
    """
    body, warnings = await read_body(request, ShowBody, NO_RULES)
    name = required_name(body)
    model = await facts_of(manager_of(request), name)
    if model.spec is None or model.path is None:
        raise ModelUnusable(f"The files of {name} cannot be read.", "", f"localllm show {name}", param="model")
    spec, family = model.spec, model.family
    card = model.entry.card if model.entry is not None else None
    defaults = card.sampling_defaults if card is not None else spec.generation_defaults
    answer = shapes.Shown(
        license="",
        modelfile="",
        parameters=_parameters(model.context, defaults),
        template=model.abilities.template,
        details=_details(model.path, spec),
        model_info={
            "general.architecture": family,
            "general.basename": (model.entry.name if model.entry is not None else model.name).rpartition("/")[2],
            f"{family}.context_length": model.context,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.block_count": spec.num_layers,
            f"{family}.attention.head_count": spec.num_heads,
            f"{family}.attention.head_count_kv": spec.num_kv_heads,
            f"{family}.vocab_size": spec.vocab_size,
        },
        capabilities=model.capabilities(reasoning="thinking"),
        modified_at=_modified(model.path),
    )
    return json_response(answer, warning_headers(warnings))


@delete(
    "/api/delete",
    status_code=200,
    operation=Operation(None, RequestBody(OllamaModelBody, NO_RULES, example={"model": "demo"}), also=(404, 409)),
)
async def delete_model(request: ApiRequest) -> ASGIResponse:
    """Delete a model from the Hugging Face cache, or delete a second name.

    Loaded models, and models outside the cache, are not deleted.
    """
    body, warnings = await read_body(request, OllamaModelBody, NO_RULES)
    await remove_model(request, required_name(body))
    return ASGIResponse(headers=warning_headers(warnings))


@post(
    "/api/copy",
    status_code=200,
    operation=Operation(
        None, RequestBody(CopyBody, NO_RULES, example={"source": "demo", "destination": "helper"}), also=(404, 409)
    ),
)
async def copy(request: ApiRequest) -> ASGIResponse:
    """Give a model a second name, which is kept across restarts.

    No file is copied.
    """
    body, warnings = await read_body(request, CopyBody, NO_RULES)
    await copy_model(request, _said(body.source, "source"), _said(body.destination, "destination"))
    return ASGIResponse(headers=warning_headers(warnings))


@post("/api/push", status_code=200, operation=Operation(also=(501,), success=()))
async def push(request: ApiRequest) -> ASGIResponse:
    """Unsupported: models cannot be pushed."""
    raise NotOffered("Pushing models is not supported.", "This server only downloads models.")


@post("/api/create", status_code=200, operation=Operation(also=(501,), success=()))
async def create(request: ApiRequest) -> ASGIResponse:
    """Unsupported: models cannot be created from a Modelfile."""
    raise NotOffered(
        "Modelfiles are not supported.", "", "Write settings of one model under [models.NAME] in config.toml."
    )


@route(
    "/api/blobs/{digest:str}",
    http_method=[HttpMethod.POST, HttpMethod.HEAD],
    status_code=200,
    operation=Operation(also=(501,), success=()),
)
async def blobs(request: ApiRequest) -> ASGIResponse:
    """Unsupported: files cannot be uploaded."""
    raise NotOffered(
        "Uploading files is not supported.", "", "POST /api/pull downloads a model; a folder is served by its path."
    )


def _parameters(context: int | None, defaults: Mapping[str, Any]) -> str:
    """Return the parameters as lines, under Ollama's names. Clients read their context from `num_ctx`."""
    named = {info.spellings.get("ollama", name): defaults.get(name) for name, info in SAMPLING_PARAMS.items()}
    found = {"num_ctx": context, **{name: value for name, value in named.items() if value is not None}}
    return "\n".join(f"{name:<30} {value}" for name, value in found.items() if isinstance(value, int | float))


def _installed() -> dict[str, ResolvedModel]:
    from localllm.models.library.catalog import list_models

    return {model.name: model for model in list_models()}


def _listed(
    name: str, path: Path | None, entry: ModelEntry | None = None, model: ResolvedModel | None = None
) -> shapes.Listed:
    card = entry.card if entry is not None else None
    size_bytes = model.size_bytes if model is not None else card.plan.weights_bytes if card is not None else 0
    return shapes.Listed(
        name=name,
        model=name,
        modified_at=_modified(path),
        size=size_bytes,
        digest=(model.revision if model is not None else None) or "",
        details=_details(path, card.spec if card is not None else None),
    )


def _details(path: Path | None, spec: ModelSpec | None) -> shapes.Details:
    """Return details that need no file access; for a model that was never loaded there are few."""
    is_gguf = path is not None and path.is_file()
    family = spec.architecture.removesuffix("ForCausalLM").lower() if spec is not None else ""
    quant = quant_of(path.name) if path is not None and is_gguf else ""
    if not quant and spec is not None:
        quant = str((spec.quantization or {}).get("quant_method", spec.dtype)).upper()
    return shapes.Details(
        parent_model="",
        format="gguf" if is_gguf else "safetensors",
        family=family,
        families=[family] if family else [],
        parameter_size="",
        quantization_level=quant,
    )


def _modified(path: Path | None) -> str:
    return timestamp(path.stat().st_mtime if path is not None and path.exists() else 0)


LOOK_EVERY_S = 0.1


@post(
    "/api/pull",
    status_code=200,
    operation=Operation(
        shapes.Pulled,
        RequestBody(OllamaPullBody, NO_RULES, example={"model": "demo"}),
        shapes.OllamaProgress,
        also=OF_MODELS,
    ),
)
async def pull(request: ApiRequest) -> ASGIResponse:
    """Download a model from the Hugging Face hub.

    If the client leaves, a download that it started is stopped; downloaded bytes are kept.
    """
    body, warnings = await read_body(request, OllamaPullBody, NO_RULES)
    if body.insecure:
        raise UnsupportedParameter(
            "'insecure' is not supported.", "The hub is always contacted over TLS.", param="insecure"
        )
    name = required_name(body)
    require_online(request)
    downloads = downloads_of(request)
    running = {each.id for each in downloads.list() if not each.is_over}
    status = await asyncio.to_thread(downloads.start, name)

    async def stop() -> None:
        if status.id not in running:
            await asyncio.to_thread(downloads.cancel, status.id)

    headers = warning_headers(warnings)
    if body.stream is False:
        try:
            await unless_disconnected(request.receive, _finished(downloads, status))
        finally:
            await stop()
        return json_response(shapes.Pulled("success"), headers)
    return EventStream(_lines(request, downloads, status), stop, headers, LINES)


async def _lines(request: ApiRequest, downloads: Downloads, status: DownloadStatus) -> AsyncGenerator[bytes, None]:
    try:
        yield line(shapes.OllamaProgress("pulling manifest"))
        async for news in _watched(downloads, status):
            digest, progress = news.plan.commit, news.progress
            yield line(
                shapes.OllamaProgress(f"pulling {digest[:12]}", digest, progress.bytes_total, progress.bytes_done)
            )
        yield line(shapes.OllamaProgress("verifying sha256 digest")) + line(shapes.Pulled("success"))
    except Exception as error:
        yield line(ollama_error(as_local_error(error, request.scope)))


async def _finished(downloads: Downloads, status: DownloadStatus) -> None:
    async for _ in _watched(downloads, status):
        pass


async def _watched(downloads: Downloads, status: DownloadStatus) -> AsyncGenerator[DownloadStatus, None]:
    """Yield the status whenever it changes, until the download is done. Raises the error that stopped it."""
    while True:
        status = downloads.get(status.id)
        yield status
        if status.is_over:
            break
        await asyncio.sleep(LOOK_EVERY_S)
    if status.error is not None:
        raise status.error
    if status.state != "done":
        raise DownloadCancelled(f"The download of {status.plan.name} was cancelled.", hint="Pull again to resume.")
