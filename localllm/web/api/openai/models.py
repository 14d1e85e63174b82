"""GET /v1/models: what is served, under which name, with how much context."""

from __future__ import annotations

from typing import Any

from litestar import get
from litestar.response.base import ASGIResponse

from localllm.build import ServedModel
from localllm.web.api.exchange import ApiRequest, json_response, served_model


@get("/v1/models")
async def list_models(request: ApiRequest) -> ASGIResponse:
    return json_response({"object": "list", "data": [model_object(served_model(request, None))]})


@get("/v1/models/{name:path}")
async def show_model(request: ApiRequest) -> ASGIResponse:
    """A name may hold slashes, as `org/model` does."""
    name: str = request.path_params["name"]
    return json_response(model_object(served_model(request, name.lstrip("/"))))


def model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_s),
        "owned_by": "localllm",
        "root": model.name,
        "parent": None,
        "max_model_len": model.plan.max_model_len,
        "meta": {
            "size": model.plan.weights_bytes,
            "n_vocab": model.spec.vocab_size,
            "n_embd": model.spec.hidden_size,
            "n_ctx_train": model.spec.max_position,
            "dtype": str(model.plan.dtype),
        },
        "status": {"value": "loaded"},
    }
