"""Anthropic's dialect: messages, and counting their tokens.

`schema` parses bodies and has the rules for every request field, `conversation` translates them, `answer` translates
back.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.anthropic.messages import count_tokens, messages


def routes() -> list[ControllerRouterHandler]:
    return [messages, count_tokens]
