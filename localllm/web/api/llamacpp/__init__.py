"""llama.cpp's own dialect: POST /completion and GET /props. Its other routes have OpenAI's shapes (openai/, router.py).

`schema` has the fields of a body, their rules and the answers; `completion` translates there and back.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.llamacpp.completion import completion, props


def routes() -> list[ControllerRouterHandler]:
    return [completion, props]
