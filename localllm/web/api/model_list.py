"""The lists of models, in the shapes of several clients. Nothing is loaded, and the lists answer while a model loads.

    GET /v1/models, /models        OpenAI's; with the header anthropic-version, Anthropic's; with client_version in the
                                   query, also the array that Codex reads
    GET /v1/models/NAME            the same for one model
    GET /api/v0/models[/NAME]      LM Studio's

Does not know: how the facts of a model are found (model_facts.py).
"""

from __future__ import annotations

from typing import Literal

from litestar import get
from litestar.response.base import ASGIResponse
from litestar.response.redirect import ASGIRedirectResponse
from litestar.types import ControllerRouterHandler

from localllm.errors import ModelNotFound
from localllm.web.api.anthropic.shapes import anthropic_list, anthropic_object
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.api.model_facts import ModelFacts, all_facts, facts_of, other_facts
from localllm.web.api.openai import shapes
from localllm.web.api.openai.models import codex_object, model_objects, object_named
from localllm.web.api.openapi import Operation
from localllm.web.api.own.hub import downloads_of
from localllm.web.shape import Shape

LM_STUDIO_TYPES = {"generate": "llm", "embed": "embeddings", "score": "embeddings", "transcribe": "transcription"}


class LmStudioModel(Shape):
    """A model in LM Studio's REST API."""

    id: str
    object: Literal["model"]
    type: str  # llm, vlm or embeddings
    publisher: str
    arch: str
    compatibility_type: str
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int | None
    loaded_context_length: int | None
    capabilities: list[str]


class LmStudioModels(Shape):
    object: Literal["list"]
    data: list[LmStudioModel]


@get(["/v1/models", "/models"], operation=Operation(shapes.Models))
async def list_models(request: ApiRequest) -> ASGIResponse:
    """List the models that are loaded or can be loaded by a request, with what each can do.

    Clients of Anthropic's API, which send the header `anthropic-version`, get the list in its shape. A person who types
    /models into a browser is sent to the page.
    """
    has_page = request.scope["path"] == "/models" and request.app.state.settings.server.ui
    if has_page and "text/html" in request.headers.get("accept", ""):
        return ASGIRedirectResponse("/library", status_code=303)
    facts = await _all(request)
    if "anthropic-version" in request.headers:
        return json_response(anthropic_list([each for each in facts if each.generates]))
    listed = shapes.Models("list", model_objects(facts, downloads_of(request).list()))
    if "client_version" in request.query_params:
        listed.models = [codex_object(each) for each in facts if each.generates]
    return json_response(listed)


@get("/v1/models/{name:path}", operation=Operation(shapes.OpenAIModel, also=(404,)))
async def show_model(request: ApiRequest) -> ASGIResponse:
    """Show one model, without loading it.

    A name may contain slashes, such as `org/model`.
    """
    name: str = request.path_params["name"].lstrip("/")
    model = await _named(request, name)
    if "anthropic-version" in request.headers:
        return json_response(anthropic_object(model))
    return json_response(object_named(name, model))


@get("/api/v0/models", operation=Operation(LmStudioModels))
async def list_lm_studio_models(request: ApiRequest) -> ASGIResponse:
    """List the models that are loaded or can be loaded by a request.

    LM Studio has the same route.
    """
    facts = await _all(request)
    return json_response(LmStudioModels("list", [_lm_studio_object(each) for each in facts]))


@get("/api/v0/models/{name:path}", operation=Operation(LmStudioModel, also=(404,)))
async def show_lm_studio_model(request: ApiRequest) -> ASGIResponse:
    """Show one model, without loading it.

    LM Studio has the same route.
    """
    return json_response(_lm_studio_object(await _named(request, request.path_params["name"].lstrip("/"))))


async def _all(request: ApiRequest) -> list[ModelFacts]:
    """Return the facts of all models: of this server, then of others behind its address."""
    own = await all_facts(manager_of(request))
    names = {each.name for each in own}
    return own + [each for each in other_facts(request) if each.name not in names]


async def _named(request: ApiRequest, name: str) -> ModelFacts:
    try:
        return await facts_of(manager_of(request), name)
    except ModelNotFound:
        found = next((each for each in other_facts(request) if each.name == name), None)
        if found is None:
            raise
        return found


def _lm_studio_object(model: ModelFacts) -> LmStudioModel:
    is_gguf = model.path is not None and model.path.is_file()
    publisher, slash, _ = model.name.rpartition("/")
    kind = LM_STUDIO_TYPES[model.spec.task] if model.spec is not None else "llm"
    return LmStudioModel(
        id=model.name,
        object="model",
        type="vlm" if model.abilities.vision else kind,
        publisher=publisher if slash else "localllm",
        arch=model.family,
        compatibility_type="gguf" if is_gguf else "safetensors",
        quantization=model.quant,
        state="loaded" if model.is_loaded else "not-loaded",
        max_context_length=model.spec.max_position if model.spec is not None else None,
        loaded_context_length=model.context if model.is_loaded else None,
        capabilities=["tool_use"] if model.abilities.tools else [],
    )


def routes() -> list[ControllerRouterHandler]:
    return [list_models, show_model, list_lm_studio_models, show_lm_studio_model]
