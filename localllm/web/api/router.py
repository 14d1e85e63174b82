"""Model management in the formats of other servers: llama.cpp's router and slots, vLLM's sleep and traces.

    GET    /slots            llama.cpp: running and waiting sequences, of `model` or of all models
    POST   /models/load      llama.cpp: {"model"} starts a load; GET /models shows its progress
    POST   /models/unload    llama.cpp: {"model"}
    DELETE /models           llama.cpp: ?model= deletes it from the Hugging Face cache
    POST   /sleep            vLLM: ?level=1 keeps the weights in host memory, 2 keeps nothing
    POST   /wake_up          vLLM: wakes the model; after level 2 it is loaded again
    GET    /is_sleeping      vLLM: {"is_sleeping": true} after either
    POST   /start_profile    vLLM: begins to record a trace of the engine's steps
    POST   /stop_profile     vLLM: writes it; the answer names the file

vLLM has only one model. Here `model` in the query names it; the default is the model that a request without a name
would get: the last used one of those that are ready, else of all.
Does not know: how models are loaded and unloaded (serving/manager.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from litestar import delete, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler
from msgspec.structs import asdict

from localllm.engine.stats import RequestTimeline
from localllm.errors import InvalidParameter
from localllm.serving.entry import ModelEntry, ModelNotLoaded
from localllm.serving.served import ServedModel
from localllm.web.api.exchange import SMALL_BODY_BYTES, ApiRequest, json_response, manager_of
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.api.own import shapes
from localllm.web.api.own.hub import remove_model
from localllm.web.api.own.running import DEMO, ModelBody, model_body
from localllm.web.api.reading import ModelQuery
from localllm.web.errors import MissingParameter

GONE = ("sleeping", "unloaded")
TAGS = ("weights", "kv_cache")


class RemoveQuery(msgspec.Struct, kw_only=True):
    model: str


class SleepQuery(ModelQuery, kw_only=True):
    level: Literal["1", "2"] = "1"  # 1 keeps the weights in host memory, 2 keeps nothing
    mode: Literal["wait"] = "wait"  # wait: running requests may finish first


class WakeQuery(ModelQuery, kw_only=True):
    tags: Literal["weights", "kv_cache"] | None = None  # may occur twice


@get("/slots", operation=Operation(list[shapes.Slot], query=ModelQuery, also=OF_MODELS))
async def slots(request: ApiRequest) -> ASGIResponse:
    """List the sequences that are running, and the first ones that are waiting.

    A slot of llama.cpp is a sequence here; there are no idle slots.
    """
    manager, name = manager_of(request), request.query_params.get("model")
    asked = manager.register.require(name) if name else None
    models = [model for model in manager.ready if asked is None or asked.served is model]
    live = [
        (model, each) for model in models if model.spec.task == "generate" for each in model.client.stats().requests
    ]
    return json_response([_slot(i, model, each) for i, (model, each) in enumerate(live)])


def _slot(id: int, model: ServedModel, timeline: RequestTimeline) -> shapes.Slot:
    return shapes.Slot(
        id=id,
        id_task=timeline.request_id,
        model=model.name,
        n_ctx=model.plan.max_model_len,
        is_processing=timeline.state == "running",
        state=timeline.state,
        n_prompt_tokens=timeline.num_prompt_tokens,
        n_prompt_tokens_cache=timeline.num_cached_tokens,
        next_token=[{"n_decoded": timeline.num_output_tokens}],
        n_blocks=timeline.num_blocks,
        started=timeline.arrived_s,
    )


@post(
    "/models/load",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Success, RequestBody(ModelBody, example=DEMO), also=OF_MODELS),
)
async def load(request: ApiRequest) -> ASGIResponse:
    """Start loading a model.

    llama.cpp has the same route. The model is named by its name or by a path on this machine. Nothing is
    downloaded.
    """
    body = await model_body(request, ModelBody)
    await manager_of(request).load(body.model, wait=False)
    return json_response(shapes.Success(success=True))


@post(
    "/models/unload",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Success, RequestBody(ModelBody, example=DEMO), also=OF_MODELS),
)
async def unload(request: ApiRequest) -> ASGIResponse:
    """Unload a model and free all its memory.

    llama.cpp has the same route.
    """
    body = await model_body(request, ModelBody)
    await manager_of(request).unload(body.model)
    return json_response(shapes.Success(success=True))


@delete("/models", status_code=200, operation=Operation(shapes.RouterDeletedModel, query=RemoveQuery, also=OF_MODELS))
async def remove(request: ApiRequest) -> ASGIResponse:
    """Delete a model from the Hugging Face cache.

    llama.cpp has the same route.
    """
    name = request.query_params.get("model", "").strip()
    if not name:
        raise MissingParameter("Missing required parameter: 'model'.", "Send it in the query string.", param="model")
    deleted = await remove_model(request, name)
    return json_response(shapes.RouterDeletedModel(**asdict(deleted), success=True))


@post("/sleep", status_code=200, operation=Operation(dict[str, Any], query=SleepQuery, also=OF_MODELS))
async def sleep(request: ApiRequest) -> ASGIResponse:
    """Put a model to sleep: keep its weights in host memory (level 1), or nothing (level 2).

    vLLM has the same route. Running requests may finish first.
    """
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "wait")
    if level not in ("1", "2"):
        why = "1 keeps the weights in host memory, 2 keeps nothing."
        raise InvalidParameter(f"level is {level!r}.", why, param="level")
    if mode != "wait":
        raise InvalidParameter(
            f"mode is {mode!r}.", "Supported: wait, which lets running requests end first.", param="mode"
        )
    manager, entry = manager_of(request), _meant(request)
    if entry is None:
        raise ModelNotLoaded("No model is loaded.", "", "localllm ps", param="model")
    await (manager.sleep(entry.name) if level == "1" else manager.unload(entry.name))
    return json_response({})


@post("/wake_up", status_code=200, operation=Operation(dict[str, Any], query=WakeQuery, also=OF_MODELS))
async def wake_up(request: ApiRequest) -> ASGIResponse:
    """Wake a sleeping model.

    vLLM has the same route. The whole model is woken, whatever `tags` say; for a client that wakes in two calls the
    second one has no effect.
    """
    if unknown := set(request.query_params.getall("tags", [])) - set(TAGS):
        raise InvalidParameter(f"tags holds {min(unknown)!r}.", f"Known: {', '.join(TAGS)}.", param="tags")
    entry = _meant(request)
    if entry is not None and entry.state in GONE:
        await manager_of(request).load(entry.name)
    return json_response({})


@get("/is_sleeping", operation=Operation(shapes.Sleeping, query=ModelQuery, also=OF_MODELS))
async def is_sleeping(request: ApiRequest) -> ASGIResponse:
    """Report whether a model sleeps.

    vLLM has the same route.
    """
    entry = _meant(request)
    return json_response(shapes.Sleeping(is_sleeping=entry is not None and entry.state in GONE))


@post(
    "/start_profile",
    status_code=200,
    operation=Operation(dict[str, Any], query=ModelQuery, also=OF_MODELS, guide="metrics"),
)
async def start_profile(request: ApiRequest) -> ASGIResponse:
    """Begin to record a trace of a model's steps, which `POST /stop_profile` writes.

    vLLM has the same route. It needs `--torch-profiler-dir`. Steps are slower while a trace is recorded.
    """
    model = _ready(request)
    await asyncio.wrap_future(model.engine[0].call(model.profiler.start))
    return json_response({})


@post(
    "/stop_profile",
    status_code=200,
    operation=Operation(shapes.WrittenTrace, query=ModelQuery, also=OF_MODELS, guide="metrics"),
)
async def stop_profile(request: ApiRequest) -> ASGIResponse:
    """Write the trace that `POST /start_profile` began, for Perfetto or chrome://tracing.

    vLLM has the same route. The file is in the folder of `--torch-profiler-dir`.
    """
    model = _ready(request)
    write = await asyncio.wrap_future(model.engine[0].call(model.profiler.stop))
    path = await asyncio.to_thread(write, model.name)
    return json_response(shapes.WrittenTrace(model=model.name, file=str(path)))


def _ready(request: ApiRequest) -> ServedModel:
    """Return the model that a request means. Raises `ModelNotLoaded` if it has no engine now."""
    entry = _meant(request)
    if entry is None or entry.state != "ready" or entry.served is None:
        what = "No model is loaded." if entry is None else f"{entry.name} cannot be traced: it is {entry.state}."
        raise ModelNotLoaded(what, "", "localllm ps", param="model")
    return entry.served


def _meant(request: ApiRequest) -> ModelEntry | None:
    manager, name = manager_of(request), request.query_params.get("model")
    return manager.register.require(name) if name else manager.register.default


def routes() -> list[ControllerRouterHandler]:
    return [slots, load, unload, remove, sleep, wake_up, is_sleeping, start_profile, stop_profile]
