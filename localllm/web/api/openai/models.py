"""GET /v1/models: what is served, under which name, with how much context; what could be loaded; what is coming."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from litestar import get
from litestar.response.base import ASGIResponse

from localllm.manager.kept import Kept
from localllm.models.gguf_names import quant_of
from localllm.models.hub.downloads import DownloadStatus
from localllm.served import ModelCard
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.api.hub import downloads_of

WORDS = {"ready": "loaded"}
"""States as clients of other servers know them, where the word differs."""


@get(["/v1/models", "/models"])
async def list_models(request: ApiRequest) -> ASGIResponse:
    manager = manager_of(request)
    manager.require_working()
    ready_first = sorted(manager.kept, key=lambda kept: kept.state != "ready")
    objects = [each for kept in ready_first for each in (model_object(kept), *adapter_objects(kept))]
    objects += [_installed_object(name, kept) for name, kept in (await manager.register.installed()).items()]
    listed = {each["id"] for each in objects}
    objects += [_coming(each) for each in downloads_of(request).list() if _is_new(each, listed)]
    return json_response({"object": "list", "data": objects})


@get("/v1/models/{name:path}")
async def show_model(request: ApiRequest) -> ASGIResponse:
    """A name may hold slashes, as `org/model` does. Nothing is loaded by looking."""
    manager = manager_of(request)
    name: str = request.path_params["name"].lstrip("/")
    found = await manager.register.look_up(name)
    if not isinstance(found, Kept):
        return json_response(_object(name))
    adapters = [] if name in found.names else [each for each in adapter_objects(found) if each["id"] == name]
    return json_response(adapters[0] if adapters else model_object(found))


def _installed_object(name: str, kept: Kept | None) -> dict[str, Any]:
    """Of a second name: what it stands for, as `root` says."""
    return _object(name) if kept is None else model_object(kept) | {"id": name}


def _is_new(download: DownloadStatus, listed: Collection[str]) -> bool:
    return not download.is_over and download.plan.name not in listed


def _coming(download: DownloadStatus) -> dict[str, Any]:
    status = {"value": "downloading", "progress": download.progress.fraction}
    return _object(download.plan.name) | {"status": status}


def model_object(kept: Kept) -> dict[str, Any]:
    card = kept.card
    status: dict[str, Any] = {"value": WORDS.get(kept.state, kept.state)}
    phase = next(reversed(kept.phases.values()), None)
    if kept.state == "loading" and phase is not None:
        status |= {"phase": phase.name, "progress": phase.fraction}
    if card is None:
        return _object(kept.name) | {"status": status}
    return _object(kept.name) | {
        "created": int(card.created_s),
        "max_model_len": card.plan.max_model_len,
        "meta": {
            "quant": _quant(card),
            "size": card.plan.weights_bytes,
            "n_vocab": card.spec.vocab_size,
            "n_embd": card.spec.hidden_size,
            "n_ctx_train": card.spec.max_position,
            "dtype": str(card.plan.dtype),
        },
        "status": status,
    }


def _quant(card: ModelCard) -> str | None:
    """As the file's name or the checkpoint's config calls it."""
    named = quant_of(card.path.name) if card.path.suffix == ".gguf" else ""
    return named or (card.spec.quantization or {}).get("quant_method")


def adapter_objects(kept: Kept) -> list[dict[str, Any]]:
    """An adapter is a model of its own to clients; `parent` is what it runs on."""
    base = model_object(kept)
    return [
        base | {
            "id": each.name,
            "created": int(each.created_s),
            "root": str(each.path),
            "parent": kept.name,
            "meta": {"rank": each.rank},
        }
        for each in (kept.adapters.loaded if kept.adapters is not None else ())
    ]  # fmt: skip


def _object(name: str) -> dict[str, Any]:
    """What is known of every model."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "localllm",
        "root": name,
        "parent": None,
        "status": {"value": "unloaded"},
    }
