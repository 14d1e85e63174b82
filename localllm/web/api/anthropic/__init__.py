"""Anthropic's dialect: messages, and counting their tokens.

`fields` has the rules for every request field, `schema` parses bodies, `conversation` and `tools` translate them,
`answer` translates back.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.anthropic.messages import count_tokens, messages


def routes() -> list[ControllerRouterHandler]:
    return [messages, count_tokens]
