"""What models do in llama.cpp's and vLLM's words.

Does not know: how answers are made (api/router.py).
"""

from __future__ import annotations

from typing import Any

from localllm.web.api import router, running
from localllm.web.openapi.bodies import Body
from localllm.web.openapi.document import OF_MODELS, Operation, Shape, Table


class Slot(Shape):
    """A sequence that runs or waits."""

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
    router.slots: Operation("Sequences that run or wait.", list[Slot], query=router.ModelQuery, also=OF_MODELS),
    router.load: Operation("Begin to load a model.", Success, _MODEL, also=OF_MODELS),
    router.unload: Operation("Give all memory of a model back.", Success, _MODEL, also=OF_MODELS),
    router.remove: Operation(
        "Delete a model from the Hugging Face cache.", Removed, query=router.RemoveQuery, also=OF_MODELS
    ),
    router.sleep: Operation(
        "Keep a model's weights in host memory, or nothing.",
        dict[str, Any],
        query=router.SleepQuery,
        also=OF_MODELS,
    ),
    router.wake_up: Operation("Serve what sleeps again.", dict[str, Any], query=router.WakeQuery, also=OF_MODELS),
    router.is_sleeping: Operation("Whether it sleeps.", Sleeping, query=router.ModelQuery, also=OF_MODELS),
}
