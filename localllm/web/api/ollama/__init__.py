"""Ollama's dialect: chat, generate, embed, and its calls about models.

`schema` parses bodies and has the rules for every request field, `conversation` translates them, `lines` translates
events back; `chat`, `embed` and `models` have the handlers.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.ollama.chat import chat, generate
from localllm.web.api.ollama.embed import embed, embeddings
from localllm.web.api.ollama.models import blobs, copy, create, delete_model, ps, pull, push, show, tags


def routes() -> list[ControllerRouterHandler]:
    return [chat, generate, embed, embeddings, tags, ps, show, pull, delete_model, copy, push, create, blobs]
