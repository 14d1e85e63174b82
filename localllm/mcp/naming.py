"""The names by which the model calls tools: as servers name them, with the server in front where two names collide.

Models and APIs allow letters, digits, hyphens and underscores, at most 64; other characters become underscores.
Does not know: the protocol.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from localllm.mcp.values import ServerTool

MAX_NAME_CHARS = 64


def function_names(tools: Iterable[ServerTool], taken: Collection[str] = ()) -> dict[str, ServerTool]:
    """Return the tools by the name that the model uses. `taken`: names of other functions that it is offered."""
    tools = list(tools)
    plain = Counter(_allowed(tool.name) for tool in tools)
    found: dict[str, ServerTool] = {}
    for tool in tools:
        name = _allowed(tool.name)
        if plain[name] > 1 or name in taken:
            name = _allowed(f"{tool.server}_{name}")
        found[_free(name, found.keys() | set(taken))] = tool
    return found


def _allowed(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:MAX_NAME_CHARS] or "_"


def _free(name: str, taken: Collection[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name[: MAX_NAME_CHARS - 4]}_{number}"
    return free
