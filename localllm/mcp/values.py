"""The plain values of this room: a tool, the list of a server's tools, the result of a call, and the errors.

The model reads text only, so other content of a result is named with its size. The model calls a tool by its name,
with the server's name in front where two collide. Models and APIs allow letters, digits, hyphens and underscores, at
most 64; other characters become underscores.
Does not know: the protocol.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from localllm.errors import LocalLLMError, RequestError
from localllm.units import format_bytes, format_count


class ToolServerFailed(LocalLLMError):
    """A server of tools did not start, did not answer, or broke a bound."""

    status, code, type = 502, "tool_server_failed", "server_error"


class ToolRefused(RequestError):
    """A call that was not run: the tool is gone or has changed, or the arguments do not fit its schema."""

    status, code = 409, "tool_refused"


class McpMissing(LocalLLMError):
    """The package `mcp` is not installed."""

    status, code, type = 501, "mcp_missing", "unavailable_error"


@dataclass(frozen=True)
class ServerTool:
    """One tool of a server."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]  # JSON schema of the arguments
    origin: str  # the command or URL of the server

    @cached_property
    def digest(self) -> str:
        """A hash of what the user consented to: the server, the tool, its description and its schema."""
        text = json.dumps([self.origin, self.name, self.description, self.schema], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of a server that can be offered, and why others cannot."""

    tools: tuple[ServerTool, ...] = ()
    refused: tuple[str, ...] = ()

    def find(self, name: str) -> ServerTool | None:
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, as text."""

    text: str
    is_error: bool = False  # the tool reports an error; the model reads its text


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The end of a call that worked or failed, as text for the model."""

    text: str
    fails: Literal["", "tool", "call"] = ""  # "tool": the tool reports an error; "call": the call itself failed


MIN_RESULT_CHARS, MAX_RESULT_CHARS = 2_000, 64_000

_CUT = re.compile(r"\n\[cut: the result has ([\d,]+) characters, [\d,]+ are given\]$")


def limit_for(context_tokens: int) -> int:
    """Return the most characters of one result for a model: about half of its context."""
    return min(MAX_RESULT_CHARS, max(MIN_RESULT_CHARS, 2 * context_tokens))


def text_of(content: Sequence[Any], structured: Any = None) -> str:
    """Return the blocks of a result, each as text. `structured` is used where there are none."""
    if not content and structured is not None:
        return json.dumps(structured, indent=1, ensure_ascii=False)
    return "\n\n".join(_text(block) for block in content)


def bounded(text: str, limit: int) -> str:
    """Return the text; a long one is cut, and its last line says so. A text that was cut before may be cut again."""
    if len(text) <= limit:
        return text
    before = _CUT.search(text)
    whole = before[1] if before else format_count(len(text))
    return f"{text[:limit]}\n[cut: the result has {whole} characters, {format_count(limit)} are given]"


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}, {_size(block.data)}, not shown to the model]"
    if block.type == "resource_link":
        return f"[link to {block.name}: {block.uri}]"
    resource = block.resource
    if isinstance(getattr(resource, "text", None), str):
        return f"{resource.uri}:\n{resource.text}"
    return f"[file {resource.uri}, {_size(resource.blob)}, not shown to the model]"


def _size(base64: str) -> str:
    return format_bytes(len(base64) * 3 // 4)


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
