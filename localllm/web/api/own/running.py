"""The state of the server's models, and actions on them: load, unload, sleep, wake, pin.

    GET  /localllm/v1/models/loaded     every model that is or was loaded, with its state
    GET  /localllm/v1/models/stats      the same, each with the engine's latest snapshot
    POST /localllm/v1/models/load       {"model", "pin"?, "keep_alive"?, "wait"?} answers when the model is ready
    POST /localllm/v1/models/unload     {"model"} frees all its memory; cancels a load
    POST /localllm/v1/models/sleep      {"model"} keeps the weights in host memory and frees the rest
    POST /localllm/v1/models/wake       {"model"}
    POST /localllm/v1/models/pin        {"model", "pinned"?}

access/auth.py checks the key on all of them. Does not know: how models are loaded and unloaded (serving/manager.py).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TypeVar

import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler

from localllm.engine.stats import EngineStats
from localllm.serving.entry import ModelStatus
from localllm.serving.served import ServedModel
from localllm.web.api.exchange import (
    SMALL_BODY_BYTES,
    ApiRequest,
    json_response,
    keep_alive_seconds,
    manager_of,
    struct_body,
)
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.own import shapes
from localllm.web.errors import MissingParameter

ROOT = "/localllm/v1/models"
MAX_REQUESTS = 100
"""Most live requests listed in a snapshot; its counts include all of them."""
Body = TypeVar("Body", bound="ModelBody")


class ModelBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body that names the model."""

    model: str = ""


class LoadBody(ModelBody):
    """A request to load a model: how long it stays loaded, and whether the answer waits for the load."""

    pin: bool | None = None
    keep_alive: str | float | None = None
    wait: bool = True


class PinBody(ModelBody):
    pinned: bool = True


DEMO = {"model": "demo"}
ON_MODEL = Operation(shapes.Status, RequestBody(ModelBody, example=DEMO), also=OF_MODELS)


@get(f"{ROOT}/loaded", operation=Operation(shapes.Statuses))
async def loaded(request: ApiRequest) -> ASGIResponse:
    """List each model that is or was loaded."""
    statuses = manager_of(request).statuses()
    return json_response(shapes.Statuses("list", [_status(status) for status in statuses]))


@get(f"{ROOT}/stats", operation=Operation(shapes.Stats))
async def stats(request: ApiRequest) -> ASGIResponse:
    """List the same models with the statistics of their engines."""
    manager = manager_of(request)
    taken = {model.name: model.client.stats() for model in manager.ready}
    cut = {name: replace(each, requests=each.requests[:MAX_REQUESTS]) for name, each in taken.items()}
    served = {model.name: model for model in manager.ready}
    data = [_with_stats(status, served.get(status.name), cut.get(status.name)) for status in manager.statuses()]
    return json_response(shapes.Stats("list", data))


@post(
    f"{ROOT}/load",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Status, RequestBody(LoadBody, example=DEMO), also=OF_MODELS, success=(200, 202)),
)
async def load(request: ApiRequest) -> ASGIResponse:
    """Load or wake a model.

    The status is 202 if the answer did not wait for the load. The model is named by its name or by a path on
    this machine. Nothing is downloaded.
    """
    body = await model_body(request, LoadBody)
    keep_alive_s = keep_alive_seconds(body.keep_alive)
    status = await manager_of(request).load(body.model, pin=body.pin, keep_alive_s=keep_alive_s, wait=body.wait)
    return json_response(_status(status), status_code=200 if status.state == "ready" else 202)


@post(
    f"{ROOT}/unload",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=ON_MODEL,
)
async def unload(request: ApiRequest) -> ASGIResponse:
    """Unload a model and free all its memory.

    A load is cancelled.
    """
    body = await model_body(request, ModelBody)
    return json_response(_status(await manager_of(request).unload(body.model)))


@post(
    f"{ROOT}/sleep",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=ON_MODEL,
)
async def sleep(request: ApiRequest) -> ASGIResponse:
    """Put a model to sleep: keep its weights in host memory and free the rest."""
    body = await model_body(request, ModelBody)
    return json_response(_status(await manager_of(request).sleep(body.model)))


@post(
    f"{ROOT}/wake",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=ON_MODEL,
)
async def wake(request: ApiRequest) -> ASGIResponse:
    """Wake a sleeping model."""
    body = await model_body(request, ModelBody)
    return json_response(_status(await manager_of(request).wake(body.model)))


@post(
    f"{ROOT}/pin",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Status, RequestBody(PinBody, example=DEMO), also=OF_MODELS),
)
async def pin(request: ApiRequest) -> ASGIResponse:
    """Pin or unpin a model; a pinned model is never evicted."""
    body = await model_body(request, PinBody)
    return json_response(_status(manager_of(request).pin(body.model, body.pinned)))


def routes() -> list[ControllerRouterHandler]:
    return [loaded, stats, load, unload, sleep, wake, pin]


def _status(status: ModelStatus) -> shapes.Status:
    return shapes.Status(status.name, "model", **asdict(status))


def _with_stats(status: ModelStatus, served: ServedModel | None, stats: EngineStats | None) -> shapes.StatusWithStats:
    far = None if served is None else served.plan.far
    on_disk = 0 if far is None or far.disk is None else far.disk.file_bytes
    return shapes.StatusWithStats(
        status.name, "model", **asdict(status), stats=stats,
        far=None if far is None else shapes.FarFacts(list(far.layers), far.ram_bytes, on_disk, dict(far.tables)),
        predicted=None if served is None else served.speed,
        measured_tokens_per_s=(stats.lone_tokens_per_s or None) if stats is not None else None,
    )  # fmt: skip


async def model_body(request: ApiRequest, kind: type[Body]) -> Body:
    body = await struct_body(request, kind)
    if not body.model.strip():
        raise MissingParameter("Missing required parameter: 'model'.", param="model")
    return body
