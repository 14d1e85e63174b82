"""OpenAI's responses: items in, items out, kept for a while in memory.

`fields` says what becomes of every request field, `schema` reads bodies, `items` reads input items and makes messages
of them, `params` translates the rest, `output` and `answer` translate back, `store` keeps what was answered.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.responses.kept import cancel, delete_response, input_items, show_response
from localllm.web.api.responses.responses import input_tokens, responses


def routes() -> list[ControllerRouterHandler]:
    return [responses, input_tokens, show_response, delete_response, cancel, input_items]
