"""GET /v1/models: served models with names and context, models that could be loaded, and models being downloaded."""

from __future__ import annotations

from collections.abc import Collection

from litestar import get
from litestar.response.base import ASGIResponse
from msgspec.structs import replace

from localllm.models.formats.gguf_names import quant_of
from localllm.models.library.hub.downloads import DownloadStatus
from localllm.serving.entry import ModelEntry
from localllm.serving.served import ModelCard
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.api.openai import shapes
from localllm.web.api.operation import Operation
from localllm.web.api.own.hub import downloads_of

WORDS = {"ready": "loaded"}
"""The states whose name differs for clients of other servers."""


@get(["/v1/models", "/models"], operation=Operation(shapes.Models, also=(503,)))
async def list_models(request: ApiRequest) -> ASGIResponse:
    """List the models that are loaded or can be loaded by a request."""
    manager = manager_of(request)
    manager.require_working()
    ready_first = sorted(manager.entries, key=lambda entry: entry.state != "ready")
    objects = [each for entry in ready_first for each in (model_object(entry), *adapter_objects(entry))]
    objects += [_installed_object(name, entry) for name, entry in (await manager.register.installed()).items()]
    listed = {each.id for each in objects}
    objects += [_coming(each) for each in downloads_of(request).list() if _is_new(each, listed)]
    return json_response(shapes.Models("list", objects))


@get("/v1/models/{name:path}", operation=Operation(shapes.OpenAIModel, also=(404,)))
async def show_model(request: ApiRequest) -> ASGIResponse:
    """Show one model, without loading it.

    A name may contain slashes, such as `org/model`.
    """
    manager = manager_of(request)
    name: str = request.path_params["name"].lstrip("/")
    found = await manager.register.look_up(name)
    if not isinstance(found, ModelEntry):
        return json_response(_object(name))
    adapters = [] if name in found.names else [each for each in adapter_objects(found) if each.id == name]
    return json_response(adapters[0] if adapters else model_object(found))


def _installed_object(name: str, entry: ModelEntry | None) -> shapes.OpenAIModel:
    """Return the object of an installed model; for a second name, `root` is the original name."""
    return _object(name) if entry is None else replace(model_object(entry), id=name)


def _is_new(download: DownloadStatus, listed: Collection[str]) -> bool:
    return not download.is_over and download.plan.name not in listed


def _coming(download: DownloadStatus) -> shapes.OpenAIModel:
    status = shapes.ModelState("downloading", progress=download.progress.fraction)
    return replace(_object(download.plan.name), status=status)


def model_object(entry: ModelEntry) -> shapes.OpenAIModel:
    card = entry.card
    status = shapes.ModelState(WORDS.get(entry.state, entry.state))
    phase = next(reversed(entry.phases.values()), None)
    if entry.state == "loading" and phase is not None:
        status.phase, status.progress = phase.name, phase.fraction
    if card is None:
        return replace(_object(entry.name), status=status)
    return replace(
        _object(entry.name),
        created=int(card.created_s),
        max_model_len=card.plan.max_model_len,
        meta={
            "quant": _quant(card),
            "size": card.plan.weights_bytes,
            "n_vocab": card.spec.vocab_size,
            "n_embd": card.spec.hidden_size,
            "n_ctx_train": card.spec.max_position,
            "dtype": str(card.plan.dtype),
        },
        status=status,
    )


def _quant(card: ModelCard) -> str | None:
    """Return the quantisation as in the file's name or the checkpoint's config."""
    named = quant_of(card.path.name) if card.path.suffix == ".gguf" else ""
    return named or (card.spec.quantization or {}).get("quant_method")


def adapter_objects(entry: ModelEntry) -> list[shapes.OpenAIModel]:
    """Return an object for each adapter. To clients an adapter is a model of its own; `parent` is its base model."""
    base = model_object(entry)
    return [
        replace(
            base,
            id=each.name,
            created=int(each.created_s),
            root=str(each.path),
            parent=entry.name,
            meta={"rank": each.rank},
        )
        for each in (entry.adapters.loaded if entry.adapters is not None else ())
    ]


def _object(name: str) -> shapes.OpenAIModel:
    """Return the fields that every model has."""
    return shapes.OpenAIModel(
        id=name,
        object="model",
        created=0,
        owned_by="localllm",
        root=name,
        parent=None,
        status=shapes.ModelState("unloaded"),
    )
