"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: load and unload LoRA adapters while the server runs.

Requests and answers have vLLM's format. An adapter is a model of its own: requests name it as their model.
Does not know: how an adapter is loaded (adapters.py).
"""

from __future__ import annotations

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from localllm.web.api.exchange import SMALL_BODY_BYTES, ApiRequest, manager_of, struct_body
from localllm.web.api.openapi import OF_MODELS, TEXT, Operation, RequestBody
from localllm.web.errors import MissingParameter


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str = ""
    lora_path: str = ""  # a folder on this machine, or a repository in the Hugging Face cache
    model: str | None = None  # the model it is loaded into; None: the model used last


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str = ""


@post(
    "/v1/load_lora_adapter",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(
        TEXT,
        RequestBody(LoadAdapterBody, example={"lora_name": "sql", "lora_path": "/models/sql-lora"}),
        also=OF_MODELS,
        guide="adapters",
    ),
)
async def load_lora_adapter(request: ApiRequest) -> ASGIResponse:
    """Load a LoRA adapter."""
    body = await struct_body(request, LoadAdapterBody)
    if not body.lora_name or not body.lora_path:
        raise MissingParameter(
            "Both 'lora_name' and 'lora_path' must be provided.", param="lora_path" if body.lora_name else "lora_name"
        )
    await manager_of(request).load_adapter(body.lora_name, body.lora_path, body.model)
    return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post(
    "/v1/unload_lora_adapter",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(
        TEXT, RequestBody(UnloadAdapterBody, example={"lora_name": "sql"}), also=OF_MODELS, guide="adapters"
    ),
)
async def unload_lora_adapter(request: ApiRequest) -> ASGIResponse:
    """Unload a LoRA adapter; returns when its last request has ended.

    New requests for the adapter are refused meanwhile.
    """
    body = await struct_body(request, UnloadAdapterBody)
    if not body.lora_name:
        raise MissingParameter("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    await manager_of(request).unload_adapter(body.lora_name)
    return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _said(text: str) -> ASGIResponse:
    return ASGIResponse(body=text.encode(), media_type="text/plain")
