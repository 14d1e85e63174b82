"""Translate `tools` and `tool_choice` into the `Tools` of a request."""

from __future__ import annotations

from localllm.serving.chat import Tools
from localllm.serving.served import ServedModel
from localllm.web.api.openai.schema import ChatBody
from localllm.web.api.tools import chosen, read_tool


def tools_of(body: ChatBody, model: ServedModel) -> Tools:
    """Return the tools of a body. Raises `RequestError` if a tool or the choice is invalid."""
    offered = [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return chosen(offered, body.tool_choice, body.parallel_tool_calls, model)
