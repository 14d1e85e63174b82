"""OpenAI's responses API: items in, items out, stored for a while in memory.

`schema` parses bodies and has the rules for every request field, `items` reads input items and turns them into
messages, `asked` translates the other fields, `output` and `answer` translate back, `stored` stores responses.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.web.api.responses.responses import input_tokens, responses
from localllm.web.api.responses.stored import cancel, delete_response, input_items, show_response


def routes() -> list[ControllerRouterHandler]:
    return [responses, input_tokens, show_response, delete_response, cancel, input_items]
