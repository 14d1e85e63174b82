"""GET /props, llama.cpp's description of a model."""

from __future__ import annotations

from litestar import get
from litestar.response.base import ASGIResponse

from localllm.serving.entry import ModelLoading
from localllm.version import __version__
from localllm.web.api.exchange import ApiRequest, json_response, manager_of
from localllm.web.api.llamacpp import shapes
from localllm.web.api.llamacpp.completion import settings_of
from localllm.web.api.model_facts import facts_of
from localllm.web.api.operation import OF_MODELS, Operation
from localllm.web.api.reading import ModelQuery


@get("/props", operation=Operation(shapes.LlamaProps, query=ModelQuery, also=OF_MODELS))
async def props(request: ApiRequest) -> ASGIResponse:
    """Describe a model: its context, its chat template and its defaults. Nothing is loaded.

    llama.cpp has the same route. Without `model` in the query it describes the model that a request without a name
    would get.
    """
    manager, name = manager_of(request), request.query_params.get("model")
    if not name:
        if (default := manager.default) is None:
            raise ModelLoading("The model is loading.", hint="Try again in a moment.")
        name = default.name
    model = await facts_of(manager, name)
    served = model.entry.served if model.entry is not None else None
    special = served.tokenizer.special_tokens if served is not None else {}
    answer = shapes.LlamaProps(
        default_generation_settings=shapes.LlamaSettings(
            model.context, settings_of(served.default_params, served) if served is not None else {}
        ),
        total_slots=served.plan.max_num_seqs if served is not None else 1,
        model_alias=model.name,
        model_path=str(model.path or ""),
        modalities={"vision": model.abilities.vision, "audio": False},
        chat_template=model.abilities.template,
        chat_template_caps={"supports_tools": model.abilities.tools, "supports_tool_calls": model.abilities.tools},
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
        build_info=f"localllm {__version__}",
        is_sleeping=model.entry is not None and model.entry.state == "sleeping",
    )
    return json_response(answer)
