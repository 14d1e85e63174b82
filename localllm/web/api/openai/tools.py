"""`tools` and `tool_choice` as the `Tools` of a request."""

from __future__ import annotations

from localllm.served import ServedModel
from localllm.web.api.openai.schema import ChatBody
from localllm.web.api.tools import Tools, checked, chosen, read_tool, require_known_format


def tools_of(body: ChatBody, model: ServedModel) -> Tools:
    """Raises `RequestError` where a tool or the choice cannot be read."""
    offered = checked([read_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())], "tools")
    tools = chosen(offered, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if tools.offered:
        require_known_format(model, "tools")
    return tools
