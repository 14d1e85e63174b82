"""Ollama's dialect: chat, generate, embed, and its calls about models.

`fields` has the rules for every request field, `schema` parses bodies, `options` and `messages` translate them, `lines`
translates events back; `chat`, `embed`, `models` and `pull` have the handlers.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.ollama.chat import chat, generate
from localllm.web.api.ollama.embed import embed, embeddings
from localllm.web.api.ollama.models import blobs, copy, create, delete_model, ps, push, show, tags
from localllm.web.api.ollama.pull import pull


def routes() -> list[ControllerRouterHandler]:
    return [chat, generate, embed, embeddings, tags, ps, show, pull, delete_model, copy, push, create, blobs]
