"""llama.cpp's own dialect: POST /completion and GET /props. Its other routes have OpenAI's shapes (openai/, router.py).

`schema` has the fields of a body and their rules, `completion` translates there and back, `props` describes a model.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.llamacpp.completion import completion
from localllm.web.api.llamacpp.props import props


def routes() -> list[ControllerRouterHandler]:
    return [completion, props]
