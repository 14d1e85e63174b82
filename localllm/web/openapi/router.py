"""The model management routes that llama.cpp and vLLM have.

Does not know: how answers are made (api/router.py).
"""

from __future__ import annotations

from typing import Any

from localllm.web.api import router
from localllm.web.api.own import running
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, Operation, Shape, Table


class Slot(Shape):
    """A sequence that is running or waiting."""

    id: int
    id_task: str
    model: str
    n_ctx: int
    is_processing: bool
    state: str
    n_prompt_tokens: int
    n_prompt_tokens_cache: int
    next_token: list[dict[str, int]]
    n_blocks: int
    started: float


class Success(Shape):
    success: bool


class Removed(Success):
    id: str
    object: str
    deleted: bool
    freed_bytes: int


class Sleeping(Shape):
    is_sleeping: bool


_MODEL = Body(running.ModelBody, example={"model": "demo"})

TABLE: Table = {
    router.slots: Operation(
        "List the sequences that are running or waiting.", list[Slot], query=router.ModelQuery, also=OF_MODELS
    ),
    router.load: Operation("Start loading a model.", Success, _MODEL, also=OF_MODELS),
    router.unload: Operation("Unload a model and free all its memory.", Success, _MODEL, also=OF_MODELS),
    router.remove: Operation(
        "Delete a model from the Hugging Face cache.", Removed, query=router.RemoveQuery, also=OF_MODELS
    ),
    router.sleep: Operation(
        "Put a model to sleep: keep its weights in host memory (level 1), or nothing (level 2).",
        dict[str, Any],
        query=router.SleepQuery,
        also=OF_MODELS,
    ),
    router.wake_up: Operation("Wake a sleeping model.", dict[str, Any], query=router.WakeQuery, also=OF_MODELS),
    router.is_sleeping: Operation("Report whether a model sleeps.", Sleeping, query=router.ModelQuery, also=OF_MODELS),
}
